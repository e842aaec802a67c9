"""Parameters with other optimizer settings: no weight decay for given names, and LoRA+'s learning rate of B.

Otherwise Megatron-Bridge's own groups apply: biases and norms have no decay.
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

B = "*.adapter.linear_out.weight"  # the second matrix of every adapter


@dataclass
class ParameterGroups(OptimizerConfigOverrideProvider):
    without_decay: list[str]
    b_lr_ratio: float

    def build_config_overrides(self, context):
        overrides = super().build_config_overrides(context) or {}
        self._check(name for chunk in context.model for name, _ in chunk.named_parameters())
        for pattern in self.without_decay:
            overrides[ParamKey(name=pattern)] = {"wd_mult": 0.0}
        if self.b_lr_ratio != 1:
            rates = context.optimizer_config
            overrides[ParamKey(name=B)] = {
                "max_lr": rates.lr * self.b_lr_ratio,
                "min_lr": rates.min_lr * self.b_lr_ratio,
            }
        return overrides

    def _check(self, names: Iterable[str]) -> None:
        """Raise a Fault for a pattern that matches no weight on any rank."""
        names_here = list(names)
        matched = {pattern for pattern in self.without_decay if fnmatch.filter(names_here, pattern)}
        of_ranks: list[tuple[set[str], str]] = [(set(), "")] * distributed.get_world_size()
        distributed.all_gather_object(of_ranks, (matched, names_here[0] if names_here else ""))
        if unknown := {*self.without_decay} - set().union(*(matches for matches, _ in of_ranks)):
            raise Fault(
                f"optimizer.without_decay: {unknown.pop()!r} matches no weight; a weight's name is {of_ranks[0][1]}"
            )


def parameter_groups(run: Run) -> dict[str, ParameterGroups]:
    """Return the setting for ConfigContainer if the run needs extra groups."""
    without, ratio = run.optimizer.without_decay or (), run.adapter.b_lr_ratio
    if not without and ratio == 1:
        return {}
    return {"optimizer_config_override_provider": ParameterGroups(list(without), ratio)}
