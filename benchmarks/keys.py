"""Print the page of a configuration's keys: a table for each section.

    python -m benchmarks.keys

make schema writes it to docs/reference/keys.md.
"""

from conf.schema.__main__ import described
from conf.schema.run import sections
from contract import closed_pipe


def page() -> str:
    parts = ["# Keys\n\nAll keys of a configuration. `make schema` writes this page.\n"]
    for section, kind in sections().items():
        rows = [described(key, field) for key, field in kind.model_json_schema()["properties"].items()]
        cells = [(f"`{key}`", type_, f"`{value}`", meaning) for key, type_, value, _, meaning in rows]
        lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in cells]
        table = "\n".join(f"| {line} |" for line in ("key | type | default | meaning", "--- | --- | --- | ---", *lines))
        parts.append(f"## {section}\n\n{table}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    closed_pipe.run(lambda: print(page(), end=""))
