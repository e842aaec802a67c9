"""An export in a store with all that it was made from: toys, of the shape that the flow's stages leave."""

import json
import tempfile
from pathlib import Path

from tasks.run import artifact
from tasks.run.artifact import Artifact, Stage
from tasks.store import Store

ROWS = [{"input": f"ticket {number}:", "output": f"team {number}"} for number in range(3)]
TEMPLATE = {"kind": "plain", "stop": "<end>", "tokenizer": {"special_tokens": {"eos_token": "<end>"}}}
ADAPTER = {"r": 8, "target_modules": ["q_proj"], "target_parameters": ["mlp.up_proj.weight"], "use_dora": False}


def exported(
    store: Store, name: str, adapter: dict | None = None, merged: bool = True, trust: bool = False
) -> Artifact:
    """The export of a training that differs from others by its name."""
    base = made(store, "download", {"trust_remote_code": True} if trust else {}, {}, {"config.json": "{}"})
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    files = {"test.jsonl": lines, "template.json": json.dumps(TEMPLATE)}
    data = made(store, "prepare", {}, {"model": base}, files)
    trained = made(store, "train", {"name": name}, {"base": base, "data": data}, {"weights": name})
    files = {"adapter/adapter_config.json": json.dumps(ADAPTER | (adapter or {}))} if adapter is not None else {}
    if merged:
        files |= {"merged/config.json": '{"dtype": "bfloat16"}', "merged/model.safetensors": name}
    return made(store, "export", {}, {"model": base, "trained": trained}, files)


def evaluated(store: Store, export: Artifact, answers: list[str], **config: object) -> Artifact:
    """An evaluation of the export, with these answers to ROWS."""
    rows = zip(ROWS, answers, strict=False)
    samples = [{"prompt": row["input"], "answer": answer, "reference": row["output"]} for row, answer in rows]
    trained = artifact.read(store, f"train/{export.stage.inputs['trained']}")
    data = artifact.read(store, f"prepare/{trained.stage.inputs['data']}")
    asked = {"evaluate": {"max_tokens": 8} | config, "precision": "fp32"}
    results = {"results.json": json.dumps({"samples": {"held_out": samples}})}
    return made(store, "evaluate", asked, {"model": export, "data": data, "trained": trained}, results)


def made(store: Store, stage: str, config: dict, inputs: dict[str, Artifact], files: dict[str, str]) -> Artifact:
    wanted = Stage(stage, 1, config, {name: one.stage.fingerprint for name, one in inputs.items()})

    def make(work: artifact.Work) -> dict:
        for name, text in files.items():
            path = work.folder / "files" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return {}

    with tempfile.TemporaryDirectory() as folder:
        return artifact.get_or_make(wanted, store, make, Path(folder), lambda _: None, {"flow": "test"})
