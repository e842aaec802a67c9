"""Make vLLM report an answer's log-probabilities once with its last token, instead of with each token.

In every step, vLLM cuts the log-probabilities into one piece for each answer and sends each piece to the requesting
process, which reads it token by token. This slowed an H200 from 32,000 to 19,000 tokens/s. Here the engine collects the
pieces until the answer ends, and the requesting process takes all at once. The numbers are bit-identical to vLLM's.

This applies only to requests for the sampled tokens' log-probabilities (logprobs=0) without text. If an answer ends by
its text, the requesting process ends it, and the engine would never send what it has collected.
"""

# pyright: reportArgumentType=false

from typing import Any

import numpy
from vllm.logprobs import FlatLogprobs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

Collected = dict[str, list[tuple[int, float, int]]]  # by request: each token with its log-probability and its rank

SCHEDULER = f"{__name__}.scheduler"


class _Step:
    """Log-probabilities of a step. When vLLM's scheduler takes an answer's piece, it is collected, or passed on."""

    def __init__(self, output: Any, requests: dict[str, Any], collected: Collected):
        self.log_probs, self.names, self.requests, self.collected = output.logprobs, output.req_ids, requests, collected
        columns = (
            self.log_probs.logprob_token_ids[:, 0],
            self.log_probs.logprobs[:, 0],
            self.log_probs.sampled_token_ranks,
        )
        self.rows = [*zip(*(column.tolist() for column in columns), strict=True)]

    def slice_request(self, number: int, tokens: int) -> LogprobsLists | None:
        name = self.names[number]
        params = self.requests[name].sampling_params
        if params.num_logprobs != 0 or params.detokenize:
            return self.log_probs.slice_request(number, tokens)
        self.collected.setdefault(name, []).extend(self.rows[number : number + tokens])
        return None


class CollectingScheduler(Scheduler):
    """vLLM's scheduler, which collects log-probabilities until their answer ends."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.collected: Collected = {}

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        log_probs = model_runner_output.logprobs
        if log_probs is not None and log_probs.cu_num_generated_tokens is None:
            # A copy, because the scheduler removes an ended request from its list before it takes the piece.
            model_runner_output.logprobs = _Step(model_runner_output, dict(self.requests), self.collected)
        result = super().update_from_output(scheduler_output, model_runner_output)
        for outputs in result.values():
            for output in outputs.outputs:
                if output.finish_reason is not None and output.request_id in self.collected:
                    output.new_logprobs = _whole(self.collected.pop(output.request_id))
        return result

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        """End cancelled requests, whose log-probabilities nobody needs."""
        result = super().finish_requests(request_ids, finished_status)
        for request in self.collected.keys() - self.requests.keys():
            del self.collected[request]
        return result


class CollectingAsyncScheduler(CollectingScheduler, AsyncScheduler):
    """The same for vLLM's scheduler that prepares a step while another is computed."""


def scheduler(*, vllm_config: Any, **named: Any) -> Scheduler:
    """The collecting form of the scheduler that vLLM would use; the value of its setting scheduler_cls."""
    kind = CollectingAsyncScheduler if vllm_config.scheduler_config.async_scheduling else CollectingScheduler
    return kind(vllm_config=vllm_config, **named)


def take_whole() -> None:
    """Make this process take all log-probabilities of an answer at once. A second call changes nothing."""
    one_by_one = LogprobsProcessor._update_sample_logprobs
    if one_by_one.__module__ == __name__:
        return

    def take(self: LogprobsProcessor, logprobs_lists: LogprobsLists) -> None:
        if self.num_logprobs != 0 or self.tokenizer is not None or not isinstance(self.logprobs, FlatLogprobs):
            one_by_one(self, logprobs_lists)
            return
        assert self.cumulative_logprob is not None
        flat, before = self.logprobs, len(self.logprobs.logprobs)
        values = logprobs_lists.logprobs[:, 0].tolist()
        self.cumulative_logprob += sum(values)
        flat.logprobs += values
        flat.token_ids += logprobs_lists.logprob_token_ids[:, 0].tolist()
        flat.ranks += numpy.ravel(logprobs_lists.sampled_token_ranks).tolist()
        flat.decoded_tokens += [None] * len(values)
        flat.start_indices += range(before, before + len(values))
        flat.end_indices += range(before + 1, before + len(values) + 1)

    LogprobsProcessor._update_sample_logprobs = take


def _whole(rows: list[tuple[int, float, int]]) -> LogprobsLists:
    """The rows of a whole answer, in vLLM's format for a part of an answer."""
    tokens, values, ranks = zip(*rows, strict=True)
    return LogprobsLists(
        numpy.array(tokens, dtype=numpy.int32)[:, None],
        numpy.array(values, dtype=numpy.float32)[:, None],
        numpy.array(ranks, dtype=numpy.int32),
    )
