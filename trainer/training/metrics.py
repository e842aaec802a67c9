"""Metrics of each step, which rank 0 appends to metrics.jsonl, the only file that carries numbers out of training.

Kinds of lines: start (layout, recompute, sizes), train, validation, checkpoint. A run that resumes from step N first
drops the lines of later steps that an interrupted attempt left: each step appears once.

    step, lm_loss, mtp_loss, aux_loss, lr, grad_norm      of this step; losses are means over tokens
    z_loss                                                mean of the squares that train.z_loss weighs
    aux_loss                                              load balancing loss, mean over rows; 1 if all experts get
                                                          equally many tokens
    router_z_loss                                         z loss of the routers, weighed by moe.z_loss_coeff
    loss_scale, skipped_steps, nan_steps                  fp16: steps so far whose gradients overflowed, and how many of
                                                          them had a loss that was NaN or infinite (lm_loss is null)
    rewards/chosen, rewards/rejected, rewards/margin,     dpo: means over the rows of a step or of a validation;
    rewards/accuracy                                      accuracy: share of rows whose chosen answer scores higher
    grad_norm_layer_N, noise_scale_tokens                 if requested: trainer/training/gradients.py
    kl                                                    distill: divergence from the teacher
    batch                                                 sequences of the step, if train.ramp_from makes them grow
    samples, tokens                                       consumed since the start, padding included
    step_seconds, tokens_per_second                       of the whole run, by its slowest rank; without padding
    padding                                               share of the tokens that are padding, mean of the data
    perplexity                                            sft: exp of a validation's loss
    tflops, mfu                                           per device, without recomputation; mfu only if the device's
                                                          peak is known
    memory_gb                                             highest of all ranks: of the GPU, or of the process
    expert_load_max, expert_load_mean                     busiest expert's load over the mean load: worst layer, mean
"""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import math
import os
import time
from pathlib import Path

import torch
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.utils.flop_utils import num_floating_point_operations
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_current_running_global_batch_size
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model
from torch import distributed

from conf.planner import hardware
from conf.rules import objectives
from conf.schema.run import Run
from contract.faults import Fault
from trainer.data import prepared
from trainer.data.tokens.perplexity import perplexity
from trainer.megatron.recipe import last_step
from trainer.megatron.routers import balance
from trainer.patches.gradients import mtp_loss
from trainer.startup.console import say
from trainer.training.gradients import Gradients
from trainer.training.metrics_files import MetricsFiles
from trainer.training.pace import Pace


def require_finite(step: int, losses: dict[str, float]) -> None:
    """Raise on every rank if a loss is NaN or infinite: training ends, and no later checkpoint is saved."""
    for name, loss in losses.items():
        if not math.isfinite(loss):
            raise RuntimeError(f"step {step}: {name.replace('_', ' ')} is {loss}")


