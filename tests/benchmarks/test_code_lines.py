"""benchmarks/code_lines.py: comments, docstrings and blank lines do not count."""

from benchmarks import code_lines

TEXT = '''"""A docstring."""

# A comment.
def double(number: int) -> int:
    """Another docstring,
    of two lines."""
    text = """not
    a docstring"""
    return 2 * number  # counts once
'''


def test_only_lines_with_code_count():
    assert code_lines.code_lines(TEXT) == 4


def test_the_text_after_an_attribute_is_a_docstring():
    assert (
        code_lines.code_lines('class Key:\n    a: int = 1\n    """How many\n    there are."""\n    print("""no""")\n')
        == 3
    )


def test_a_file_counts_for_its_folders():
    lines = code_lines.counts(iter([("conf/a.py", TEXT), ("conf/rules/b.py", TEXT), ("conf/rules/deep/c.py", TEXT)]))
    assert lines == {"conf/": 12, "conf/rules/": 8}
    assert code_lines.table(lines, None, top=1).splitlines()[-1] == "| `conf/rules/` | 8 |"
