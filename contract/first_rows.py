"""Description of the first rows of data, as a file that trainer/first_rows.py writes and flows/new/ reads."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from contract import json_object
from contract.files import write_atomically


@dataclass(frozen=True)
class FirstRows:
    """Meaning, number and lengths of rows."""

    kind: str  # pairs, messages or text
    reason: str  # why the columns have this meaning, for users
    columns: dict[str, str]  # by meaning: input, output, context, messages, tools, system, text
    rows: int | None  # of all data, estimated unless `whole`; None = unknown
    whole: bool  # whether all rows were read
    read: int  # number of rows that were read
    tokens: list[int]  # of a sample of rows
    answers: list[int]  # tokens of the last answer of each
    guessed: str = ""  # reason for the columns, if they were guessed
    bad: int = 0  # unreadable or incomplete rows
    bad_sample: str = ""
    refused: int = 0  # rows of the sample that the template cannot express
    places: list[float] = field(default_factory=list)  # from 0 to 1, decide on each row's split; all rows or none
    template: str = ""  # plain, chat, jinja or text; "" = without a tokenizer, and lengths are guesses
    stop: str = ""  # text to end an answer, if the template has none; "" = the template ends it

    def write(self, path: Path) -> None:
        write_atomically(path, json.dumps(asdict(self)), durable=False)

    @classmethod
    def read_from(cls, path: Path) -> "FirstRows":
        return cls(**json_object.read(path))
