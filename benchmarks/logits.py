"""Logits of a tiny model by Megatron, by transformers with or without a PEFT adapter, and log-probabilities by vLLM.

of_megatron(run, checkpoint, rows, out) runs in a forked rank and writes a file. by_transformers(asked, rows) and
by_vllm(run, rows) start another process, as Megatron's must not import PEFT (trainer/patches/import_fixes.py).
"""

# pyright: reportArgumentType=false, reportOptionalCall=false

import multiprocessing
import os
import sys
import warnings
from pathlib import Path

from conf.schema.run import Run
from contract import checkpoints, json_object

Rows = list[list[int]]


def of_megatron(run: Run, checkpoint: Path | None, rows: Rows, out: Path) -> None:
    """Write the logits of the base, or of the base with the adapter in `checkpoint`."""
    import torch

    from trainer.megatron.recipe import make_adapter

    _, provider, model = built(run)
    load(model, checkpoints.step_folder(Path(run.paths.base), 0))
    if checkpoint:
        model = make_adapter(run)(model, training=False)
        load(model, checkpoint, ".adapter.")
    model[0].eval()
    tokens = torch.tensor(rows)
    with torch.no_grad():
        logits = model[0](tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None)
    torch.save(logits.float()[..., : provider.vocab_size], out)
    torch.distributed.destroy_process_group()


def built(run: Run):
    """Bridge, provider and chunks of the model, whose weights are random, on the ranks of a new process group."""
    import torch

    from trainer.megatron.model import make_provider, open_bridge

    torch.distributed.init_process_group("gloo")
    bridge = open_bridge(run)
    provider = make_provider(run, bridge)
    provider.finalize()
    provider.initialize_model_parallel(seed=1)
    return bridge, provider, provider.provide_distributed_model(wrap_with_ddp=False)


def stored(model, part: str = "") -> dict:
    """Return the tensors of the first chunk that are in a checkpoint and whose names contain `part`."""
    state = model[0].sharded_state_dict()
    return {key: value for key, value in state.items() if part in key and "_extra_state" not in key}


def load(model, folder: Path, part: str = "") -> None:
    from megatron.core import dist_checkpointing

    model[0].load_state_dict(dist_checkpointing.load(stored(model, part), str(folder)), strict=False)


def by_transformers(asked: list[tuple[Path, Path | None]], rows: Rows) -> list:
    """Return the logits of each model folder with the PEFT adapter in the other folder, or the text of an error."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return [pool.apply(_computed, (*one, rows)) for one in asked]


def _computed(folder: Path, adapter: Path | None, rows: Rows):
    # The parent's path comes along, and PEFT would take the stand-in on it for Transformer Engine.
    sys.path[:] = [place for place in sys.path if Path(place).name != "stand_in"]
    import torch
    import transformers

    from trainer.patches import families

    families.install_for(folder)
    try:
        # PEFT names its weights by the class in config.json, which differs from AutoModelForCausalLM's for vision.
        kind = getattr(transformers, json_object.read(folder / "config.json")["architectures"][0])
        config = transformers.AutoConfig.from_pretrained(folder)  # Kimi-K2's names another model_type than its class
        model = kind.from_pretrained(folder, config=config, dtype=torch.float32, attn_implementation="eager")
        if adapter:
            from peft import PeftModel
            from peft.tuners.tuners_utils import BaseTuner

            # It refuses out_proj of Mamba layers, which kernels bypass. torch's layers do not.
            setattr(BaseTuner, "_check_target_module_compatiblity", lambda *_: None)  # noqa: B010
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*(missing|unexpected).*keys.*")
                model = PeftModel.from_pretrained(model, str(adapter))
        with torch.no_grad():
            return model.eval()(torch.tensor(rows)).logits.numpy()
    except Exception as error:  # any error: the table then has no figure
        return f"{type(error).__name__}: {error}"


def by_vllm(run: Run, rows: Rows) -> list[list[float]] | str:
    """Return log-probabilities of each row's tokens except the first, by the model in run.paths.served, or an error."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_served, (run.model_dump_json(), rows))


def _served(run_json: str, rows: Rows) -> list[list[float]] | str:
    from trainer.serving import engine

    run = Run.model_validate_json(run_json)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        engine.prepare(Path(run.paths.kernels), online=False)
        return engine.serve(run, run.train.precision, lambda done, of, what: None).read(rows)
    except Exception as error:  # any error: some of vLLM's cannot be sent to another process
        return f"{type(error).__name__}: {error}"
