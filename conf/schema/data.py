"""Section `data` of a run's YAML: where rows come from, what they mean, and how they become sequences of tokens."""

from typing import Annotated, Literal

from pydantic import Field

from conf.schema.bearing import NOWHERE, bears
from conf.schema.sections import Count, Number, Place, Section, Seed, Text

Column = Annotated[str, Field(min_length=1, pattern=r"^[^{}]+$")]

PLAIN = r"[^{}]*\{input\}[^{}]*\{output\}"


class Rows(Section):
    """Place of the rows, and which of their columns hold what."""

    source: Annotated[Place | None, bears(derived="prepare")] = Field(
        default=None,
        description="Hugging Face data set id, file, folder of files, s3:// URI, tiny://tickets, "
        "tiny://mistaken-tickets, tiny://ranked-tickets or tiny://texts; files are JSON lines, JSON, CSV, TSV, Parquet "
        "or Arrow, compressed or not, or tokens for pretraining in Megatron's .bin and .idx, which their prefix "
        "names too",
    )
    revision: Annotated[Text, bears(derived="prepare")] = Field(
        default="main", description="branch, tag or commit of the data set on the Hub"
    )
    config: Annotated[Text | None, bears(derived="prepare")] = Field(
        default=None, description="configuration of the data set on the Hub"
    )
    split: Annotated[Text, bears(derived="prepare")] = Field(
        default="train", description="split of the data set on the Hub"
    )
    shape: Annotated[Literal["auto", "pairs", "messages", "sharegpt", "preference", "text"], bears("source")] = Field(
        default="auto",
        description="pairs = a prompt and its answer; messages, sharegpt = conversations; preference = a chosen and a "
        "rejected answer; text = for pretraining; auto = told from the columns",
    )
    input: Annotated[Column | None, bears("source", absent=None)] = Field(
        default=None, description="column that holds the prompt; a.b = b inside of a"
    )
    output: Annotated[Column | None, bears("source", absent=None)] = Field(
        default=None, description="column that holds the answer"
    )
    messages: Annotated[Column | None, bears("source", absent=None)] = Field(
        default=None, description="column that holds the conversation"
    )
    tools: Annotated[Column | None, bears("source", absent=None)] = Field(
        default=None, description="column that holds the tools that a conversation may call"
    )
    system: Annotated[Column | None, bears("source", absent=None)] = Field(
        default=None, description="column that holds the system prompt"
    )
    text: Annotated[Column | None, bears("source", absent=None)] = Field(
        default=None, description="column that holds the text, for pretraining"
    )


class Part(Rows):
    """One source of a mixture."""

    weight: Annotated[float, bears("source")] = Field(
        default=1.0, gt=0, description="share of the mixture's rows, relative to the other weights"
    )


class Data(Rows):
    """Rows, and how they become sequences of tokens."""

    mixture: Annotated[tuple[Part, ...], bears(derived="prepare")] = Field(
        default=(), strict=False, description="several sources with weights, in place of data.source"
    )
    rows: Annotated[Count | None, bears("prepare")] = Field(
        default=None, description="take this many rows, chosen by their content; null = all"
    )
    rows_seed: Annotated[Number, bears("prepare")] = Field(default=0, description="another seed chooses other rows")
    validation: Annotated[float, bears("prepare")] = Field(
        default=0.05, ge=0, lt=1, description="share of rows that validate during training"
    )
    test: Annotated[float, bears("prepare")] = Field(
        default=0.05, ge=0, lt=1, description="share of rows held out for evaluation"
    )
    duplicates: Annotated[Literal["keep", "drop"], bears("prepare")] = Field(
        default="keep", description="rows that have occurred before"
    )
    near_copies: Annotated[Literal["keep", "drop"], bears("prepare", absent="keep")] = Field(
        default="keep", description="rows of a split that are nearly an earlier one of it"
    )
    leaks: Annotated[Literal["keep", "drop"], bears("prepare", absent="keep")] = Field(
        default="keep", description="rows of training that are nearly a row held out, or have its prompt"
    )
    bad_rows: Annotated[Literal["error", "drop"], bears("prepare")] = Field(
        default="error", description="rows that cannot be read or lack something; drop counts and shows them"
    )
    too_long: Annotated[Literal["drop", "truncate", "error"], bears("prepare")] = Field(
        default="drop", description="rows longer than a sequence; truncate cuts the prompt, never an answer"
    )
    seq_length: Annotated[int, bears("prepare", "train")] = Field(
        ge=2, le=2**24, description="tokens per sequence; a packed sequence holds several rows"
    )
    packed: Annotated[bool, bears("prepare", "train")] = Field(
        default=False, description="several rows per sequence, attention kept apart: no padding"
    )
    template: Annotated[str, bears("prepare")] = Field(
        default="auto",
        pattern=rf"^(auto|chat|[^{{}}]+\.jinja|{PLAIN})$",
        description="chat = the tokenizer's chat template; a text with {input} once, {output} once and last; a file "
        "NAME.jinja; auto = chat where the tokenizer has a template, else {input} {output}",
    )
    template_options: Annotated[dict[str, bool | int | str], bears("prepare")] = Field(
        default={}, description="variables for a chat template, such as {enable_thinking: false}"
    )
    stop: Annotated[str | None, bears("prepare")] = Field(
        default=None,
        description="text learned at the end of the last answer; null = what the template ends it with, or the end of "
        "text where it is no chat template",
    )
    loss_on: Annotated[Literal["answer", "assistant", "all"], bears("prepare")] = Field(
        default="assistant",
        description="tokens that count in the loss: the last answer, every turn of the assistant, or all",
    )
    workers: Annotated[int, NOWHERE] = Field(
        default=0, ge=0, le=1024, description="loader processes per rank; 0 = none, enough for token files"
    )
    processes: Annotated[int | None, NOWHERE] = Field(
        default=None, ge=1, le=1024, description="of preparation; null = one per core"
    )
    seed: Annotated[Seed, bears("prepare", "train")] = Field(
        default=1234, description="order of the sequences, and which rows share one; Megatron's default"
    )

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # template_options is a dict

    @property
    def parts(self) -> tuple[Part, ...]:
        """The sources, one or several."""
        if self.mixture:
            return self.mixture
        return (Part(**{key: getattr(self, key) for key in Rows.model_fields}),) if self.source else ()
