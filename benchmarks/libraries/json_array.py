"""MB/s and memory for an array of rows, and the effect of a bad row: trainer/data/read/json_array.py and ijson."""

import json
from pathlib import Path

from benchmarks.libraries.turns import medians, python, show

MB = 48
PEAK = """
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1000 for line in lines if line.startswith("VmHWM"))
"""
OURS = """
import sys
from pathlib import Path
from trainer.data.read import json_array
rows = bad = 0
for _, load in json_array.pieces(Path(sys.argv[1]), 2**23):
    found = load()
    for at, row in enumerate(found.values):
        rows += 1
        if not isinstance(row, dict):
            bad += 1
            print("bad row:", Path(found.place(at)).name, row.reason)
print(rows - bad, "rows,", peak(), "MB at most")
"""
THEIRS = """
import sys, ijson
from pathlib import Path
rows = 0
try:
    with open(sys.argv[1], "rb") as file:
        for row in ijson.items(file, "item", use_float=True):
            rows += 1
except ijson.JSONError as error:
    print("ends:", str(error).splitlines()[0])
print(rows, "rows,", peak(), "MB at most")
"""


def measure(folder: Path) -> None:
    row = {"input": "What does the customer want? " * 20, "output": 'A refund, "soon"; and {this}. ' * 20, "n": 1.5}
    lines = [json.dumps(row | {"id": k}) for k in range(MB * 10**6 // len(json.dumps(row)))]
    whole, bad = folder / "rows.json", folder / "bad.json"
    whole.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    lines[1000] = lines[1000].replace("1.5", "1.5.5")
    bad.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    print(f"  {whole.stat().st_size / 1e6:.0f} MB, {len(lines)} rows; processes from start to end")
    calls = {"ours": lambda: python(PEAK + OURS, whole), "ijson 3, yajl2_c": lambda: python(PEAK + THEIRS, whole)}
    show(medians(calls, 3))
    for name, code in (("ours", PEAK + OURS), ("ijson", PEAK + THEIRS)):
        print(f"  {name}: {python(code, whole)}")
        print(f"  {name}, row at line 1002 with 1.5.5: {'; '.join(python(code, bad).splitlines())}", flush=True)
