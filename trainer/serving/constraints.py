"""Constraints that callers send with a question (structured_outputs, response_format), tried before vLLM has them.

vLLM compiles a constraint in its engine, without a limit: 20,000 choices take 10 s of CPU time, a schema nested 400
times never ends, and a constraint that its engine refuses is answered 500. So a worker with limits compiles each one
first (trainer/startup/limited_calls.py), and a constraint beyond them, or one that allows no answer at all, is
answered 400 with the reason. xgrammar alone compiles them: with several compilers, vLLM's engine keeps to the first
one that it needed, whatever a later request was checked for.

Can go when vLLM has limits: https://github.com/vllm-project/vllm/tree/main/vllm/v1/structured_output
"""

# pyright: reportArgumentType=false

import asyncio
from types import SimpleNamespace
from typing import Any

from trainer.patches import vllm_cpu
from trainer.startup.limited_calls import Exceeded, LimitedCalls

REFUSED = "the constraint on the answer cannot be used"
BACKEND = "xgrammar"
SECONDS = 3  # of CPU time; a schema of 300 properties takes 1
MEMORY = 2**31


def install(tokenizer: Any) -> None:
    """Have vLLM's server try each constraint first. Before it starts, as a process is forked."""
    vllm_cpu.require_known()
    from vllm.v1.engine.async_llm import AsyncLLM

    tried = LimitedCalls(_trial(tokenizer), SECONDS, MEMORY)
    tried.start()
    add_request: Any = AsyncLLM.add_request

    async def try_first(self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **keys: Any) -> Any:
        try:
            if constraint := getattr(params, "structured_outputs", None):
                await asyncio.to_thread(_require, tried, constraint)
            return await add_request(self, request_id, prompt, params, *args, **keys)
        except RecursionError:
            raise ValueError(f"{REFUSED}: it is nested too deeply") from None

    AsyncLLM.add_request = try_first


def _require(tried: LimitedCalls, constraint: Any) -> None:
    """Raise a ValueError, which vLLM answers 400, for a constraint that cannot be kept."""
    try:
        refused = tried(constraint)
    except Exceeded as error:
        refused = f"it {error}"
    if refused:
        raise ValueError(f"{REFUSED}: {refused}")


def _trial(tokenizer: Any) -> Any:
    """A function of a constraint. Returns the reason why it cannot be used, or nothing."""
    from vllm import SamplingParams
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend, validate_xgrammar_grammar
    from vllm.v1.structured_output.request import get_structured_output_key

    settings = SimpleNamespace(
        structured_outputs_config=SimpleNamespace(disable_any_whitespace=False), speculative_config=None
    )
    backend = XgrammarBackend(settings, tokenizer, len(tokenizer))

    def reason(constraint: Any) -> str:
        asked = SamplingParams(structured_outputs=constraint)
        try:
            validate_xgrammar_grammar(asked)
            grammar = backend.compile_grammar(*get_structured_output_key(asked.structured_outputs))
            allowed = backend.allocate_token_bitmask(1)
            grammar.fill_bitmask(allowed, 0)
        except MemoryError:
            raise
        except Exception as error:  # xgrammar raises what its C++ does
            return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        return "" if allowed.any() else "no answer can begin in the way that it asks for"

    return reason
