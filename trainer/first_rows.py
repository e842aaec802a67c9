"""The first rows of data: what their columns mean, how many rows there are, and how long they are in tokens.

    python -m trainer.first_rows CONF [key=value ...]

Reads some megabytes of data.source as preparation would, and the tokenizer in paths.model; where no such folder is,
lengths are guesses from characters. Prints what was found, and writes it into paths.logs/first_rows.json. Columns whose
names say nothing are guessed where two of them hold text: `guessed` then says why. Not covered: data.mixture.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conf.schema.data import Part
from conf.schema.run import Run
from contract.faults import Fault
from contract.first_rows import FirstRows
from trainer.data.read import choose, shapes, sources
from trainer.data.rows import Bad, Row
from trainer.data.tokens import anomalies, chat, templates, tokenizer
from trainer.data.tokens.spans import Refused
from trainer.data.tokens.templates import Template
from trainer.startup import entry
from trainer.startup.console import say

READ = 16 * 2**20  # bytes
ROWS = 20_000
TOKENISED = 1_000
PLACES = 5_000
LETTERS = 3.5  # characters of a token, about
LONGEST = 2**30  # tokens of a row that is measured, not cut


def main(run: Run) -> None:
    found = look(run)
    folder = Path(run.paths.logs)
    folder.mkdir(parents=True, exist_ok=True)
    found.write(folder / "first_rows.json")
    say(f"first-rows: {found.kind}: {found.reason}; {found.rows} rows")


def check(run: Run) -> None:
    if len(run.data.parts) != 1 or run.data.mixture:
        raise Fault("data.source: one source is looked at; name it")


def look(run: Run) -> FirstRows:
    (part,) = run.data.parts
    values, place, count, whole = _read(part)
    raw = [row for row in values if not isinstance(row, Bad)]
    part, guessed = _named(part, raw, place)
    shape = shapes.detect(part, raw[: sources.FIRST], place)
    rows = [row if isinstance(row, Bad) else shape.row(row) for row in values]
    good = [row for row in rows if not isinstance(row, Bad)]
    bad = [row for row in rows if isinstance(row, Bad)]
    if not good:
        raise Fault(f"{place}: none of the first {len(rows)} rows can be used: {_told(bad[0])}")
    template = _template(run, shape.kind)
    chosen = good[:: max(1, len(good) // TOKENISED)]
    tokens, answers, refused = _lengths(template, chosen)
    if not tokens:
        raise Fault(f"{place}: none of the first {len(chosen)} rows can be put into the template: {_told(refused[0])}")
    return FirstRows(
        kind=shape.kind,
        reason=shape.reason,
        columns=shape.columns,
        guessed=guessed,
        rows=count,
        whole=whole,
        read=len(values),
        bad=len(bad),
        bad_sample=_told(bad[0]) if bad else "",
        refused=len(refused),
        refused_sample=_told(refused[0]) if refused else "",
        tokens=tokens,
        answers=answers,
        places=sorted(choose.key(row) / choose.WHOLE for row in good) if whole and len(good) <= PLACES else [],
        template=template.kind if template else "",
        stop=_stop(template, chosen) if template else "",
    )


def _read(part: Part) -> tuple[list[Row | Bad], str, int | None, bool]:
    """Rows of the first chunks, the place of the first, the number of all, and whether these are all."""
    _, _, place = sources.columns(part)
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


def _named(part: Part, raw: Sequence[Row], place: str) -> tuple[Part, str]:
    """The part with columns for prompt and answer, and the reason, where neither it nor their names say which."""
    if part.input or part.output or part.messages or part.text or part.shape != "auto":
        return part, ""
    try:
        shapes.detect(part, raw[: sources.FIRST], place)
        return part, ""
    except Fault as fault:
        found = by_letters(raw) or by_values(raw)
        if found is None:
            raise Fault(str(fault)) from None
        question, answer, why = found
        return part.model_copy(update={"input": question, "output": answer}), why


def by_letters(raw: Sequence[Row]) -> tuple[str, str, str] | None:
    """Columns that are called like a known pair but for capitals and spaces."""
    names = {"".join(filter(str.isalnum, name)).lower(): name for row in raw[: sources.FIRST] for name in row}
    found = [pair for pair in shapes.PAIRS if all(name in names for name in pair)]
    return (names[found[0][0]], names[found[0][1]], "their names") if len(found) == 1 else None


def by_values(raw: Sequence[Row]) -> tuple[str, str, str] | None:
    """Two columns of text, where there are no others: of these, a column of few different values is the answer."""
    columns = {name: [row.get(name) for row in raw] for name in dict.fromkeys(name for row in raw for name in row)}
    texts = {name: [str(value) for value in values] for name, values in columns.items() if _is_text(values)}
    if len(texts) != 2:
        return None
    first, second = texts
    kinds = {name: len(set(values)) for name, values in texts.items()}
    for answer, question in ((second, first), (first, second)):
        if len(raw) >= sources.FIRST and kinds[answer] * 4 < kinds[question]:
            return question, answer, f"their values: {kinds[answer]} different ones of {kinds[question]} in {answer}"
    return first, second, "their order: they are the only two of text"


def _is_text(values: Sequence[Any]) -> bool:
    """Whether these are texts, and neither numbers, dates nor names of single rows."""
    texts = [value for value in values if isinstance(value, str) and value.strip()]
    if len(texts) < 0.5 * len(values) or not texts:
        return False
    worded = sum(any(map(str.isalpha, text)) for text in texts)
    single = sum(not any(map(str.isspace, text.strip())) for text in texts)
    is_name = single > 0.9 * len(texts) and len(set(texts)) > 0.9 * len(texts)
    return worded > 0.5 * len(texts) and not is_name


def _template(run: Run, kind: str) -> Template | None:
    """The template that preparation would use; None where there is no tokenizer to ask."""
    folder = Path(run.paths.model)
    if not folder.is_dir():
        return None
    tokens = tokenizer.load(folder, run.model.trust_remote_code)
    if tokens.eos_token_id is None:
        raise Fault(f"{folder}: the tokenizer names no eos_token, which pads sequences")
    data = run.data.model_copy(update={"seq_length": LONGEST, "packed": False})
    return templates.choose(data, tokens, kind)


def _lengths(template: Template | None, rows: Sequence[Row]) -> tuple[list[int], list[int], list[Bad]]:
    """Tokens of rows, of the last answer of each, and the rows that the template refuses."""
    if template is None:
        counts = [sum(map(len, anomalies.texts(row))) for row in rows]
        answers = [len(anomalies.texts(row)[-1]) for row in rows]
        return [round(n / LETTERS) + 8 for n in counts], [round(n / LETTERS) + 2 for n in answers], []
    encoded = template.encode(rows)
    found = [one for one in encoded if not isinstance(one, Bad)]
    return (
        [len(one.ids) for one in found],
        [len(one.ids) - one.start for one in found],
        [one for one in encoded if isinstance(one, Bad)],
    )


def _stop(template: Template, rows: Sequence[Row]) -> str:
    """The text that data.stop should be: what the template writes behind an answer, where it ends it by nothing."""
    few = rows[: sources.FIRST]
    encoded = [one for one in template.encode(few) if not isinstance(one, Bad)]
    endless = template.checks(encoded, few)["answer without an end"] if len(encoded) == len(few) else []
    if not endless or template.kind != "chat":
        return ""
    turns = [{"role": role, "content": chat.MARK} for role in ("user", "assistant", "user")]
    try:
        text, _ = chat.render(template, turns, None)
    except Refused:
        return ""
    behind = text.split(chat.MARK)[2].lstrip() if text.count(chat.MARK) == 3 else ""
    return next((name for name in sorted(template.special, key=len, reverse=True) if behind.startswith(name)), "")


def _told(bad: Bad) -> str:
    return ": ".join(filter(None, (bad.field, bad.reason, bad.shown)))


if __name__ == "__main__":
    entry.start(main, check, alone=True)
