"""Whether a training can start from an adapter (model.adapter), by the headers of its file and the bytes of its A's.

Megatron has one matrix A for all released weights of a fused layer: q, k and v, or gate and up. PEFT has one for each.
Three A's of rank 8 become one A of rank 24, and B becomes block-diagonal, so the function is the same. adapter.rank
must have room for this; the rest of A is drawn as for a new adapter, and the rest of B is 0.
"""

from collections import defaultdict
from pathlib import Path

from conf import peft_adapter
from conf.model_files import config_json, weights
from conf.peft_adapter import MERGE, Adapter, Change, Weight
from conf.schema.run import Run
from contract.faults import Fault
from contract.regular_files import open_regular

Group = tuple[str, str, int | None]


def read(run: Run) -> Adapter:
    """Return what model.adapter changes in this run's release."""
    assert run.model.adapter
    folder = Path(run.paths.model)
    config = config_json.read(folder / config_json.NAME)
    return peft_adapter.read(Path(run.model.adapter).expanduser(), config, weights.names(folder))


def check(run: Run, adapter: Adapter) -> None:
    """Raise a Fault for an adapter that this run's LoRA cannot represent."""
    start = f"model.adapter: {adapter.folder}"
    whole = [*adapter.values.values(), *(key for key, _ in adapter.rows.values())]
    whole += [change.magnitude for change in adapter.changes.values() if change.magnitude]
    if whole:
        raise Fault(f"{start}: {_some(whole)} cannot be continued as LoRA; {MERGE}")
    others = {name: adapter.tensors[name].part for name, _ in adapter.changes}
    others = {name: part for name, part in others.items() if part not in run.adapter.names}
    if others:
        add = sorted({part for part in others.values() if part})
        keys = [adapter.changes[weight].a for weight in adapter.changes if weight[0] in others]
        remedy = f"add {', '.join(add)}, or {MERGE}" if add else MERGE
        raise Fault(f"{start}: adapter.targets has no place for {_some(keys)}; {remedy}")
    ranks = {group: sum(of[0].rank for of in by_a(adapter, changes)) for group, changes in groups(adapter).items()}
    group = max(ranks, key=lambda group: ranks[group])
    if ranks[group] > run.adapter.rank:
        changes = groups(adapter)[group]
        names = sorted({adapter_name(change) for change in changes.values()})
        each = f", as the A's of {' and '.join(names)} differ" if len(by_a(adapter, changes)) > 1 else ""
        text = f"{run.adapter.rank}, but {adapter.folder} needs {ranks[group]}{each}"
        raise Fault(f"adapter.rank: {text}; adapter.rank={ranks[group]}, or {MERGE}")


def adapter_name(change: Change) -> str:
    return change.a.partition(".lora_")[0]


def groups(adapter: Adapter) -> dict[Group, dict[Weight, Change]]:
    """Return the changes of each of Megatron's layers, or of one expert of it."""
    found: dict[Group, dict[Weight, Change]] = defaultdict(dict)
    for (name, expert), change in adapter.changes.items():
        part = adapter.tensors[name].part
        found[name.removesuffix(".weight").rpartition(".")[0], part, expert][name, expert] = change
    return found


def by_a(adapter: Adapter, changes: dict[Weight, Change]) -> list[list[Change]]:
    """Return the changes with the same A together."""
    found: list[tuple[object, list[Change]]] = []
    for change in changes.values():
        same_place = (change.a, change.expert, change.exchanged)
        for place, same in found:
            if place == same_place or _bytes(adapter, same[0]) == _bytes(adapter, change):
                same.append(change)
                break
        else:
            found.append((same_place, [change]))
    return [same for _, same in found]


def _bytes(adapter: Adapter, change: Change) -> bytes:
    """Return the bytes of A, or B's place if A is in the file as B."""
    entry = adapter.entries[change.b if change.exchanged else change.a]
    if change.exchanged:
        return f"{change.b} {change.expert}".encode()
    size = entry.size // change.experts
    with open_regular(adapter.folder / entry.file) as file:
        file.seek(entry.start + size * (change.expert or 0))
        return file.read(size)


def _some(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
