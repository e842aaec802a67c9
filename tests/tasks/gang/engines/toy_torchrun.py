"""A torchrun that starts no rank: it notes what it was asked for in <paths.logs>/asked, and ends as the ranks would.

Those that train write their last checkpoint, those that answer prompts stay until they are ended.
"""

import json
import os
import sys
import time
from pathlib import Path

import yaml


def main() -> int:
    *_, module, conf = sys.argv
    run = yaml.safe_load(Path(conf).read_text())
    place = Path(run["paths"]["logs"]) / "asked" / f"{os.environ['GANG_HOST']}.json"
    place.parent.mkdir(parents=True, exist_ok=True)
    names = ("GANG_ATTEMPT", "GANG_ADDRESS", "CUDA_VISIBLE_DEVICES")
    told = {"arguments": sys.argv[1:], "hosts": [run["layout"]["nodes"], run["reinforce"]["hosts"]]}
    place.write_text(json.dumps(told | {name: os.environ.get(name) for name in names}))
    if module != "trainer.reinforce":
        time.sleep(600)
    steps = run["reinforce"]["steps"] * run["reinforce"]["updates"]
    if "--rdzv-conf rank=0 " in " ".join(sys.argv):
        mark = Path(run["paths"]["reinforced"]) / f"checkpoints/iter_{steps:07d}/complete.json"
        mark.parent.mkdir(parents=True)
        mark.write_text(json.dumps({"files": {}}))
    while len([*place.parent.iterdir()]) < sum(told["hosts"]):
        time.sleep(0.1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
