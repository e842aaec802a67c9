"""tasks/pages/data_report.py and what draws it: a report as a page, in which nothing that the data say has a
meaning."""

import copy
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from tasks.pages import data_report, markdown
from tasks.tracking import report_plots

NASTY = "a|b `code` </td><script>x</script> ![i](http://e.vil) \x00\x1b[1m \ud800\n\n# head"
LENGTHS = {"min": 3, "median": 7, "p95": 20, "max": 31}
REPORT = {
    "sources": [
        {"source": "rows|x.jsonl", "shape": "pairs", "reason": "columns q, a_b -> input, output", "rows": 1200}
    ],
    "rows": {"read": 1200, "kept": 1100, "not_chosen": 88, "training": 1000, "validation": 60, "test": 40},
    "dropped": {
        "not JSON": {
            "count": 11,
            "samples": [
                {"place": "rows|x.jsonl:17", "field": "", "shown": "expected `,` | at 9"},
                {"place": "rows|x.jsonl:23", "field": "input", "shown": "{"},
            ],
        },
        "longer than a sequence": {"count": 1, "samples": [{"place": "rows|x.jsonl:99", "field": "", "shown": "70"}]},
    },
    "tokens": {
        "training": {"rows": 1000, "tokens": 9000, "learned": 1500, **LENGTHS}
        | {"histogram": {"edges": [1, 2, 4, 8, 16, 32], "counts": [0, 100, 800, 0, 100]}},
        "validation": {"rows": 60, "tokens": 540, "learned": 90, **LENGTHS}
        | {"histogram": {"edges": [1, 32], "counts": [60]}},
        "test": {"rows": 40, "tokens": 360, "learned": 60, **LENGTHS}
        | {"histogram": {"edges": [1, 32], "counts": [40]}},
    },
    "truncated": {"rows": 3, "share": 0.0027, "tokens_cut": 1234},
    "packing": {"training": {"sequences": 150, "rows": 1000, "efficiency": 0.9375, "rows_per_sequence": 6.67}},
    "duplicates": {"exact": 5, "near": 7, "samples": [[4, 9]]},
    "overlap": {"exact": 1, "near": 2},
    "learned_share": 0.166667,
    "anomalies": {"holds <s>": {"count": 2, "samples": ["rows|x.jsonl:5", "rows|x.jsonl:8"]}},
    "template": {"kind": "chat", "text": "{{ m }}\n```x```", "sha256": "ab", "stop": None, "options": {}},
    "example": {"text": "hello there", "learned": [[6, 11]]},
    "warnings": ["2 rows: holds <s>, such as rows|x.jsonl:5"],
}

PAGE = """# some: data

1,100 of 1,200 rows: 1,000 training, 60 validation, 40 test; 9,900 tokens, 16.7% of them learned.

**Worth a look:**

- 2 rows: holds \\<s\\>, such as rows\\|x.jsonl:5

## Sources

| source | read as | why | rows |
|---|---|---|---|
| `rows¦x.jsonl` | pairs | columns q, a_b -\\> input, output | 1,200 |

## Left out

| reason | rows | such as |
|---|---|---|
| not JSON | 11 | `rows¦x.jsonl:17` `expected ',' ¦ at 9`<br>`rows¦x.jsonl:23` `input` `{` |
| longer than a sequence | 1 | `rows¦x.jsonl:99` `70` |
| not chosen, by data.rows or by weight | 88 |  |

## Tokens

| split | rows | tokens | learned | min | median | p95 | max |
|---|---|---|---|---|---|---|---|
| training | 1,000 | 9,000 | 1,500 | 3 | 7 | 20 | 31 |
| validation | 60 | 540 | 90 | 3 | 7 | 20 | 31 |
| test | 40 | 360 | 60 | 3 | 7 | 20 | 31 |

Tokens of a row, training:

```text
 2 -  3 | #####                                    100
 4 -  7 | ######################################## 800
 8 - 15 |                                          0
16 - 31 | #####                                    100
```

| packed | sequences | rows in each | filled with tokens |
|---|---|---|---|
| training | 150 | 6.7 | 93.8% |

- learned: 16.7% of the tokens
- prompt cut: 3 rows (0.3%), by 1,234 tokens in all
- duplicates: 5 exact, 7 near
- held-out rows like a training row: 1 exactly, 2 nearly

## Odd rows

| anomaly | rows | such as |
|---|---|---|
| holds \\<s\\> | 2 | `rows¦x.jsonl:5`<br>`rows¦x.jsonl:8` |

## Template

|  |  |
|---|---|
| `kind` | `chat` |
| `sha256` | `ab` |

````text
{{ m }}
```x```
````

## Example

The text in ⟦ ⟧ is learned.

```text
hello ⟦there⟧
```
"""


def changed(**parts) -> dict:
    """The report with other parts; None takes one away."""
    found = copy.deepcopy(REPORT) | parts
    return {key: value for key, value in found.items() if value is not None}


def test_the_page_of_a_report():
    assert data_report.page(REPORT, "some: data") == PAGE


