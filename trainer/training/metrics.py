"""Metrics of each step, which rank 0 appends to metrics.jsonl: the only way out of the training process for a number.

Kinds of lines: start (layout, recompute, sizes), train, validation, checkpoint. A run that goes on from step N first
drops the lines of later steps, which an interrupted attempt left behind, so that no step stands there twice.

    step, lm_loss, mtp_loss, aux_loss, lr, grad_norm      of this step; losses are means over tokens
    z_loss                                                mean square that train.z_loss weighs
    router_z_loss                                         that of the routers, which moe.z_loss_coeff weighs
    loss_scale, skipped_steps, nan_steps                  of fp16: steps whose gradients overflowed so far, and those
                                                          among them whose loss was no number; lm_loss is null then
    rewards/chosen, rewards/rejected, rewards/margin,     of dpo, means over the rows of a step or of a validation;
    rewards/accuracy                                      accuracy: share of them whose chosen answer has the higher
    grad_norm_layer_N, noise_scale_tokens                 on request: trainer/training/gradients.py
    kl                                                    of distill: divergence from the teacher
    batch                                                 sequences of the step, where they grow (train.ramp_from)
    samples, tokens                                       consumed since the start, padding included
    step_seconds, tokens_per_second                       of the whole run, the slowest rank counting
    perplexity                                            of a validation: exp of its loss; of sft
    tflops, mfu                                           per device, of the model without recomputation; mfu where the
                                                          device's peak is known
    memory_gb                                             highest of any rank: of the GPU, or of the process
    expert_load_max, expert_load_mean                     busiest expert's load over the mean load: worst layer, mean
"""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import json
import math
import os
import time
from pathlib import Path

import torch
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.utils.flop_utils import num_floating_point_operations
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_current_running_global_batch_size, get_num_microbatches
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.utils import unwrap_model
from torch import distributed

from conf.planner import hardware
from conf.rules import objectives
from conf.schema.run import Run
from contract.faults import Fault
from trainer.data.tokens.perplexity import perplexity
from trainer.megatron.recipe import last_step
from trainer.startup.console import say
from trainer.training.gradients import Gradients
from trainer.training.metrics_lines import drop_after
from trainer.training.pace import Pace
from trainer.training.tensorboard_files import TensorBoardFiles


def stop_at_no_number(step: int, losses: dict[str, float]) -> None:
    """End the training at a loss that is no number, on every rank: nothing that is trained on is saved."""
    for name, loss in losses.items():
        if not math.isfinite(loss):
            raise RuntimeError(f"step {step}: {name.replace('_', ' ')} is {loss}")


