"""Engine that serves a model with vLLM in this process, on a GPU or a CPU, as a subclass of lm-eval's vLLM class.

Call prepare() before the first import of vllm or lm_eval. It sets the environment variables that both read, and
installs the patches that this installation needs: trainer/patches/vllm_cpu.py,
trainer/patches/transformers_imports.py.

On a CPU vLLM supports neither latent attention (DeepSeek-V3) nor heads smaller than 32; it reports that, and the
command ends. trainer/serving/hosts.py serves a model on several hosts; trainer/serving/start_up.py makes it start
faster.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from conf.model_files import config_json, quantization
from conf.rules.serving import FP8, rounding
from conf.schema.run import Run
from contract import json_object
from contract.faults import Fault
from trainer.patches import store_address, vllm_cpu
from trainer.patches.transformers_imports import import_transformers
from trainer.serving import hosts, start_up, unmerged

# Environment variables by the kind of process: serving/environment.yaml has the reasons.
ENVIRONMENT: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_name("environment.yaml").read_text())
QUANTIZATION = {"fp8": "fp8_per_channel"}  # a scale for each row of a weight, and for each token
# Settings that make vLLM load a quantised release with trainer/weights/vllm_loader.py, which its worker imports.
UNPACKED = {"load_format": "unpacked", "worker_extension_cls": "trainer.weights.vllm_loader.Worker"}
UNPACKED |= {"hf_overrides": {quantization.KEY: None}}
# FlashInfer's kernels for gated delta nets need a CUDA compiler on the host; vLLM's own do not. Nobody sends images.
ALWAYS = {"gdn_prefill_backend": "triton", "language_model_only": True}
DTYPE = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # torch's names of our precisions

Progress = Callable[[int, int, str], None]  # finished rows, all rows, kind of the requests


def prepare(kernels: Path, online: bool) -> None:
    """Set the environment of vLLM. It keeps compiled kernels in the folder `kernels`."""
    os.environ.update(ENVIRONMENT["always"])
    os.environ.update({} if online else ENVIRONMENT["offline"])
    os.environ.update({} if hosts.is_one_of_several() else ENVIRONMENT["one_host"])
    on_gpu = ENVIRONMENT["gpu"] | start_up.environment(kernels.absolute())
    for name, value in (ENVIRONMENT["cpu"] if vllm_cpu.is_installed() else on_gpu).items():
        os.environ.setdefault(name, value)
    with vllm_cpu.hidden():
        import_transformers()
    store_address.install()


def device() -> str:
    return "cpu" if vllm_cpu.is_installed() else "gpu"


def serve(run: Run, precision: str, progress: Progress):
    """The model with its adapter, ready to answer; an lm_eval.api.model.LM.

    Never returns on the other hosts of a gang, which only compute for the first.
    """
    of_hosts = hosts.meet()

    with vllm_cpu.hidden():
        from lm_eval.models import vllm_causallms
        from vllm import SamplingParams

        vllm_cpu.ask_in_process()

    if of_hosts.get("node_rank"):
        vllm_causallms.LLM = hosts.follow  # lm-eval calls it with the same arguments as on the first host
    adapter = unmerged.find(run)
    lm_evals: Any = vllm_causallms.VLLM  # its decorator hides its class from type checkers

    class Served(lm_evals):
        # Tokens of a prompt, as training makes them (trainer/serving/held_out.py); None for lm-eval's own tokenization.
        tokens: dict | None = None

        def tok_encode(self, string, add_special_tokens=None, **kwargs):
            if self.tokens is None:
                return super().tok_encode(string, add_special_tokens, **kwargs)
            return [self.tokens[text] for text in string]

        def _model_generate(self, requests, generate=False, sampling_params=None):
            if not generate or sampling_params is None:
                sampling_params = SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=1, detokenize=False)
            return self._run(requests, sampling_params, "answers" if generate else "likelihoods")

        def _run(self, requests, sampling_params, kind: str):
            lora = adapter.request() if adapter else None
            return generate(self.model, requests, sampling_params, lora, _bar(progress, kind))

        def read(self, requests: list[list[int]]) -> list[list[float]]:
            """Log-probabilities of the tokens of each request except its first."""
            return of_prompts(requests, self._model_generate(requests))

        def continue_prompts(self, requests: list[list[int]], count: int) -> list[tuple[list[int], list[float]]]:
            """Write `count` tokens after each request. Returns them and their log-probabilities as written."""
            settings = SamplingParams(temperature=0, logprobs=1, max_tokens=count, ignore_eos=True, detokenize=False)
            outputs = [output.outputs[0] for output in self._run(requests, settings, "tokens")]
            return [
                (
                    [*output.token_ids],
                    [at[token].logprob for token, at in zip(output.token_ids, output.logprobs, strict=True)],
                )
                for output in outputs
            ]

    with contextlib.ExitStack() as stack:
        path = unmerged.model(run)
        if not vllm_cpu.is_installed() and not of_hosts:
            path = stack.enter_context(start_up.fixed_name(Path(run.paths.kernels).absolute(), path, precision))
        settings = arguments(run, precision, adapter)
        if rounding(run) != "as_released" and is_unpacked(unmerged.model(run)):
            settings |= UNPACKED
        served = Served(pretrained=str(path), **settings, **of_hosts)
    if of_hosts:
        hosts.report_steps(served.model.llm_engine)
    return served


def generate(llm: Any, prompts: list[list[int]], params: Any, adapter: Any, bar: Any = False) -> list[Any]:
    """vLLM's outputs for prompts of tokens, by a model with an adapter or None."""
    from vllm import TokensPrompt

    tokens = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    return llm.generate(tokens, params, use_tqdm=bar, lora_request=adapter)