class Metrics(Callback):
    def __init__(self, run: Run, path: Path, start: int):
        self.run, self.first, self.started = run, start, time.monotonic()
        self.loads: dict[int, torch.Tensor] = {}
        self.validated, self.validation_loss, self.pace = -1, math.nan, Pace()
        self.skipped = self.not_finite = 0
        self.gradients, self.fill = Gradients(run), prepared.fill(run)
        self.counted: tuple[int, int] | None = None  # tokens and positions of an RL step, which reads no prepared data
        if os.environ["RANK"] == "0":
            self.files = MetricsFiles(path, start, run.track.tensorboard)
            last = self.files.last_skips
            self.skipped, self.not_finite = (last.get(key, 0) for key in ("skipped_steps", "nan_steps"))

    def write(self, line: dict) -> None:
        if distributed.get_rank() == 0:
            self.files.write(line)

    def on_train_start(self, context) -> None:
        for chunk in unwrap_model(context.model):
            for router in (module for module in chunk.modules() if isinstance(module, TopKRouter)):
                router.register_forward_hook(self._count)
        seconds = round(time.monotonic() - self.started, 2)
        self.write({"kind": "start", "step": self.first, "time": time.time(), "setup_seconds": seconds})

    def on_train_step_start(self, context) -> None:
        self.step_started = time.monotonic()
        self.gradients.begin_step(self._is_logged(context.state.train_state.step + 1))

    def on_train_step_end(self, context) -> None:
        step = context.state.train_state.step + 1
        self.time_left = self.pace.left(step, last_step(self.run), time.monotonic())
        losses = self._losses(context)
        self._count_skipped(context, step, losses)
        if not context.skipped_iter:
            require_finite(step, losses)
        loads = self._expert_loads(context)
        if not self._is_logged(step):
            return
        batch = get_current_running_global_batch_size()
        seconds, memory = highest(time.monotonic() - self.step_started, torch.cuda.max_memory_allocated() / 1e9)
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
        tokens, positions = self.counted or (batch * of_sample * self.fill, batch * of_sample)
        line |= {"step_seconds": seconds, "tokens_per_second": tokens / seconds, "padding": 1 - tokens / positions}
        line |= {"tflops": tflops} | ({"mfu": tflops / peak} if peak else {})
        line |= {"memory_gb": memory, **loads}
        self.write(line)
        self._say(line)

    def on_eval_end(self, context) -> None:
        losses = context.total_loss_dict or {}
        (loss,) = _from_last_stage([float(losses.get("lm loss", 0.0))])
        step, self.validation_loss = context.state.train_state.step, loss
        if step == self.validated:
            return  # Bridge validates this step again when training ends, on other rows
        self.validated = step
        require_finite(step, {"validation loss": loss})
        values = {"lm_loss": loss} | self._figures(losses)
        values |= {"perplexity": perplexity(loss)} if objectives.of(self.run).next_token else {}
        self.write({"kind": "validation", "step": step, "time": time.time(), **values})
        others = (f"{name} {value:.4g}" for name, value in values.items() if name != "lm_loss")
        say(f"step {step}: validation loss {loss:.4f}, {', '.join(others)}")

    def _figures(self, losses: dict | None) -> dict[str, float]:
        """Figures of the objective in addition to its loss, on every pipeline stage."""
        names = objectives.of(self.run).figures
        values = _from_last_stage([float((losses or {}).get(name, 0.0)) for name in names]) if names else []
        return dict(zip(names, values, strict=True))

    def _is_logged(self, step: int) -> bool:
        return step % self.run.log.every == 0 or step == last_step(self.run)

    def _count_skipped(self, context, step: int, losses: dict[str, float]) -> None:
        """Count steps whose gradients overflowed in fp16. The run ends if the loss scale cannot get smaller."""
        self.skipped += bool(context.skipped_iter)
        self.not_finite += not all(map(math.isfinite, losses.values()))
        if context.skipped_iter and context.optimizer.get_loss_scale().item() <= 1:
            raise Fault(f"step {step}: gradients overflow in fp16 at a loss scale of 1; train.precision=bf16")

    def _scaling(self, context) -> dict[str, float]:
        skips = self.skips()
        return {"loss_scale": context.optimizer.get_loss_scale().item()} | skips if skips else {}

    def skips(self) -> dict[str, float]:
        """Counts of fp16: skipped steps so far, and those of them with a loss that was NaN or infinite.

        The line of each checkpoint has them too, because its step may have no line of kind train (log.every). A run
        that resumes continues the counts from there.
        """
        if self.run.train.precision != "fp16":
            return {}
        return {"skipped_steps": self.skipped, "nan_steps": self.not_finite}

    def _losses(self, context) -> dict[str, float]:
        model = context.state.cfg.model
        by_name = context.loss_dict or {}
        loss, z_loss = _from_last_stage([float(by_name.get(name, 0.0)) for name in ("lm loss", "z loss")])
        losses = {"lm_loss": loss} | ({"z_loss": z_loss} if self.run.train.z_loss else {})
        if model.mtp_num_layers:
            losses["mtp_loss"] = mtp_loss.figure()
        if model.num_moe_experts:
            of_routers = balance.figures()
            losses |= {name: of_routers[name] for name in _auxiliary_losses(model)}
        return losses

    def _count(self, router, inputs, outputs) -> None:
        if torch.is_grad_enabled():  # false in validation and in the first pass of a recomputed layer
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
        ratio = used.max(1).values / used.mean(1)
        return {"expert_load_max": float(ratio.max()), "expert_load_mean": float(ratio.mean())}

    def _say(self, line: dict) -> None:
        last, step = last_step(self.run), line["step"]
        loss = f"skipped, loss scale {line['loss_scale']:g}" if "grad_norm" not in line else ""
        padding = f", {line['padding']:.0%} padding" if line["padding"] >= 0.005 else ""
        loss = loss or f"loss {line['lm_loss']:.4f}  grad norm {line['grad_norm']:.3g}"
        say(
            f"step {step}/{last}  {loss}  lr {line['lr']:.3g}  "
            f"{line['step_seconds']:.2f} s  {line['tokens_per_second']:.0f} tokens/s{padding}{self.time_left}"
        )


def _auxiliary_losses(model) -> list[str]:
    kinds = model.moe_router_load_balancing_type
    balanced = {"aux_loss", "seq_aux_loss"} & {*([kinds] if isinstance(kinds, str) else kinds)}
    return [*(["aux_loss"] if balanced else []), *(["router_z_loss"] if model.moe_z_loss_coeff else [])]


def _from_last_stage(values: list[float]) -> list[float]:
    """Values of the last pipeline stage, on every stage."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return values
    return from_last_stage(torch.tensor(values, dtype=torch.float64, device="cuda")).tolist()


def from_last_stage(tensor: torch.Tensor) -> torch.Tensor:
    """Replace this rank's tensor by that of the last pipeline stage."""
    group = parallel_state.get_pipeline_model_parallel_group()
    distributed.broadcast(tensor, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return tensor


def highest(*values: float) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64, device="cuda")
    distributed.all_reduce(tensor, op=distributed.ReduceOp.MAX)
    return tensor.tolist()


def _numbers(losses: dict[str, float]) -> dict[str, float | None]:
    """Losses for JSON, which cannot express infinity or NaN: they become null."""
    return {name: loss if math.isfinite(loss) else None for name, loss in losses.items()}
