"""The first rows of data, described in a file: trainer/first_rows.py writes it, flows/new/ reads it."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from contract import json_object
from contract.files import write_atomically


@dataclass(frozen=True)
class FirstRows:
    """Meaning, number and lengths of rows."""

    kind: str  # pairs, messages or text
    reason: str  # why the columns mean what they do, for people
    columns: dict[str, str]  # of what: input, output, context, messages, tools, system, text
    rows: int | None  # of all data, estimated unless `whole`; None = unknown
    whole: bool  # all rows were read
    read: int
    tokens: list[int]  # of a sample of rows
    answers: list[int]  # tokens of the last answer of each
    guessed: str = ""  # why the columns were taken, where neither their names nor the caller say so
    bad: int = 0  # rows that cannot be read, or lack something
    bad_sample: str = ""
    refused: int = 0  # rows of the sample that the template cannot hold
    refused_sample: str = ""
    places: list[float] = field(default_factory=list)  # from 0 to 1, which decide on each row's split; of all or none
    template: str = ""  # plain, chat, jinja or text; "" = no tokenizer was asked, and lengths are guesses
    stop: str = ""  # what ends an answer, where the template ends it by nothing; "" = it does

    def write(self, path: Path) -> None:
        write_atomically(path, json.dumps(asdict(self)), durable=False)

    @classmethod
    def read_from(cls, path: Path) -> "FirstRows":
        return cls(**json_object.read(path))