def test_what_does_not_apply_is_left_out():
    rows = {"read": 4, "kept": 4, "training": 4, "validation": 0, "test": 0}
    empty = {"rows": 0, "tokens": 0, "learned": 0}
    training = {"rows": 4, "tokens": 0, "learned": 0}
    small = changed(
        rows=rows,
        dropped={},
        tokens={"training": training, "validation": empty, "test": empty},
        warnings=[],
        anomalies={},
        **dict.fromkeys(("packing", "example", "duplicates", "overlap", "truncated", "learned_share")),
    )
    page = data_report.page(small, "some")
    assert [line for line in page.splitlines() if line.startswith("#")] == [
        *("# some", "## Sources", "## Tokens", "## Template")
    ]
    assert "None" not in page
    assert data_report.tables(small) == report_plots.of_data(small) == {}
    assert "packing_efficiency" not in data_report.numbers(small)


def test_the_figures_that_say_most():
    assert data_report.numbers(REPORT) == {
        "rows_read": 1200,
        "rows_kept": 1100,
        "rows_left_out": 12,
        "tokens": {"training": 9000, "validation": 540, "test": 360},
        "tokens_training": 9000,
        "longest_row": 31,
        "learned_share": 0.166667,
        "truncated_share": 0.0027,
        "packing_efficiency": 0.9375,
        "rows_per_sequence": 6.67,
        "duplicates_exact": 5,
        "duplicates_near": 7,
        "overlap_exact": 1,
        "overlap_near": 2,
        "anomalies": 2,
    }


def test_samples_are_tables_with_their_places():
    tables = data_report.tables(REPORT)
    assert tables["left_out"][1] == {
        **{"reason": "not JSON", "rows": 11, "place": "rows|x.jsonl:23"},
        **{"field": "input", "shown": "{"},
    }
    assert tables["anomalies"][0] == {"anomaly": "holds <s>", "rows": 2, "place": "rows|x.jsonl:5"}


@pytest.mark.parametrize("name", ["token_lengths", "left_out", "packing"])
def test_figures_are_images(name, tmp_path):
    (tmp_path / "report.json").write_text(
        json.dumps(changed(dropped={NASTY[:20] + " $x": {"count": 1, "samples": []}}))
    )
    image = report_plots.of_data(json.loads((tmp_path / "report.json").read_text()))[name]
    assert image.startswith(b"\x89PNG") and struct.unpack(">II", image[16:24]) == (770, 440)


def test_nothing_that_the_data_say_has_a_meaning():
    sample = {"place": NASTY, "field": NASTY, "shown": NASTY}
    page = data_report.page(
        changed(
            sources=[{"source": NASTY, "shape": "pairs", "reason": NASTY, "rows": 1}],
            dropped={NASTY: {"count": 1, "samples": [sample]}},
            anomalies={NASTY: {"count": 1, "samples": [NASTY]}},
            warnings=[NASTY],
            template={"kind": NASTY, "text": NASTY + "\n````\n# head"},
            example={"text": NASTY + "\n`````\n# head", "learned": []},
        ),
        NASTY,
    )
    page.encode()
    assert "\x00" not in page and "\x1b" not in page
    parsed = MarkdownIt("commonmark", {"html": True}).enable("table").parse(page)
    inner = [token for block in parsed for token in [block, *(block.children or ())]]
    assert {token.content for token in inner if "html" in token.type} <= {"<br>"}
    assert not {"image", "link_open"} & {token.type for token in inner}
    assert [token.tag for token in inner if token.type == "heading_open"] == ["h1", *["h2"] * 6]
    assert len([token for token in inner if token.type == "fence"]) == 3
    assert len([token for token in inner if token.type == "table_open"]) == 6


def test_a_long_example_shows_both_ends():
    text = "a" * 9000 + "z"
    page = data_report.page(changed(example={"text": text, "learned": [[9000, 9001]]}), "some")
    assert len(page) < 8000 and "[...]" in page and "a⟦z⟧\n" in page


@given(st.text())
def test_code_is_one_span_of_one_line(text):
    found = markdown.code(text)
    assert found == "" or (found[0] == found[-1] == "`" and not set("`|\n\r\0") & set(found[1:-1]))
    assert len(found) <= markdown.SHOWN + 2


@given(st.text())
def test_a_block_ends_where_its_text_does(text):
    first, *lines, last = markdown.fenced(text).split("\n")
    assert first == last + "text" and set(last) == {"`"} and len(last) >= 3
    assert not any(line.strip().startswith(last) for line in lines)
    assert "\n".join(lines) == markdown.clean(text)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=24))
def test_a_histogram_has_a_line_for_each_bin(counts):
    found = {"edges": [2**number for number in range(len(counts) + 1)], "counts": counts}
    lines = data_report.histogram(found)
    assert sum(int(line.split()[-1].replace(",", "")) for line in lines) == sum(counts)
    assert all(("#" in line) == (not line.endswith(" 0")) for line in lines)


def test_copies_and_leaks_have_file_and_line_and_the_whole_list_a_name():
    leak = {"kind": "leak", "row": "a|b.jsonl:3", "split": "test", "like": "a|b.jsonl:9", "of": "training"}
    found = {"file": "alike.jsonl", "counts": {"leak": 1, "copy": 0}, "samples": {"leak": [leak | {"by": "prompt"}]}}
    page = data_report.page(REPORT | {"alike": found}, "data", "s3://bucket/prepare/1/files")
    assert "Rows that are like another row: leak 1. All of them: `s3://bucket/prepare/1/files/alike.jsonl`." in page
    assert "| leak | `a¦b.jsonl:3` | test | `a¦b.jsonl:9` | training | prompt |" in page
    assert data_report.tables(REPORT | {"alike": found})["alike"] == [leak | {"by": "prompt"}]
