"""Choose every value of a new configuration, with a reason for each. The module reads no files.

    choose(name, model, rows, machine, given) -> {key: Choice}     all but the layout
    with_layout(choices, run, how)                                 add the layout that the planner chose

Values that the caller sets are kept, and later choices follow from them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from conf import noise
from conf.model_facts import ModelFacts
from conf.schema.named import SUBMITTING, WORKERS
from conf.schema.run import Run
from conf.schema.sections import Promote
from contract.faults import Fault
from contract.first_rows import FirstRows
from flows.new.machine import Machine
from flows.new.model import Model, amount

FEWEST = 20  # rows that can be split into training, validation and test
UNKNOWN = 10_000  # rows, if their number is unknown
LONGEST, LONGEST_ON_CPU = 8192, 2048  # tokens of a sequence, unless the caller sets them
PACK = 4096  # tokens of a packed sequence
PACKED_FROM = 256  # packed sequences of an epoch; with fewer, each row gets a sequence
MOST_BAD = 0.1  # of the rows; with more, data.source or its columns are probably wrong
# Models below this number of parameters, with few rows: the steps that they need to learn a task, and the most epochs.
# 0.9M parameters and 210 rows: validation loss 0.98 after 78 steps (3 epochs), 0.45 after 260 (10).
SMALL, STEPS, MOST_EPOCHS = 2e9, 200, 10
SHARES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
TESTED = 200  # test rows at most, as in evaluate.rows
SHORT = 12  # tokens of an answer; up to this length there is one right wording
MANY_EXPERTS = 32
KINDS = {"lora": "LoRA", "dora": "DoRA", "none": "all weights"}
# Models below this number of parameters: the highest learning rate of LoRA and DoRA, and of training all weights.
RATES = ((1e7, 5e-3, 2e-3), (1e8, 2e-3, 5e-4), (1e9, 5e-4, 5e-5), (2e10, 2e-4, 1e-5), (float("inf"), 1e-4, 5e-6))


@dataclass(frozen=True)
class Choice:
    value: Any
    why: str


@dataclass
class Choices:
    """Choices by dotted key, in the order in which they are made."""

    given: dict[str, Any]
    made: dict[str, Choice] = field(default_factory=dict)
    sequences: int = 1  # about, of training in an epoch

    def put(self, key: str, value: Any, why: str) -> Any:
        """Choose the value, unless the caller set the key. Return the value that the configuration gets."""
        choice = Choice(self.given[key], "as asked") if key in self.given else Choice(value, why)
        self.made[key] = choice
        return choice.value

    def get(self, key: str, default: Any) -> Any:
        return self.made[key].value if key in self.made else self.given.get(key, default)


@dataclass(frozen=True)
class Lengths:
    """Length of the sequences that the rows make, and the rows in each."""

    seq_length: int
    packed: bool
    each: float  # rows of a sequence; below 1 if a text makes several
    why: str
    why_packed: str


def choose(name: str, model: Model, rows: FirstRows, machine: Machine, given: dict[str, Any]) -> Choices:
    found = Choices(given)
    count = UNKNOWN if rows.rows is None else rows.rows
    if count < FEWEST:
        raise Fault(f"data.source: {count} rows; {FEWEST} or more can be split into training, validation and test")
    if rows.bad > MOST_BAD * rows.read:
        raise Fault(f"data.source: {rows.bad} of the first {rows.read} rows cannot be used: {rows.bad_sample}")
    found.put("name", name, "of the run's folder, its pages and the registered model")
    found.made["model.source"] = Choice(model.source, model.size)
    _data(found, rows, count)
    most = min(model.context or LONGEST, LONGEST if machine.gpu.cuda else LONGEST_ON_CPU)
    made = lengths(rows, count, most, machine.gpu.cuda, given)
    found.put("data.seq_length", made.seq_length, made.why)
    found.put("data.packed", made.packed, made.why_packed)
    batch = given.get("train.global_batch") or global_batch(count * 0.85 / made.each, machine.gpus)
    validating = _splits(found, rows, count, made, batch)
    kind = _adapter(found, model.facts)
    found.put("hardware.gpu", machine.kind, machine.why)
    _training(found, rows, count, made, batch, validating, model.parameters)
    if machine.gpu.cuda:
        found.put("train.precision", "bf16", "half of fp32's memory, and fast on GPUs")
    else:
        found.put("train.precision", "fp32", "a CPU computes bf16 slower")
    found.put(
        "optimizer.lr", rate(kind, model.parameters), f"usual for {KINDS.get(kind, kind)} of {amount(model.parameters)}"
    )
    if "optimizer.warmup_steps" not in given:
        found.put("optimizer.warmup", 0.05, "share of the steps in which the learning rate rises")
    found.put("checkpoint.save_every", 0.2, "share of the steps: five; an interrupted run resumes from the last")
    found.put("checkpoint.keep", 2, "older ones are removed")
    _evaluation(found, rows, model, machine)
    if machine.nodes > 1:
        found.put("gang.engine", WORKERS, f"a worker on each host starts its part; or {', '.join(SUBMITTING)}")
    if any(key.startswith("layout.") for key in given):
        found.put("layout.nodes", machine.nodes, "hosts")
        found.put("layout.gpus_per_node", machine.per_node, "of each host")
    for key in given:
        found.made.setdefault(key, Choice(given[key], "as asked"))
    return found


def _data(found: Choices, rows: FirstRows, count: int) -> None:
    size = f"{count:,} rows" if rows.whole else f"some {count:,} rows"
    size = size if rows.rows is not None else "its rows are not counted"
    found.made["data.source"] = Choice(found.given["data.source"], f"{size}; {rows.reason.partition(':')[0]}")
    if rows.guessed:
        for key in ("input", "output"):
            found.put(f"data.{key}", rows.columns[key], f"guessed from {rows.guessed}; check it")
    if rows.kind == "text":
        return
    words = {
        "chat": "the tokenizer has a chat template, which is used",
        "plain": "the tokenizer has no chat template: prompt, space, answer",
        "": "the tokenizer's chat template, if it has one",
    }
    found.put("data.template", "auto", words.get(rows.template, "the requested template"))
    if rows.stop:
        found.put("data.stop", rows.stop, "the chat template does not end an answer; the model learns to stop here")
    if rows.bad:
        why = f"{rows.bad} of the first {rows.read} rows cannot be used, as: {rows.bad_sample}"
        found.put("data.bad_rows", "drop", why)


def lengths(rows: FirstRows, count: int, most: int, cuda: bool, given: dict[str, Any]) -> Lengths:
    mean = sum(rows.tokens) / len(rows.tokens)
    sample = "" if rows.template else ", guessed from characters"
    if rows.kind == "text":
        length = given.get("data.seq_length") or min(most, PACK if cuda else 512)
        why = f"texts are cut into pieces of this length; they have {mean:.0f} tokens on average{sample}"
        return Lengths(length, False, length / mean, why, "texts fill whole sequences")
    longest = max(rows.tokens) if rows.whole and len(rows.tokens) == rows.read else ceil(max(rows.tokens) * 1.2)
    asked = given.get("data.seq_length")
    length = asked or min(_up(longest), most)
    cut = sum(tokens > length for tokens in rows.tokens) / len(rows.tokens)
    if cut == 1:
        raise Fault(f"data.seq_length: {length}, and all rows are longer: the shortest has {min(rows.tokens)} tokens")
    why = f"the longest row has {max(rows.tokens)} tokens, the average one {mean:.0f}{sample}"
    why += f"; {cut:.1%} of rows are longer and left out" if cut else ""
    room = asked or max(length, min(PACK, most))
    if given.get("data.packed", cuda and count * 0.85 * mean / room >= PACKED_FROM and mean <= room / 2):
        each = room / mean
        why_packed = f"{each:.0f} rows share a sequence, and no GPU computes padding"
        return Lengths(room, True, each, why, why_packed)
    few = "too few rows to share sequences" if cuda else "a row is a sequence"
    return Lengths(length, False, 1, why, few if mean <= room / 2 else "rows are nearly as long as sequences")


def _up(tokens: int) -> int:
    """Return the number of tokens, rounded up to a length that can be divided into equal parts."""
    step = next(step for limit, step in ((512, 64), (4096, 256), (float("inf"), 1024)) if tokens <= limit)
    return ceil(tokens / step) * step


def global_batch(sequences: float, gpus: int) -> int:
    """Return the sequences of a step: 8 to 32, if possible 50 steps per epoch and a multiple of the GPUs."""
    batch = 8
    while batch < 32 and sequences / (2 * batch) >= 50:
        batch *= 2
    while batch > 1 and sequences / batch < 5:
        batch //= 2
    shared = ceil(batch / gpus) * gpus  # then each GPU can have a sequence
    return shared if sequences / shared >= 10 else batch


def _splits(found: Choices, rows: FirstRows, count: int, lengths: Lengths, batch: int) -> int:
    """Choose the rows that are held out, and return the number of batches for validation."""
    tested = 0.0
    if rows.kind != "text":
        wanted = _tested(found, count)
        share = held_out(rows.places, count, wanted, 0.0) or 0.1
        held = f"some {count * share:,.0f} rows that training never sees: base and tuned model answer them"
        tested = found.put("data.test", share, held)
    else:
        found.put("data.test", 0.0, "texts have no answers to compare")
    needed = ceil(batch * lengths.each * (1.2 if lengths.packed else 1))
    share = held_out(rows.places, count, needed, tested)
    if share is None:
        found.put("data.validation", 0.0, f"too few rows for a batch of {batch} next to training")
        return 0
    share = found.put("data.validation", share, f"some {count * share:,.0f} rows, enough for a batch of {batch}")
    there = _between(rows.places, tested, tested + share) if rows.places else count * share * 0.8
    return max(1, min(10, int(there / lengths.each / batch)))


def _tested(found: Choices, count: int) -> int:
    """Return the number of test rows: enough to show a gain of noise.NOTABLE, but at most a fifth if rows are few."""
    confidence = found.given.get("promote.confidence", Promote().confidence)
    enough = max(10, count // 20, noise.needed(noise.NOTABLE, confidence))
    return min(TESTED, enough, max(count // 5, noise.fewest(confidence)))


def held_out(places: Sequence[float], count: int, wanted: int, start: float) -> float | None:
    """Return the smallest share that holds `wanted` rows, or None if no share is large enough.

    A row's place between 0 and 1 decides on its split. If places are unknown, the share includes a margin.
    """
    for share in SHARES:
        if places and _between(places, start, start + share) >= wanted:
            return share
        if not places and count * share >= 1.3 * wanted + 10:
            return share
    return None


def _between(places: Sequence[float], start: float, end: float) -> int:
    return sum(start <= place < end for place in places)


def _adapter(found: Choices, facts: ModelFacts) -> str:
    kind = found.put("adapter.kind", "lora", "trains a small part; dora costs more, none trains every weight")
    if kind == "none":
        return kind
    rank = found.put("adapter.rank", 16, "enough for a task of one kind; 32 to 64 for much new knowledge")
    found.put("adapter.alpha", 2 * rank, "twice the rank")
    found.put("adapter.init", "kaiming", "A starts as in PEFT, whose learning rates then apply")
    found.put("adapter.targets", "all-linear", "attention, dense layers and experts")
    if facts.experts >= MANY_EXPERTS:
        found.put(
            "adapter.experts", "shared", f"one for all {facts.experts} experts of a layer; one each would be large"
        )
    return kind


def rate(kind: str, parameters: int) -> float:
    return next(full if kind == "none" else low for limit, low, full in RATES if parameters < limit)


def _training(
    found: Choices, rows: FirstRows, count: int, lengths: Lengths, batch: int, validating: int, parameters: int
) -> None:
    held = found.get("data.validation", 0.0) + found.get("data.test", 0.0)
    found.sequences = max(1, round(count * (1 - held) / lengths.each))
    if "train.steps" not in found.given:
        epochs = 1 if rows.kind == "text" or count > 20_000 else 2 if count > 2_000 else 3
        if epochs == 3 and parameters < SMALL:
            epochs = max(epochs, min(MOST_EPOCHS, ceil(STEPS * batch / found.sequences)))
        steps = f"{ceil(found.sequences * epochs / batch):,} steps"
        unknown = f"; the number of rows is not known, and taken as {UNKNOWN:,}" if rows.rows is None else ""
        found.put(
            "train.epochs", epochs, f"times that each row is seen; {found.sequences:,} sequences, {steps}{unknown}"
        )
    found.put("train.global_batch", batch, "sequences of a step; small, to have enough steps")
    if validating:
        found.put("train.validate_every", 0.1, "share of the steps: ten times in the run")
        found.put("train.validate_batches", validating, "batches that the validation rows fill")
    else:
        found.put("train.validate_every", 0, "never: no rows are held out for it")


def _evaluation(found: Choices, rows: FirstRows, model: Model, machine: Machine) -> None:
    if rows.kind == "text":
        found.put("evaluate.tasks", [], "texts have no answers to compare; nothing is promoted then")
        return
    answers = sorted(rows.answers)
    rounded = max(8, ceil(answers[-1] * 1.25 / 8) * 8)
    longest = min(rounded, model.context or LONGEST)
    found.put("evaluate.max_tokens", longest, f"the longest answer has {answers[-1]} tokens")
    if not machine.gpu.cuda:
        found.put("evaluate.rows", 50, "a CPU answers slowly")
    if answers[len(answers) // 2] <= SHORT and answers[-1] <= 2 * SHORT:
        found.put("promote.metric", "held_out/exact_match", "answers are short: they are right or wrong")
    else:
        found.put("promote.metric", "held_out/log_likelihood", "answers are long: many wordings are right")


def without_evaluation(found: Choices, why: str) -> None:
    """Remove the evaluation, because the model cannot be served."""
    for key in [key for key in found.made if key.startswith(("evaluate.", "promote."))]:
        del found.made[key]
    found.made["evaluate.tasks"] = Choice([], f"{why}; nothing is promoted then")


def with_layout(found: Choices, run: Run, how: str) -> None:
    """Add the layout that the planner has found, and the values that depend on it."""
    usual = type(run.layout)()
    same = [key for key in type(run.layout).model_fields if getattr(run.layout, key) == getattr(usual, key)]
    shown = {key: value for key, value in run.layout if key not in same or key == "gpus_per_node"}
    for number, (key, value) in enumerate(shown.items()):
        meaning = type(run.layout).model_fields[key].description or ""
        found.put(f"layout.{key}", value, meaning if number else how)
    found.put("train.micro_batch", run.train.micro_batch, "sequences of a GPU at once; chosen with the layout")
    if run.train.recompute != "none":
        found.put("train.recompute", run.train.recompute, "saves memory for activations; chosen with the layout")
        if run.train.recompute_modules:
            found.put("train.recompute_modules", [*run.train.recompute_modules], "modules that are cheap to recompute")
        if run.train.recompute_first:
            found.put("train.recompute_first", run.train.recompute_first, "layers of a stage; the others have room")
    if run.optimizer.offload:
        found.put("optimizer.offload", run.optimizer.offload, "share on the host, as GPUs have no room for all of it")
