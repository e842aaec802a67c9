"""conf/presets.py: every configuration is at the fastest layout with room, or says why not; README has their table."""

from pathlib import Path

import pytest

from conf import presets

README = Path(__file__).parents[2] / "README.md"
SLOWEST = 1.05  # times the fastest that was found


@pytest.fixture(scope="module")
def found():
    return list(presets.presets())


def test_each_is_the_fastest_that_was_found_or_says_why_not(found):
    slow = [f"{one.name}: {one.ratio:.2f} times" for one in found if one.ratio > SLOWEST and not one.excuse]
    assert not slow, "python -m flows.plan NAME names the keys of a faster layout"
    assert not [one.name for one in found if one.excuse and one.ratio <= SLOWEST], "they say that they are slow"


def test_each_fits_and_each_but_an_fp8_release_can_be_evaluated(found):
    assert len(found) > 20
    for one in found:
        assert one.planned.fits and not one.planned.unserved, one.name


def test_readme_has_their_table(found):
    _, _, rest = README.read_text("utf-8").partition(presets.BEGIN)
    assert rest.partition(presets.END)[0].strip() == presets.table(found), "run: make presets"


def test_a_page_without_marks_is_refused_and_left_alone(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"nothing here\n{presets.BEGIN}\n")
    with pytest.raises(SystemExit, match=rf"has no {presets.BEGIN} \.\.\. {presets.END}"):
        presets.write(page, lambda: "table")
    assert page.read_text() == f"nothing here\n{presets.BEGIN}\n"
    page.write_text(f"before\n{presets.BEGIN}\nold\n{presets.END}\nafter\n")
    presets.write(page, lambda: "table")
    assert page.read_text() == f"before\n{presets.BEGIN}\ntable\n{presets.END}\nafter\n"
