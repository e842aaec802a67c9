"""Log-probabilities that are told with an answer's last token are those that vLLM tells with each."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ASKED = """
import json, sys
import torch
from pathlib import Path
from trainer.patches import vllm_cpu
from trainer.serving import engine

engine.prepare(Path(sys.argv[2]), online=False)
with vllm_cpu.hidden():
    from vllm import LLM, SamplingParams, TokensPrompt
    vllm_cpu.ask_in_process()
from trainer.reinforcement.engines import log_probs

kept = sys.argv[3] == "kept"
if kept:
    log_probs.take_whole()
    log_probs.take_whole()  # changes nothing
whole, told_whole = log_probs._whole, []
log_probs._whole = lambda rows: told_whole.append(len(rows)) or whole(rows)
given = dict(model=sys.argv[1], dtype="float32", max_model_len=64, enforce_eager=True, seed=1, block_size=16)
given |= dict(max_num_batched_tokens=32, max_num_seqs=4, logprobs_mode="processed_logprobs")
given |= dict(enable_prefix_caching=False)
llm = LLM(**given, **({"scheduler_cls": log_probs.SCHEDULER} if kept else {}))
scheduler = llm.llm_engine.engine_core.engine_core.scheduler
prompts = [TokensPrompt(prompt_token_ids=[*range(5, 5 + length)]) for length in (3, 20, 30, 7, 11)]
ways = [dict(logprobs=0, flat_logprobs=True, detokenize=False), dict(logprobs=0), dict(logprobs=3, flat_logprobs=True)]
ways.append(dict(logprobs=0, flat_logprobs=True, stop=["e"]))
# Beside requests that ask for more, and for none.
own = dict(logprobs=0, flat_logprobs=True, detokenize=False)
both = [own, dict(logprobs=2), {}, own, dict(logprobs=0, flat_logprobs=True)]
found = []
for asked in [*([way] * 5 for way in ways), both]:
    settings = [
        SamplingParams(n=2, max_tokens=3 + 4 * number, temperature=0.7, **way) for number, way in enumerate(asked)
    ]
    torch.manual_seed(9)  # a request's own seed is nothing for prompts that are read in parts, on a CPU
    for one in llm.generate(prompts, settings, use_tqdm=False):
        for each in one.outputs:
            places = [] if each.logprobs is None else [*each.logprobs]
            told = [sorted((token, at.logprob, at.rank) for token, at in place.items()) for place in places]
            found.append([list(each.token_ids), told, each.cumulative_logprob, each.text])
engine_core = llm.llm_engine
engine_core.add_request("gone", prompts[0], SamplingParams(max_tokens=9, logprobs=0))
engine_core.step(), engine_core.step()
engine_core.abort_request(["gone"])
left = len(getattr(scheduler, "kept", {}))
print("FOUND", json.dumps([found, left, type(scheduler).__name__, len(told_whole)]))
"""


def ask(model: Path, folder: Path, way: str) -> list:
    run = subprocess.run(
        [sys.executable, "-c", ASKED, str(model), str(folder), way], capture_output=True, text=True, timeout=300
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("FOUND ")]
    assert run.returncode == 0 and lines, run.stdout[-2000:] + run.stderr[-4000:]
    return json.loads(lines[-1].removeprefix("FOUND "))


@pytest.mark.timeout(600)
def test_they_are_those_that_are_told_with_each_token(base, work, tmp_path):
    base("glm4-moe")
    plain, _, ordinary, _ = ask(work / "glm4-moe", tmp_path, "plain")
    kept, left, scheduler, told_whole = ask(work / "glm4-moe", tmp_path, "kept")
    assert (ordinary, scheduler) == ("Scheduler", "CollectingScheduler")
    assert left == 0 and told_whole == 2 * (5 + 2)  # both answers of each request that asks for nothing else
    for mine, theirs in zip(kept, plain, strict=True):
        assert [mine[0], mine[1], mine[3]] == [theirs[0], theirs[1], theirs[3]]
        assert mine[2] == (theirs[2] and pytest.approx(theirs[2], abs=1e-6))
    assert sum(len(one[1]) for one in kept) > 200
