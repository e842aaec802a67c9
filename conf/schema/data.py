"""Section `data` of a run's YAML: the sources of rows, their columns, and their conversion to sequences of tokens."""

from typing import Annotated, Literal

from pydantic import Field

from conf.schema.bearing import NOWHERE, bears
from conf.schema.sections import Count, Number, Place, Section, Seed, Text

Column = Annotated[str, Field(min_length=1, pattern=r"^[^{}]+$")]

PLAIN = r"[^{}]*\{input\}[^{}]*\{output\}"


class Rows(Section):
    """Source of the rows, and the meaning of their columns."""

    source: Annotated[Place | None, bears(derived="prepare")] = None
    """Hugging Face data set id, file, folder of files, s3:// URI, tiny://tickets, tiny://mistaken-tickets,
    tiny://ranked-tickets or tiny://texts; files are JSON lines, JSON, CSV, TSV, Parquet or Arrow, compressed or not, or
    tokens for pretraining in Megatron's .bin and .idx, also named by their common prefix"""
    revision: Annotated[Text, bears(derived="prepare")] = "main"
    """branch, tag or commit of the data set on the Hub"""
    config: Annotated[Text | None, bears(derived="prepare")] = None
    """configuration of the data set on the Hub"""
    split: Annotated[Text, bears(derived="prepare")] = "train"
    """split of the data set on the Hub"""
    shape: Annotated[Literal["auto", "pairs", "messages", "sharegpt", "preference", "text"], bears("source")] = "auto"
    """pairs = a prompt and its answer; messages, sharegpt = conversations; preference = a chosen and a rejected answer;
    text = for pretraining; auto = determined from the columns"""
    input: Annotated[Column | None, bears("source", absent=None)] = None
    """column of the prompt; a.b = b inside of a"""
    output: Annotated[Column | None, bears("source", absent=None)] = None
    """column of the answer"""
    messages: Annotated[Column | None, bears("source", absent=None)] = None
    """column of the conversation"""
    tools: Annotated[Column | None, bears("source", absent=None)] = None
    """column of the tools that a conversation may call"""
    system: Annotated[Column | None, bears("source", absent=None)] = None
    """column of the system prompt"""
    text: Annotated[Column | None, bears("source", absent=None)] = None
    """column of the text, for pretraining"""


class Part(Rows):
    """One source of a mixture."""

    weight: Annotated[float, bears("source")] = Field(default=1.0, gt=0)
    """share of the mixture's rows, relative to the other weights"""


class Data(Rows):
    """Rows, and how they become sequences of tokens."""

    mixture: Annotated[tuple[Part, ...], bears(derived="prepare")] = Field(default=(), strict=False)
    """several sources with weights, instead of data.source"""
    rows: Annotated[Count | None, bears("prepare")] = None
    """use this many rows, selected by their content; null = all"""
    rows_seed: Annotated[Number, bears("prepare")] = 0
    """seed of the selection of rows"""
    validation: Annotated[float, bears("prepare")] = Field(default=0.05, ge=0, lt=1)
    """share of rows that validate during training"""
    test: Annotated[float, bears("prepare")] = Field(default=0.05, ge=0, lt=1)
    """share of rows held out for evaluation"""
    duplicates: Annotated[Literal["keep", "drop"], bears("prepare")] = "keep"
    """exact copies of earlier rows"""
    near_copies: Annotated[Literal["keep", "drop"], bears("prepare", absent="keep")] = "keep"
    """rows that are nearly equal to an earlier row of the same split"""
    leaks: Annotated[Literal["keep", "drop"], bears("prepare", absent="keep")] = "keep"
    """rows of training that are nearly equal to a held-out row, or have its prompt"""
    bad_rows: Annotated[Literal["error", "drop"], bears("prepare")] = "error"
    """unreadable or incomplete rows; drop counts and reports them"""
    too_long: Annotated[Literal["drop", "truncate", "error"], bears("prepare")] = "drop"
    """rows longer than a sequence; truncate cuts the prompt, never an answer"""
    seq_length: Annotated[int, bears("prepare", "train")] = Field(ge=2, le=2**24)
    """tokens per sequence; a packed sequence contains several rows"""
    packed: Annotated[bool, bears("prepare", "train")] = False
    """several rows per sequence with separate attention: no padding"""
    template: Annotated[str, bears("prepare")] = Field(
        default="auto", pattern=rf"^(auto|chat|[^{{}}]+\.jinja|{PLAIN})$"
    )
    """chat = the tokenizer's chat template; a text with {input} once, and {output} once at its end; a file NAME.jinja;
    auto = chat if the tokenizer has a template, else {input} {output}"""
    template_options: Annotated[dict[str, bool | int | str], bears("prepare")] = Field(default={})
    """variables for a chat template, such as {enable_thinking: false}"""
    stop: Annotated[str | None, bears("prepare")] = None
    """text learned at the end of the last answer; null = the template's end of an answer, or the end of text without a
    chat template"""
    loss_on: Annotated[Literal["answer", "assistant", "all"], bears("prepare")] = "assistant"
    """tokens that count in the loss: the last answer, every turn of the assistant, or all"""
    workers: Annotated[int, NOWHERE] = Field(default=0, ge=0, le=1024)
    """loader processes per rank; 0 = none, enough for token files"""
    processes: Annotated[int | None, NOWHERE] = Field(default=None, ge=1, le=1024)
    """processes of preparation; null = one per core"""
    seed: Annotated[Seed, bears("prepare", "train")] = 1234
    """seed of the order of sequences and of packing; Megatron's default"""

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # template_options is a dict

    @property
    def parts(self) -> tuple[Part, ...]:
        """The sources, one or several."""
        if self.mixture:
            return self.mixture
        return (Part(**{key: getattr(self, key) for key in Rows.model_fields}),) if self.source else ()
