"""Section `data` of a run's YAML: where rows come from, what they mean, and how they become sequences of tokens."""

from typing import Annotated, Literal

from pydantic import Field

from conf.schema.sections import Count, Number, Place, Section, Seed, Text

Column = Annotated[str, Field(min_length=1, pattern=r"^[^{}]+$")]

PLAIN = r"[^{}]*\{input\}[^{}]*\{output\}"


class Rows(Section):
    """Place of the rows, and which of their columns hold what."""

    source: Place | None = Field(
        default=None,
        description="Hugging Face data set id, file, folder of files, s3:// URI, or tiny://tickets; files are JSON "
        "lines, JSON, CSV, TSV, Parquet or Arrow, compressed or not",
    )
    revision: Text = Field(default="main", description="branch, tag or commit of the data set on the Hub")
    config: Text | None = Field(default=None, description="configuration of the data set on the Hub")
    split: Text = Field(default="train", description="split of the data set on the Hub")
    shape: Literal["auto", "pairs", "messages", "sharegpt", "text"] = Field(
        default="auto",
        description="pairs = a prompt and its answer; messages, sharegpt = conversations; text = for pretraining; "
        "auto = told from the columns",
    )
    input: Column | None = Field(default=None, description="column that holds the prompt; a.b = b inside of a")
    output: Column | None = Field(default=None, description="column that holds the answer")
    messages: Column | None = Field(default=None, description="column that holds the conversation")
    tools: Column | None = Field(default=None, description="column that holds the tools that a conversation may call")
    system: Column | None = Field(default=None, description="column that holds the system prompt")
    text: Column | None = Field(default=None, description="column that holds the text, for pretraining")


class Part(Rows):
    """One source of a mixture."""

    weight: float = Field(default=1.0, gt=0, description="share of the mixture's rows, relative to the other weights")


class Data(Rows):
    """Rows, and how they become sequences of tokens."""

    mixture: tuple[Part, ...] = Field(
        default=(), strict=False, description="several sources with weights, in place of data.source"
    )
    rows: Count | None = Field(default=None, description="take this many rows, chosen by their content; null = all")
    rows_seed: Number = Field(default=0, description="another seed chooses other rows")
    validation: float = Field(default=0.05, ge=0, lt=1, description="share of rows that validate during training")
    test: float = Field(default=0.05, ge=0, lt=1, description="share of rows held out for evaluation")
    duplicates: Literal["keep", "drop"] = Field(default="keep", description="rows that have occurred before")
    bad_rows: Literal["error", "drop"] = Field(
        default="error", description="rows that cannot be read or lack something; drop counts and shows them"
    )
    too_long: Literal["drop", "truncate", "error"] = Field(
        default="drop", description="rows longer than a sequence; truncate cuts the prompt, never an answer"
    )
    seq_length: Count = Field(description="tokens per sequence; a packed sequence holds several rows")
    packed: bool = Field(default=False, description="several rows per sequence, attention kept apart: no padding")
    template: str = Field(
        default="auto",
        pattern=rf"^(auto|chat|[^{{}}]+\.jinja|{PLAIN})$",
        description="chat = the tokenizer's chat template; a text with {input} once, {output} once and last; a file "
        "NAME.jinja; auto = chat where the tokenizer has a template, else {input} {output}",
    )
    template_options: dict[str, bool | int | str] = Field(
        default={}, description="variables for a chat template, such as {enable_thinking: false}"
    )
    stop: str | None = Field(
        default=None,
        description="text learned at the end of the last answer; null = what the template ends it with, or the end of "
        "text where it is no chat template",
    )
    loss_on: Literal["answer", "assistant", "all"] = Field(
        default="assistant",
        description="tokens that count in the loss: the last answer, every turn of the assistant, or all",
    )
    workers: int = Field(
        default=0, ge=0, le=1024, description="loader processes per rank; 0 = none, enough for token files"
    )
    processes: Count | None = Field(default=None, description="of preparation; null = one per core")
    seed: Seed = Field(default=1234, description="order of the sequences, and which rows share one; Megatron's default")

    def __hash__(self) -> int:
        return hash(self.model_dump_json())  # template_options is a dict

    @property
    def parts(self) -> tuple[Part, ...]:
        """The sources, one or several."""
        if self.mixture:
            return self.mixture
        return (Part(**{key: getattr(self, key) for key in Rows.model_fields}),) if self.source else ()