def of_prompts(prompts: list[list[int]], outputs: list[Any]) -> list[list[float]]:
    """Log-probabilities of the tokens of each prompt except its first.

    prompt_logprobs has None for the first token, and for each other token a dictionary that contains it.
    """
    return [
        [at[token].logprob for token, at in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)]
        for tokens, output in zip(prompts, outputs, strict=True)
    ]


def arguments(run: Run, precision: str, adapter: unmerged.Adapter | None) -> dict[str, Any]:
    """Arguments of vLLM except the model's path."""
    ways = max(1, gpus(run.evaluate.gpus))
    spread = bool(run.evaluate.expert_parallel) and ways > 1
    settings = {
        "dtype": DTYPE[precision],
        "trust_remote_code": run.model.trust_remote_code,
        "seed": run.evaluate.seed,
        "tensor_parallel_size": ways,
        "enable_expert_parallel": spread,
        "quantization": _quantization(run),
        **ALWAYS,
    }
    settings |= start_up.settings(run, start_up.length(run), precision, vllm_cpu.is_installed())
    return settings | (adapter.settings(ways, spread) if adapter else {})


def gpus(configured: int | None) -> int:
    """The number of GPUs over which a model is split; 0 on a CPU."""
    if vllm_cpu.is_installed():
        return 0
    import torch

    return configured or torch.cuda.device_count()


def is_unpacked(folder: Path) -> bool:
    """Whether vLLM gets the weights of a quantised release unpacked, as in training; a packed base stays packed."""
    quantised = bool(config_json.read(folder / config_json.NAME).get(quantization.KEY))
    return quantised and "codes" not in json_object.read_or_empty(folder.parent / "complete.json")


def _quantization(run: Run) -> str | None:
    """vLLM's name for rounding weights while loading them. Raises a Fault if this host's devices cannot use them."""
    kind = run.evaluate.quantization
    if kind is None:
        return None
    from vllm.platforms import current_platform

    if vllm_cpu.is_installed() or not current_platform.has_device_capability(round(FP8 * 10)):
        raise Fault(f"evaluate.quantization: {kind} needs GPUs of compute capability {FP8}, as an H100's")
    return QUANTIZATION[kind]


@contextlib.contextmanager
def output_to(path: Path):
    """Send all output of this process and its children to a file. sys.__stdout__ keeps its target, for say()."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = os.dup(1), os.dup(2)
    shown = sys.__stdout__
    with path.open("a") as log, os.fdopen(os.dup(1), "w") as out:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        sys.__stdout__ = out
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            sys.__stdout__ = shown
            for number, original in zip((1, 2), before, strict=True):
                os.dup2(original, number)
                os.close(original)


def _bar(progress: Progress, kind: str):
    from tqdm import tqdm

    class Bar(tqdm):
        def update(self, n=1):
            progress(int(self.n + n), int(self.total or 0), kind)
            return super().update(n)

    def make(*args, **kwargs):
        return tqdm(*args, **kwargs, disable=True) if args else Bar(**kwargs)  # positional arguments: tokenization

    return make