class Metrics(Callback):
    def __init__(self, run: Run, path: Path, start: int):
        self.run, self.path = run, path
        self.first, self.started = start, time.monotonic()
        self.loads: dict[int, torch.Tensor] = {}
        self.validated, self.validation_loss, self.pace = -1, math.nan, Pace()
        self.skipped = self.no_numbers = 0
        self.gradients = Gradients(run)
        if os.environ["RANK"] == "0":
            path.parent.mkdir(parents=True, exist_ok=True)
            counted = drop_after(path, start)
            self.skipped, self.no_numbers = (counted.get(key, 0) for key in ("skipped_steps", "nan_steps"))
            self.curves = TensorBoardFiles(path.parent, start) if run.track.tensorboard else None

    def write(self, line: dict) -> None:
        if distributed.get_rank() == 0:
            with self.path.open("a") as f:
                f.write(json.dumps(line) + "\n")
            if self.curves:
                self.curves.write(line)

    def on_train_start(self, context) -> None:
        for chunk in unwrap_model(context.model):
            for router in (module for module in chunk.modules() if isinstance(module, TopKRouter)):
                router.register_forward_hook(self._count)
        seconds = round(time.monotonic() - self.started, 2)
        self.write({"kind": "start", "step": self.first, "time": time.time(), "setup_seconds": seconds})

    def on_train_step_start(self, context) -> None:
        self.step_started = time.monotonic()
        self.gradients.begin_step(self._is_told(context.state.train_state.step + 1))

    def on_train_step_end(self, context) -> None:
        step = context.state.train_state.step + 1
        self.left = self.pace.left(step, last_step(self.run), time.monotonic())
        losses = self._losses(context, step)
        self._count_skipped(context, step, losses)
        if not context.skipped_iter:
            stop_at_no_number(step, losses)
        loads = self._expert_loads(context)
        if not self._is_told(step):
            return
        batch = get_current_running_global_batch_size()
        seconds, memory = _highest(time.monotonic() - self.step_started, torch.cuda.max_memory_allocated() / 1e9)
        config = context.state.cfg
        samples = context.state.train_state.consumed_train_samples + batch
        sequences = batch * objectives.sequences(self.run.train)
        tflops = num_floating_point_operations(config, sequences) / seconds / distributed.get_world_size() / 1e12
        peak = self.run.log.peak_tflops or hardware.peak(torch.cuda.get_device_name())
        line = {"kind": "train", "step": step, "time": time.time(), **_numbers(losses)}
        line |= self._figures(context.loss_dict)
        line |= {"lr": context.optimizer.param_groups[0]["lr"]} | self._scaling(context)
        line |= {} if context.grad_norm is None else {"grad_norm": context.grad_norm}
        line |= self.gradients.numbers(context)
        line |= {"batch": batch} if self.run.train.batch_ramp else {}
        of_sample = self.run.data.seq_length * objectives.sequences(self.run.train)
        line |= {"samples": samples, "tokens": samples * of_sample}
        line |= {"step_seconds": seconds, "tokens_per_second": batch * of_sample / seconds}
        line |= {"tflops": tflops} | ({"mfu": tflops / peak} if peak else {})
        line |= {"memory_gb": memory, **loads}
        self.write(line)
        self._say(line)

    def on_eval_end(self, context) -> None:
        losses = context.total_loss_dict or {}
        loss = _from_last_stage([float(losses["lm loss"])] if "lm loss" in losses else [0.0])[0]
        step, self.validation_loss = context.state.train_state.step, loss
        if step == self.validated:
            return  # Bridge validates once more when training ends, on other rows than at this step before
        self.validated = step
        stop_at_no_number(step, {"validation loss": loss})
        found = {"lm_loss": loss} | self._figures(losses)
        found |= {"perplexity": perplexity(loss)} if self.run.train.objective == "sft" else {}
        self.write({"kind": "validation", "step": step, "time": time.time(), **found})
        told = (f"{name} {value:.4g}" for name, value in found.items() if name != "lm_loss")
        say(f"step {step}: validation loss {loss:.4f}, {', '.join(told)}")

    def _figures(self, losses: dict | None) -> dict[str, float]:
        """What the objective is looked at by beside its loss, on every stage of a pipeline."""
        names = objectives.FIGURES[self.run.train.objective]
        values = _from_last_stage([float((losses or {}).get(name, 0.0)) for name in names]) if names else []
        return dict(zip(names, values, strict=True))

    def _is_told(self, step: int) -> bool:
        return step % self.run.log.every == 0 or step == last_step(self.run)

    def _count_skipped(self, context, step: int, losses: dict[str, float]) -> None:
        """Count steps whose gradients overflowed in fp16. The run ends where no smaller scale is left to try."""
        self.skipped += bool(context.skipped_iter)
        self.no_numbers += not all(map(math.isfinite, losses.values()))
        if context.skipped_iter and context.optimizer.get_loss_scale().item() <= 1:
            raise Fault(f"step {step}: gradients overflow in fp16 at a loss scale of 1; train.precision=bf16")

    def _scaling(self, context) -> dict[str, float]:
        if self.run.train.precision != "fp16":
            return {}
        return {"loss_scale": context.optimizer.get_loss_scale().item()} | self.skips()

    def skips(self) -> dict[str, float]:
        """Counts of fp16: steps that were skipped so far, and those of them whose loss was no number.

        They stand beside each checkpoint too, whose step may have no line (log.every), so that a resume counts on.
        """
        if self.run.train.precision != "fp16":
            return {}
        return {"skipped_steps": self.skipped, "nan_steps": self.no_numbers}

    def _losses(self, context, step: int) -> dict[str, float]:
        model, scale = context.state.cfg.model, 1 / get_num_microbatches()
        seen = _Scalars()
        if model.num_moe_experts:
            names = _auxiliary_losses(model)
            get_moe_metrics_tracker().report(
                loss_scale=scale,
                iteration=step,
                writer=seen,
                force_initialize=True,
                track_names=list(names),
                num_layers=model.num_layers,
                moe_layer_freq=model.moe_layer_freq,
                mtp_num_layers=model.mtp_num_layers,
            )
        if model.mtp_num_layers:
            MTPLossLoggingHelper.track_mtp_metrics(scale, step, seen)
        heads = [f"mtp_{i + 1} loss" for i in range(model.mtp_num_layers or 0)]
        lm = context.loss_dict.get("lm loss", torch.zeros(())) if context.loss_dict else torch.zeros(())
        squares = (context.loss_dict or {}).get("z loss", 0.0)
        last = _from_last_stage([float(lm), float(squares), *(seen.get(head, 0.0) for head in heads)])
        losses = {"lm_loss": last[0]} | ({"z_loss": last[1]} if self.run.train.z_loss else {})
        if heads:
            losses["mtp_loss"] = sum(last[2:]) / len(heads)
        if model.num_moe_experts:
            losses |= {name: seen.get(key, 0.0) for key, name in _auxiliary_losses(model).items()}
        return losses

    def _count(self, router, inputs, outputs) -> None:
        if torch.is_grad_enabled():  # not the first pass of a recomputed layer, nor validation
            counts = outputs[1].detach().sum(0).double()
            layer = router.layer_number
            self.loads[layer] = self.loads[layer] + counts if layer in self.loads else counts

    def _expert_loads(self, context) -> dict[str, float]:
        model = context.state.cfg.model
        if not model.num_moe_experts:
            return {}
        layers = model.num_layers + (model.mtp_num_layers or 0) + 1
        table = torch.zeros(layers, model.num_moe_experts, dtype=torch.float64, device="cuda")
        for layer, counts in self.loads.items():
            table[layer] = counts
        self.loads.clear()
        distributed.all_reduce(table)
        used = table[table.sum(1) > 0]
        if not len(used):
            return {}
        over = used.max(1).values / used.mean(1)
        return {"expert_load_max": float(over.max()), "expert_load_mean": float(over.mean())}

    def _say(self, line: dict) -> None:
        last, step = last_step(self.run), line["step"]
        loss = f"skipped, loss scale {line['loss_scale']:g}" if "grad_norm" not in line else ""
        loss = loss or f"loss {line['lm_loss']:.4f}  grad norm {line['grad_norm']:.3g}"
        say(
            f"step {step}/{last}  {loss}  lr {line['lr']:.3g}  "
            f"{line['step_seconds']:.2f} s  {line['tokens_per_second']:.0f} tokens/s{self.left}"
        )


