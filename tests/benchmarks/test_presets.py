"""benchmarks/presets.py: each configuration uses the fastest layout that fits, or gives a reason; a page lists them."""

from pathlib import Path

import pytest

from benchmarks import presets

PAGE = Path(__file__).parents[2] / "docs/start/configurations.md"
SLOWEST = 1.05  # times the fastest layout


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


def test_the_page_has_their_tables(found):
    _, _, rest = PAGE.read_text("utf-8").partition(presets.BEGIN)
    assert rest.partition(presets.END)[0].strip() == presets.tables(found), "run: make presets"


def test_a_page_without_marks_is_refused_and_left_alone(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"nothing here\n{presets.BEGIN}\n")
    with pytest.raises(SystemExit, match=rf"has no {presets.BEGIN} \.\.\. {presets.END}"):
        presets.write(page, lambda: "table")
    assert page.read_text() == f"nothing here\n{presets.BEGIN}\n"
    page.write_text(f"before\n{presets.BEGIN}\nold\n{presets.END}\nafter\n")
    presets.write(page, lambda: "table")
    assert page.read_text() == f"before\n{presets.BEGIN}\ntable\n{presets.END}\nafter\n"
