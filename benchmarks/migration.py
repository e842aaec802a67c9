"""Write a page for each stack that finetune adopt reads: example, keys, defaults, differences in meaning.

    python -m benchmarks.migration docs/migrate

make schema runs it.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from contract import closed_pipe
from flows.adopt.concepts import CONCEPTS
from flows.adopt.registry import STACKS
from flows.adopt.stack import Stack
from flows.adopt.stacks.documents import GUIDES

EXAMPLES = Path(__file__).parents[1] / "docs/migrate/examples"
FENCES = {".yaml": "yaml", ".sh": "sh", ".py": "python"}
SETTINGS = {"megatron-lm": " model.source=tiny://qwen3"}  # what the report of the example asks for
INDEX = """\
# Move from another stack

    finetune adopt FILE                             # print our configuration; the report is on stderr
    finetune adopt FILE --out mine.yaml    # write it, and print the report
    finetune plan mine.yaml

`finetune adopt` reads the configuration of another stack and writes the same training for this project. It recognises
the stack by the content of the file; `--from NAME` forces one. It runs nothing of the file. The report has five parts:

- **understood**: each key of the file with the key here;
- **without counterpart**: keys whose meaning is lost, each with the reason. Read them all;
- **left out**: keys that do not change the result here, such as paths and logs;
- **differences in meaning**: the batch, warmup, epochs, packing, alpha and rank, the loss, the layers with adapters;
- **plan**: whether it fits, if the model is known.

If a stack does not name its GPUs, `--gpus N` sets their number: the global batch depends on it. If a file has several
configurations, `--pick N` takes the N-th. Variables of a shell script are replaced; conditions and loops are not run.

Each page has an example in the form of its stack. From that file it makes an evaluated and registered model, on a CPU.
"""


def index() -> str:
    rows = [f"| [{stack.title}]({stack.name}.md) | {_formats(stack)} |" for stack in _pages()]
    guides = "\n".join(dict.fromkeys(f"- {guide.title}" for guide in GUIDES))
    return (
        "\n".join(
            [
                INDEX,
                "| stack | files |",
                "| --- | --- |",
                *rows,
                "",
                "Five published guides are recognised by their title:\n",
            ]
        )
        + f"\n{guides}\n\nThe result extends the configuration with the guide's training, and lists its errors.\n"
    )


def _pages() -> list[Stack]:
    return [stack for stack in STACKS.values() if not stack.extends]


def _formats(stack: Stack) -> str:
    names = {"yaml": "YAML, JSON", "command": "commands, shell scripts", "python": "Python scripts"}
    return ", ".join(names[kind] for kind in stack.kinds)


def page(stack: Stack) -> str:
    theirs: dict[str, list[str]] = defaultdict(list)
    for key, target in stack.keys.items():
        name = target if isinstance(target, str) else target[0]
        theirs[CONCEPTS.get(name, name)].append(key)
    reasons: dict[str, list[str]] = defaultdict(list)
    for pattern, why in stack.left_out.items():
        reasons[why].append(pattern)
    usual = [(CONCEPTS.get(target, target), value) for target, value in stack.defaults.items()]
    parts = [
        f"# From {stack.title}\n\n    finetune adopt FILE --out mine.yaml\n",
        f"Reads {_formats(stack)}. [The first page](README.md) explains the report. `make schema` writes this page.\n",
        _example(stack.name),
        "## Keys\n",
        _table("key here", f"keys of {stack.title}", ((f"`{ours}`", _code(keys)) for ours, keys in theirs.items())),
    ]
    if usual:
        rows = ((f"`{ours}`", f"`{value}`") for ours, value in usual)
        parts += [
            f"## Defaults of {stack.title}\n\nThey are written if a file does not set them.\n",
            _table("key here", "value", rows),
        ]
    if stack.differences:
        parts += ["## Differences in meaning\n", "\n".join(f"- {line}" for line in stack.differences) + "\n"]
    rows = ((_code(patterns), why) for why, patterns in reasons.items())
    parts += ["## Left out\n", _table("keys", "reason", rows)]
    return "\n".join(parts)


def _example(name: str) -> str:
    (file,) = EXAMPLES.glob(f"{name}.*")
    settings = " train.precision=fp32" + SETTINGS.get(name, "")  # fp32 is the fastest on a CPU
    return f"""\
## Example

[{file.name}](examples/{file.name}) trains a small drawn model, which needs no GPU and no download:

```{FENCES[file.suffix]}
{file.read_text().rstrip()}
```

    finetune adopt docs/migrate/examples/{file.name} --gpus 1 --out mine.yaml
    finetune plan mine.yaml{settings}
    finetune run mine.yaml{settings}
"""


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names).replace("|", "\\|")


def _table(left: str, right: str, rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"| {first} | {second} |" for first, second in rows]
    return "\n".join([f"| {left} | {right} |", "| --- | --- |", *lines]) + "\n"


def pages() -> dict[str, str]:
    return {"README.md": index()} | {f"{stack.name}.md": page(stack) for stack in _pages()}


def main() -> int:
    for name, text in pages().items():
        (Path(sys.argv[1]) / name).write_text(text)
    return 0


if __name__ == "__main__":
    closed_pipe.run(main)
