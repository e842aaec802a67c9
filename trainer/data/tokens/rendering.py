"""Compile and render Jinja templates like transformers, with limits on time, memory and length.

A template is part of a model's folder. It may contain an endless loop or produce gigabytes of text, and Jinja's sandbox
limits neither. Jinja even computes constants while it compiles. Therefore a worker process with limits compiles and
renders (trainer/startup/limited_calls.py), which costs about 0.02 ms per rendering.
"""

from typing import Any

from trainer.startup.limited_calls import Exceeded, LimitedCalls

SECONDS = 5  # of CPU time; the longest conversations take some milliseconds
MEMORY = 2**29


class Refused(ValueError):
    """An error that the template raised, in one line."""


def start() -> None:
    """Fork the rendering process while this process is small."""
    import transformers.utils.chat_template_utils  # noqa: F401  imported once, not in each worker

    _calls.start()


def render(**request: Any) -> tuple[list[str], list[list[tuple[int, int]]]]:
    """Render like transformers' render_jinja_template. Raises Exceeded beyond a limit, Refused on template errors."""
    return _answer(request)


def variables(text: str) -> set[str]:
    """Return the names of the variables that a template uses. Raises like render()."""
    return set(_answer(text))


def install() -> None:
    """Make transformers' tokenizers render with limits in this process, which serves callers."""
    from transformers import tokenization_utils_base

    tokenizers: Any = tokenization_utils_base

    def limited(**request: Any) -> tuple[list[str], list[list[tuple[int, int]]]]:
        try:
            return render(**request)
        except Exceeded as error:
            raise Refused(f"the chat template {error} with these messages") from None

    start()
    tokenizers.render_jinja_template = limited


def _answer(request: dict[str, Any] | str) -> Any:
    result, error = _calls(request)
    if error:
        raise Refused(error)
    return result


def _work(request: dict[str, Any] | str) -> tuple[Any, str]:
    from jinja2 import meta
    from transformers.utils import chat_template_utils

    try:
        if isinstance(request, dict):
            return chat_template_utils.render_jinja_template(**request), ""
        environment = chat_template_utils._compile_jinja_template(request).environment
        return meta.find_undeclared_variables(environment.parse(request)), ""
    except MemoryError:
        raise
    except Exception as error:  # a template can raise any Python exception
        line = (str(error).strip().splitlines() or [""])[0]
        return None, line[:1000] or type(error).__name__


_calls = LimitedCalls(_work, SECONDS, MEMORY)
