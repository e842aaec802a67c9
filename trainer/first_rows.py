"""Look at the first rows of data: the meaning of columns, the number of rows, and their lengths in tokens.

    python -m trainer.first_rows CONF [key=value ...]

Reads some megabytes of data.source like a preparation, and the tokenizer in paths.model; without that folder, lengths
are estimated from characters. Prints the findings and writes them to paths.logs/first_rows.json. If column names have
no known meaning and two columns hold text, prompt and answer are guessed, and `guessed` gives the reason. Not covered:
data.mixture.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conf.schema.data import Part
from conf.schema.run import Run
from contract.faults import Fault
from contract.first_rows import FirstRows
from trainer.data.read import choose, shapes, sources
from trainer.data.read.shapes import Shape
from trainer.data.rows import Bad, Refused, Row
from trainer.data.tokens import anomalies, chat, templates, tokenizer
from trainer.data.tokens.templates import Template
from trainer.startup import entry
from trainer.startup.console import say

READ = 16 * 2**20  # bytes
ROWS = 20_000
TOKENISED = 1_000
PLACES = 5_000
LETTERS = 3.5  # characters per token, about
LONGEST = 2**30  # sequence length that never cuts a row


def main(run: Run) -> None:
    first_rows = look(run)
    folder = Path(run.paths.logs)
    folder.mkdir(parents=True, exist_ok=True)
    first_rows.write(folder / "first_rows.json")
    say(f"first-rows: {first_rows.kind}: {first_rows.reason}; {first_rows.rows} rows")


def check(run: Run) -> None:
    if len(run.data.parts) != 1 or run.data.mixture:
        raise Fault("data.source: this command needs exactly one source")


def look(run: Run) -> FirstRows:
    (part,) = run.data.parts
    values, place, count, whole = _read(part)
    raw, _ = _parted(values)
    shape, guessed = _detected(part, raw, place)
    rows = [row if isinstance(row, Bad) else shape.row(row) for row in values]
    good, bad = _parted(rows)
    if not good:
        raise Fault(f"{place}: none of the first {len(rows)} rows can be used: {_described(bad[0])}")
    template = _template(run, shape.kind)
    chosen = good[:: max(1, len(good) // TOKENISED)]
    tokens, answers, refused = _lengths(template, chosen)
    if not tokens:
        raise Fault(
            f"{place}: none of the first {len(chosen)} rows can be put into the template: {_described(refused[0])}"
        )
    return FirstRows(
        kind=shape.kind,
        reason=shape.reason,
        columns=shape.columns,
        guessed=guessed,
        rows=count,
        whole=whole,
        read=len(values),
        bad=len(bad),
        bad_sample=_described(bad[0]) if bad else "",
        refused=len(refused),
        tokens=tokens,
        answers=answers,
        places=sorted(choose.key(row) / choose.WHOLE for row in good) if whole and len(good) <= PLACES else [],
        template=template.kind if template else "",
        stop=_stop(template, chosen) if template else "",
    )


def _read(part: Part) -> tuple[list[Row | Bad], str, int | None, bool]:
    """Return the first rows, the name of their source, the number of all rows, and whether these are all."""
    _, place = sources.first(part)
    values: list[Row | Bad] = []
    size, whole = 0, True
    for chunk in sources.chunks(part, 0, lambda number: False):
        if size >= READ or len(values) >= ROWS:
            whole = False
            break
        values += chunk.load().values
        size += chunk.size
    if whole:
        return values, place, len(values), True
    if size:
        return values, place, round(len(values) * sources.total(part) / size), False
    from trainer.data.read import hub

    return values, place, hub.count(part), False


def _detected(part: Part, raw: Sequence[Row], place: str) -> tuple[Shape, str]:
    """Return the meaning of the columns, and the reason for prompt and answer if they had to be guessed."""
    first = raw[: sources.FIRST]
    try:
        return shapes.detect(part, first, place), ""
    except Fault:
        is_configured = part.input or part.output or part.messages or part.text or part.shape != "auto"
        guess = None if is_configured else by_letters(raw) or by_values(raw)
        if guess is None:
            raise
        question, answer, why = guess
        return shapes.detect(part.model_copy(update={"input": question, "output": answer}), first, place), why


def by_letters(raw: Sequence[Row]) -> tuple[str, str, str] | None:
    """Return the columns of a known pair whose names differ only in capitals and separators."""
    names = {"".join(filter(str.isalnum, name)).lower(): name for row in raw[: sources.FIRST] for name in row}
    pairs = [
        (names[one], names[two]) for one, known in shapes.PAIRS.items() for two in known if {one, two} <= names.keys()
    ]
    return (*pairs[0], "their names") if len(pairs) == 1 else None


def by_values(raw: Sequence[Row]) -> tuple[str, str, str] | None:
    """Return two columns of text if there are exactly two; one with few different values is the answer."""
    columns = {name: [row.get(name) for row in raw] for name in dict.fromkeys(name for row in raw for name in row)}
    texts = {name: [str(value) for value in values] for name, values in columns.items() if _is_text(values)}
    if len(texts) != 2:
        return None
    first, second = texts
    kinds = {name: len(set(values)) for name, values in texts.items()}
    for answer, question in ((second, first), (first, second)):
        if len(raw) >= sources.FIRST and kinds[answer] * 4 < kinds[question]:
            return question, answer, f"their values: {kinds[answer]} different ones of {kinds[question]} in {answer}"
    return first, second, "their order: they are the only two columns of text"


def _is_text(values: Sequence[Any]) -> bool:
    """Whether these are texts, and not numbers, dates or names of single rows."""
    texts = [value for value in values if isinstance(value, str) and value.strip()]
    if len(texts) < 0.5 * len(values) or not texts:
        return False
    worded = sum(any(map(str.isalpha, text)) for text in texts)
    single = sum(not any(map(str.isspace, text.strip())) for text in texts)
    is_name = single > 0.9 * len(texts) and len(set(texts)) > 0.9 * len(texts)
    return worded > 0.5 * len(texts) and not is_name


def _template(run: Run, kind: str) -> Template | None:
    """Return the template that preparation would use; None without a tokenizer."""
    if not Path(run.paths.model).is_dir():
        return None
    data = run.data.model_copy(update={"seq_length": LONGEST, "packed": False})
    return templates.choose(data, tokenizer.of(run), kind)


def _lengths(template: Template | None, rows: Sequence[Row]) -> tuple[list[int], list[int], list[Bad]]:
    """Return the tokens of rows and of each row's last answer, and the rows that the template refuses."""
    if template is None:
        counts = [sum(map(len, anomalies.texts(row))) for row in rows]
        answers = [len(anomalies.texts(row)[-1]) for row in rows]
        return [round(n / LETTERS) + 8 for n in counts], [round(n / LETTERS) + 2 for n in answers], []
    usable, refused = _parted(template.encode(rows))
    return [len(row.ids) for row in usable], [len(row.ids) - row.start for row in usable], refused


def _stop(template: Template, rows: Sequence[Row]) -> str:
    """Return the value for data.stop: the text that the template writes after an answer, if the answer has no end
    token.
    """
    few = rows[: sources.FIRST]
    encoded, refused = _parted(template.encode(few))
    endless = [] if refused else anomalies.find(template, encoded, few)[anomalies.ENDLESS]
    if not endless or template.kind != "chat":
        return ""
    turns = [{"role": role, "content": chat.MARK} for role in ("user", "assistant", "user")]
    try:
        text, _ = chat.render(template, turns, None)
    except Refused:
        return ""
    after = text.split(chat.MARK)[2].lstrip() if text.count(chat.MARK) == 3 else ""
    return next((name for name in sorted(template.special, key=len, reverse=True) if after.startswith(name)), "")


def _parted[T](rows: Sequence[T | Bad]) -> tuple[list[T], list[Bad]]:
    """Return the usable rows, and the others."""
    return [row for row in rows if not isinstance(row, Bad)], [row for row in rows if isinstance(row, Bad)]


def _described(bad: Bad) -> str:
    return ": ".join(filter(None, (bad.field, bad.reason, bad.shown)))


if __name__ == "__main__":
    entry.start(main, check, alone=True)