class _Scalars(dict):
    """Writer in the place of Megatron's TensorBoard writer. It keeps all values."""

    def add_scalar(self, name: str, value, step: int) -> None:
        self[name] = float(value)

    def add_scalars(self, name: str, values, step: int) -> None:
        pass


def _auxiliary_losses(model) -> dict[str, str]:
    kinds = model.moe_router_load_balancing_type
    kinds = [kinds] if isinstance(kinds, str) else kinds
    names = {}
    if "aux_loss" in kinds:
        names["load_balancing_loss"] = "aux_loss"
    if "seq_aux_loss" in kinds:
        names["seq_load_balancing_loss"] = "aux_loss"
    if model.moe_z_loss_coeff:
        names["z_loss"] = "router_z_loss"
    return names


def _from_last_stage(values: list[float]) -> list[float]:
    """Values of the last pipeline stage, on every stage."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device="cuda")
    distributed.broadcast(
        tensor,
        src=parallel_state.get_pipeline_model_parallel_last_rank(),
        group=parallel_state.get_pipeline_model_parallel_group(),
    )
    return tensor.tolist()


def _highest(*values: float) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64, device="cuda")
    distributed.all_reduce(tensor, op=distributed.ReduceOp.MAX)
    return tensor.tolist()


def _numbers(losses: dict[str, float]) -> dict[str, float | None]:
    """Losses as JSON has them, which knows no infinity."""
    return {name: loss if math.isfinite(loss) else None for name, loss in losses.items()}
