"""Check the constraints that callers send with a question (structured_outputs, response_format) before vLLM gets them.

vLLM compiles a constraint in its engine without a limit: 20,000 choices take 10 s of CPU time, a schema nested 400
times never ends, and a constraint that the engine refuses gets status 500. Therefore a worker with limits compiles each
constraint first (trainer/startup/limited_calls.py). A constraint that exceeds the limits, or that allows no answer,
gets status 400 with the reason. xgrammar is the only compiler: with several, vLLM's engine uses the first one that it
needed, even if a later request was checked for another.

Remove this when vLLM has limits: https://github.com/vllm-project/vllm/tree/main/vllm/v1/structured_output
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
    """Make vLLM's server check each constraint first. Call it before the server starts, because it forks a process."""
    vllm_cpu.require_known()
    from vllm.v1.engine.async_llm import AsyncLLM

    check = LimitedCalls(_checker(tokenizer), SECONDS, MEMORY)
    check.start()
    add_request: Any = AsyncLLM.add_request

    async def check_first(self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **keys: Any) -> Any:
        try:
            if constraint := getattr(params, "structured_outputs", None):
                await asyncio.to_thread(_require, check, constraint)
            return await add_request(self, request_id, prompt, params, *args, **keys)
        except RecursionError:
            raise ValueError(f"{REFUSED}: it is nested too deeply") from None

    AsyncLLM.add_request = check_first


def _require(check: LimitedCalls, constraint: Any) -> None:
    """Raise a ValueError, which vLLM answers with status 400, for a constraint that cannot be used."""
    try:
        reason = check(constraint)
    except Exceeded as error:
        reason = f"it {error}"
    if reason:
        raise ValueError(f"{REFUSED}: {reason}")


def _checker(tokenizer: Any) -> Any:
    """A function that returns the reason why a constraint cannot be used, or an empty text."""
    from vllm import SamplingParams
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend, validate_xgrammar_grammar
    from vllm.v1.structured_output.request import get_structured_output_key

    settings = SimpleNamespace(
        structured_outputs_config=SimpleNamespace(disable_any_whitespace=False), speculative_config=None
    )
    backend = XgrammarBackend(settings, tokenizer, len(tokenizer))

    def reason(constraint: Any) -> str:
        params = SamplingParams(structured_outputs=constraint)
        try:
            validate_xgrammar_grammar(params)
            grammar = backend.compile_grammar(*get_structured_output_key(params.structured_outputs))
            allowed = backend.allocate_token_bitmask(1)
            grammar.fill_bitmask(allowed, 0)
        except MemoryError:
            raise
        except Exception as error:  # xgrammar passes on any exception of its C++ code
            return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        return "" if allowed.any() else "no answer can satisfy it: no first token is allowed"

    return reason
