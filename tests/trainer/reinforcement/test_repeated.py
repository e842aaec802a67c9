"""Transfers that are repeated without Megatron-Bridge and vLLM's loaders give vLLM the same policy."""

import pytest

from tests.support.reinforced import ADAPTER, answers, of_steps


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["gloo", "ipc"])
def test_a_policy_is_the_same_whether_transfers_are_repeated_or_not(forked, place, base, work, transport):
    base("llama")
    keys = ADAPTER | {"paths.model": work / "llama", "paths.base": work / "llama-base", "reinforce.steps": 5}
    keys |= {"reinforce.held_out": 0, "reinforce.lr": 1e-2, "reinforce.transport": transport}
    found = {}
    for module in ("trainer.reinforce", "tests.support.unpacked_on_a_cpu"):
        name = f"{module}-{transport}"
        process, folder = forked(name, keys, module)
        assert process.wait(600) == 0, (place / f"{name}.log").read_text()[-4000:]
        found[module] = answers(folder), of_steps(folder), (place / f"{name}.log").read_text()
    usual, repeated = found.values()
    assert usual[0] == repeated[0]
    assert all(step["probe"] < 1e-5 for step in repeated[1])
    print(repeated[1][-1], usual[1][-1])
    assert ["seconds_export" in step for step in repeated[1]] == [True, True, False, False, False]
    assert all("seconds_export" in step for step in usual[1])
