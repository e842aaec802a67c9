"""First paragraphs of docstrings: each begins with a verb in the imperative, or says by a noun what the thing is.

No parser of English is needed to find the fragments that this tree used to have. Nearly all of them began with a word
that opens no such sentence ("Of what is numbered from 1 on", "Before the rest, as ..."), or with a small letter. A
docstring need not be there; one that is there passes.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("contract", "conf", "flows", "tasks", "trainer")
THIRD = "a verb in the third person"
# "Whether" is not among them: "Whether the file is whole." says what a function returns.
OPENS_NOTHING = {
    "a preposition": """
        about above across after against along among around as at before behind below beside besides between beyond by
        despite down during except for from in inside into like near of off on onto out outside over per since through
        throughout to toward under up upon via with within without
    """,
    "a conjunction": """
        although and because but either else if neither nor once or so than though unless until when where while yet
    """,
    "a question": """
        how what whatever which who whom whose why
    """,
    "a pronoun": """
        both enough he here it its none she such that their them there these they this those
    """,
    "an adverb": """
        also always again even just never not only otherwise then thus usually
    """,
    "a value": """
        empty false true zero
    """,
    "a participle": """
        asked called done made needed seen shown taken told used wanted written
    """,
    THIRD: """
        adds answers asks begins breaks brings builds calls carries changes checks closes compares computes copies
        decides deletes deploys does draws drops ends fetches fills finds follows gets gives goes has holds imports is
        keeps knows leaves lets loads looks makes means mirrors names needs opens passes prints puts raises reads
        refuses removes replaces returns runs saves says sends sets ships shows stands starts stops takes tells tries
        turns uses waits wants writes yields
    """,
}
KIND = {word: kind for kind, words in OPENS_NOTHING.items() for word in words.split()}


def problem(docstring: str) -> str | None:
    """What is wrong with a docstring's first paragraph; None where nothing is."""
    first = " ".join(docstring.strip().partition("\n\n")[0].split())
    words = [word.strip("\"'`,.:;()") for word in first.split()]
    if len(words) < 2:
        return "is one word"
    kind = KIND.get(words[0].lower())
    if kind and not (kind == THIRD and words[1] == "of"):  # "Names of files" and "Runs of one attempt" are nouns
        return f"begins with {kind}"
    if not first[0].isalpha() or words[0].islower():
        return "begins with no capital letter"
    if not first.endswith("."):
        return "has a first paragraph without a full stop"
    return None


def public(
    tree: ast.Module,
) -> Iterator[tuple[str, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    """The module and all in it that has a name without a leading underscore, by its name."""
    yield "", tree
    inner: list[tuple[str, ast.AST]] = [("", tree)]
    while inner:
        prefix, node = inner.pop()
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner.append((prefix, child))
            elif not child.name.startswith("_"):
                yield prefix + child.name, child
                inner.append((f"{prefix}{child.name}.", child))


def fragments(root: Path) -> list[str]:
    """A line for each public docstring that begins as none may."""
    found = []
    for path in sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py")):
        for name, node in public(ast.parse(path.read_text("utf-8"))):
            docstring = ast.get_docstring(node)
            if docstring and (wrong := problem(docstring)):
                found.append(f"{path.relative_to(root)}: {name or 'module'}: {wrong}: {docstring.partition('\n')[0]}")
    return found


def test_docstrings_say_what_a_thing_is_or_does():
    found = fragments(ROOT)
    assert not found, "see Style in CONTRIBUTING.md:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "docstring, wrong",
    [
        ("Of what is numbered from 1 on without gaps. By doubling and halving.", "a preposition"),
        ("Before the rest, as ranks are forked from a process that has no group yet.", "a preposition"),
        ("Until all are done, or one has failed.", "a conjunction"),
        ("What S3 refuses, in one line of our own words.", "a question"),
        ("Those of the file that still are what they were.", "a pronoun"),
        ("False where this attempt is somebody's already.", "a value"),
        ("Told to the controller as soon as the store takes it.", "a participle"),
        ("Takes a legal layout.", "a verb in the third person"),
        ("running, done or failed.", "no capital letter"),
        ("[m, k] times [k, n], `batch` times.", "no capital letter"),
        ("Forward.", "one word"),
        ("Lines of a log\n\nwhich go on.", "without a full stop"),
    ],
)
def test_fragment_is_found(tmp_path, docstring, wrong):
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/board.py").write_text(f'class Board:\n    def last(self):\n        """{docstring}"""\n')
    assert [line for line in fragments(tmp_path) if line.startswith("tasks/board.py: Board.last: ") and wrong in line]


def test_sentence_noun_and_private_fragment_pass(tmp_path):
    lines = ['"""Names of files that hold rows."""', "def last():", '    """Largest n for which exists(n)."""']
    lines += [
        "def whole():",
        '    """Whether a file is whole."""',
        "def _first():",
        '    """Of all."""',
        "def bare(): ...",
    ]
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/files.py").write_text("\n".join(lines))
    assert fragments(tmp_path) == []
