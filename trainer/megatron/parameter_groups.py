"""Parameters that the optimizer treats in a way of their own: no weight decay by name, and LoRA+'s rate of B.

Without either, Megatron-Bridge's own groups stay: biases and norms have no decay.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportOptionalOperand=false

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass

from megatron.bridge.training.config import OptimizerConfigOverrideProvider
from megatron.core.optimizer.optimizer_config import ParamKey
from torch import distributed

from conf.schema.run import Run
from contract.faults import Fault

B = "*.adapter.linear_out.weight"  # of every adapter's A and B, what is behind


@dataclass
class ParameterGroups(OptimizerConfigOverrideProvider):
    without_decay: list[str]
    b_lr_ratio: float

    def build_config_overrides(self, context):
        found = super().build_config_overrides(context) or {}
        self._check(name for chunk in context.model for name, _ in chunk.named_parameters())
        for pattern in self.without_decay:
            found[ParamKey(name=pattern)] = {"wd_mult": 0.0}
        if self.b_lr_ratio != 1:
            rates = context.optimizer_config
            found[ParamKey(name=B)] = {"max_lr": rates.lr * self.b_lr_ratio, "min_lr": rates.min_lr * self.b_lr_ratio}
        return found

    def _check(self, names: Iterable[str]) -> None:
        """Refuse a pattern that names no weight on any rank."""
        mine = list(names)
        meant = {pattern for pattern in self.without_decay if fnmatch.filter(mine, pattern)}
        everyone: list[tuple[set[str], str]] = [(set(), "")] * distributed.get_world_size()
        distributed.all_gather_object(everyone, (meant, mine[0] if mine else ""))
        if unknown := {*self.without_decay} - set().union(*(one for one, _ in everyone)):
            raise Fault(
                f"optimizer.without_decay: {unknown.pop()!r} is the name of no weight, as {everyone[0][1]} is one"
            )


def parameter_groups(run: Run) -> dict[str, ParameterGroups]:
    """The setting of ConfigContainer, where the run asks for groups of its own."""
    without, ratio = run.optimizer.without_decay or (), run.adapter.b_lr_ratio
    if not without and ratio == 1:
        return {}
    return {"optimizer_config_override_provider": ParameterGroups(list(without), ratio)}
