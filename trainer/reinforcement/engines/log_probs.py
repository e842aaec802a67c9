"""Log-probabilities of what is sampled, which vLLM tells with an answer's last token in place of with each.

vLLM cuts a step's log-probabilities into one piece for each answer, sends each to the process that asked, and takes it
apart there, token by token: that took an H200 from 32,000 to 19,000 tokens/s. Here the engine keeps them until the
answer ends, and the process that asked takes all at once; numbers are vLLM's to the last bit. Answers are told so that
ask for their own tokens' alone (logprobs=0) and for no text: one that ends by its text is ended by who reads it, and
the engine never tells its end.
"""

# pyright: reportArgumentType=false

from typing import Any

import numpy
from vllm.logprobs import FlatLogprobs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

Kept = dict[str, list[tuple[int, float, int]]]  # by request: each token with its log-probability and its rank

SCHEDULER = f"{__name__}.scheduler"


class _Step:
    """Log-probabilities of a step, of which vLLM's scheduler takes an answer's piece: it is kept, or told as ever."""

    def __init__(self, output: Any, requests: dict[str, Any], kept: Kept):
        self.told, self.names, self.requests, self.kept = output.logprobs, output.req_ids, requests, kept
        columns = self.told.logprob_token_ids[:, 0], self.told.logprobs[:, 0], self.told.sampled_token_ranks
        self.rows = [*zip(*(column.tolist() for column in columns), strict=True)]

    def slice_request(self, number: int, tokens: int) -> LogprobsLists | None:
        name = self.names[number]
        asked = self.requests[name].sampling_params
        if asked.num_logprobs != 0 or asked.detokenize:
            return self.told.slice_request(number, tokens)
        self.kept.setdefault(name, []).extend(self.rows[number : number + tokens])
        return None


class Keeping(Scheduler):
    """vLLM's scheduler, which keeps log-probabilities until their answer ends."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.kept: Kept = {}

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        told = model_runner_output.logprobs
        if told is not None and told.cu_num_generated_tokens is None:
            # A request that ends is taken off the scheduler's list before its piece is asked for.
            model_runner_output.logprobs = _Step(model_runner_output, dict(self.requests), self.kept)
        found = super().update_from_output(scheduler_output, model_runner_output)
        for outputs in found.values():
            for one in outputs.outputs:
                if one.finish_reason is not None and one.request_id in self.kept:
                    one.new_logprobs = _whole(self.kept.pop(one.request_id))
        return found

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        """End requests that are taken back, of which nobody is told."""
        found = super().finish_requests(request_ids, finished_status)
        for gone in self.kept.keys() - self.requests.keys():
            del self.kept[gone]
        return found


class KeepingAsync(Keeping, AsyncScheduler):
    """The same of vLLM's scheduler that prepares a step while another is computed."""


def scheduler(*, vllm_config: Any, **named: Any) -> Scheduler:
    """The scheduler that vLLM would take, for its setting scheduler_cls."""
    kind = KeepingAsync if vllm_config.scheduler_config.async_scheduling else Keeping
    return kind(vllm_config=vllm_config, **named)


def take_whole() -> None:
    """Have this process take an answer's log-probabilities at once. A second call changes nothing."""
    one_by_one = LogprobsProcessor._update_sample_logprobs
    if one_by_one.__module__ == __name__:
        return

    def take(self: LogprobsProcessor, logprobs_lists: LogprobsLists) -> None:
        if self.num_logprobs != 0 or self.tokenizer is not None or not isinstance(self.logprobs, FlatLogprobs):
            one_by_one(self, logprobs_lists)
            return
        assert self.cumulative_logprob is not None
        found, before = self.logprobs, len(self.logprobs.logprobs)
        values = logprobs_lists.logprobs[:, 0].tolist()
        self.cumulative_logprob += sum(values)
        found.logprobs += values
        found.token_ids += logprobs_lists.logprob_token_ids[:, 0].tolist()
        found.ranks += numpy.ravel(logprobs_lists.sampled_token_ranks).tolist()
        found.decoded_tokens += [None] * len(values)
        found.start_indices += range(before, before + len(values))
        found.end_indices += range(before + 1, before + len(values) + 1)

    LogprobsProcessor._update_sample_logprobs = take


def _whole(rows: list[tuple[int, float, int]]) -> LogprobsLists:
    """All of an answer, as vLLM tells a part of one."""
    tokens, values, ranks = zip(*rows, strict=True)
    return LogprobsLists(
        numpy.array(tokens, dtype=numpy.int32)[:, None],
        numpy.array(values, dtype=numpy.float32)[:, None],
        numpy.array(ranks, dtype=numpy.int32),
    )
