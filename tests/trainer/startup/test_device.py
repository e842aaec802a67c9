"""What platform.start() leaves out of a process, and what torch.cuda and Transformer Engine are to it on a CPU."""

import json
import re
import subprocess
import sys

import pytest

from trainer.patches import lazy_bridge
from trainer.startup import device

# In a process of its own: in this one, another test may have imported anything.
PROBE = """
import importlib.util, json, sys
from trainer.startup import device

device.start()
import megatron.bridge.training.finetune, megatron.bridge.training.gpt_step
from trainer.megatron import adapters, recipe
from trainer.patches import lazy_bridge

lazy_bridge.load_family("Glm4MoeForCausalLM")
import torch
from transformer_engine.pytorch.optimizers import FusedAdam

layer = torch.nn.Linear(2, 2, device="cuda")
optimizer = FusedAdam(layer.parameters())
layer(torch.ones(1, 2, device="cuda")).sum().backward()
optimizer.step()
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
answers = {"imported": [name for name, module in sys.modules.items() if module]}

answers["devices"] = [
    tensor.device.type
    for tensor in (
        torch.ones(1, device="cuda"),
        torch.ones(1, device="cuda:0"),
        torch.ones(1, device=torch.cuda.current_device()),
        torch.ones(1).to("cuda"),
        torch.ones(1).cuda(),
        torch.cuda.FloatTensor([1]),
    )
]
answers["type"] = torch.ones(1).type()

first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
with torch.cuda.stream(torch.cuda.Stream()):
    first.record(torch.cuda.current_stream())
    last.record()
torch.cuda.synchronize()
answers["elapsed"], answers["over"] = first.elapsed_time(last), last.query()

state = torch.cuda.get_rng_state()
answers["drawn"] = torch.rand(3, device="cuda").tolist()
torch.cuda.set_rng_state(state)
answers["drawn again"] = torch.rand(3, device="cuda").tolist()

from megatron.core.extensions import transformer_engine as extension

answers["te"] = extension.HAVE_TE and sorted(name for name in dir(extension.te.pytorch) if name[0].isupper())

from megatron.core.dist_checkpointing.strategies import filesystem_async

answers["queue"] = type(filesystem_async.get_write_results_queue()).__module__

answers["files"] = [importlib.util.find_spec(name).origin for name in ("datasets", "sympy", "torch._dynamo")]
answers["found"] = [name for name in ("mlflow", "nvidia_resiliency_ext", "wandb") if importlib.util.find_spec(name)]
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def started() -> dict:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def heavy(tmp_path, monkeypatch):
    """A module whose import can be seen: its name enters sys.modules."""
    (tmp_path / "heavy.py").write_text("class Thing:\n    pass\n\n\nother = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "heavy"
    sys.modules.pop("heavy", None)


def test_leaves_out_what_training_does_not_use(started):
    compiler = {"sympy", "torch._dynamo", "torch._inductor"}
    unused = {
        "datasets",
        "mlflow",
        "multistorageclient",
        "pandas",
        "pyarrow",
        "scipy",
        "tensorboard",
        "transformers.models.llama",
        "vllm",
        "megatron.bridge.models.qwen",
        "megatron.core.inference.contexts.dynamic_context",
        "megatron.core.models.hybrid.hybrid_layer_specs",
        "megatron.energon",
        "modelopt.torch.quantization",
    } | (set() if device.has_gpu() else compiler)
    assert unused & set(started["imported"]) == set()


def test_what_was_left_out_can_be_imported_later(started):
    assert all(file.endswith("__init__.py") for file in started["files"])


def test_hides_trackers_and_takes_out_what_stood_in(started):
    assert started["found"] == []


def test_saves_without_another_process(started):
    assert started["queue"] == "queue"


@pytest.mark.skipif(device.has_gpu(), reason="the emulation is for hosts without one")
class TestOnACPU:
    def test_every_name_of_the_gpu_means_the_cpu(self, started):
        assert set(started["devices"]) == {"cpu"}

    def test_tensors_say_they_are_on_the_gpu(self, started):
        assert started["type"] == "torch.cuda.FloatTensor"  # Megatron sorts them into buffers by this

    def test_events_read_the_clock(self, started):
        assert started["over"]
        assert 0 <= started["elapsed"] < 1000

    def test_the_random_state_can_be_put_back(self, started):
        assert started["drawn"] == started["drawn again"]

    def test_core_finds_the_modules_of_transformer_engine(self, started):
        wanted = {"DotProductAttention", "GroupedLinear", "LayerNorm", "LayerNormLinear", "Linear", "RMSNorm"}
        assert wanted <= set(started["te"])


def test_a_promise_imports_when_it_is_called(heavy):
    with lazy_bridge.promised({heavy: ("Thing",)}):
        from heavy import Thing  # pyright: ignore[reportMissingImports]
    assert heavy not in sys.modules
    assert not isinstance(1, Thing)
    assert isinstance(1, Thing | int)
    thing = Thing()
    assert isinstance(thing, Thing)
    assert type(thing) is sys.modules[heavy].Thing


def test_asked_for_another_name_a_promised_module_makes_way(heavy):
    with lazy_bridge.promised({heavy: ("Thing",)}):
        import heavy as promised  # pyright: ignore[reportMissingImports]

        assert promised.other == 1
        assert sys.modules[heavy] is not promised
    assert sys.modules[heavy].other == 1


def test_a_module_that_is_there_is_not_promised(heavy):
    import heavy as there  # pyright: ignore[reportMissingImports]

    with lazy_bridge.promised({heavy: ("Thing",)}):
        assert sys.modules[heavy] is there
    assert sys.modules[heavy] is there


def test_warnings_of_the_stand_in_for_cuda_are_hidden():
    """The filter names a module, which must be there: else a move shows 40 lines to every user."""
    from trainer.startup.cpu import cuda

    assert re.match(device.NOISY, cuda.__name__) and re.match(device.NOISY, "megatron.core")
    assert not re.match(device.NOISY, "trainer.startup.device")
