"""conf/planner/hardware.py: the figures hang together, and a user's own GPU is read strictly."""

from pathlib import Path

import pytest

from conf.load import load
from conf.planner.hardware import GB, GIB, GPUS, by_device, of, peak, priced, read
from contract.faults import ConfigError

OWN = {"name": "l40s", "memory": 44.4, "bf16": 362, "hbm": 864, "link": 32, "network": 25, "per_host": 8}


def own(tmp_path, **changes) -> str:
    file = tmp_path / "gpu.yaml"
    lines = [f"{key}: {value}" for key, value in {**OWN, **changes}.items() if value is not None]
    file.write_text("\n".join(lines) + "\n")
    return str(file)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=str)
def test_figures_hang_together(gpu):
    assert 20 * GIB < gpu.memory < 200 * GIB
    assert gpu.network < gpu.link < gpu.hbm
    least = 10 if gpu.link > gpu.bus else 2  # of those that NVLink joins
    assert gpu.tflops["fp32"] * least <= gpu.tflops["bf16"] < 2600, "a figure with sparsity?"
    assert gpu.tflops.get("fp8", 2 * gpu.tflops["bf16"]) == pytest.approx(2 * gpu.tflops["bf16"], rel=0.02)
    assert gpu.joined >= gpu.per_host and gpu.price and 0.3 < gpu.price < 10


def test_reads_a_gpu_of_ones_own(tmp_path):
    gpu = read(own(tmp_path, price=1.2))
    assert (gpu.name, gpu.memory, gpu.link, gpu.price) == ("l40s", int(44.4 * GIB), 32 * GB, 1.2)
    assert gpu.tflops == {"fp32": 362 / 16, "bf16": 362.0}
    assert read("H200") is GPUS["h200"]


@pytest.mark.parametrize(
    "change, says",
    [
        ({"memory": -80}, "memory: -80 is too small: it must be above 0"),
        ({"hbm": 0}, "hbm: 0 is too small: it must be above 0"),
        ({"bf16": "fast"}, 'bf16: "fast" is not a number'),
        ({"bf16": "true"}, "bf16: true is not a number"),
        ({"link": ".inf"}, 'link: ".inf" is not a number'),
        ({"network": ".nan"}, 'network: ".nan" is not a number'),
        ({"per_host": 7.5}, "per_host: 7.5 is not an integer"),
        ({"per_host": 10**20}, f"per_host: {10**20} is too large: it must be at most 65536"),
        ({"memory": "1e300"}, "memory: 1e+300 is too large: it must be at most 1000000"),
        ({"per_host": None}, "per_host: required, and missing"),
        ({"memroy": 80}, "memroy: unknown key; did you mean memory?"),
        ({"price": -1}, "price: -1 is too small: it must be at least 0"),
        ({"name": '"a\\nb"'}, 'name: "a\\nb": contains unprintable characters'),
        ({"name": 90}, "name: 90 is not a string; quote it to make it one"),
    ],
)
def test_refuses_in_one_line(tmp_path, change, says):
    file = own(tmp_path, **change)
    with pytest.raises(ConfigError) as error:
        read(file)
    assert str(error.value) == f"{file}: {says}"


def test_says_all_that_is_wrong(tmp_path):
    with pytest.raises(ConfigError) as error:
        read(own(tmp_path, memory=-1, hbm=-1, colour="red"))
    assert len(str(error.value).splitlines()) == 3


@pytest.mark.parametrize(
    "text, says",
    [
        ("", "takes the keys name, memory"),
        ("- a", "takes the keys"),
        ("{", ":1: while parsing a flow node"),
        ("a: !!int b", "not YAML"),
        ("name: a\nname: b\n", ":2: name: again; first on line 1"),
        ("{[1]: 2}", ":1: while constructing a mapping, found unhashable key"),
        ("!!python/object:x {}", ":1: could not determine a constructor"),
    ],
)
def test_refuses_what_is_no_section(tmp_path, text, says):
    file = tmp_path / "gpu.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says) as error:
        read(str(file))
    assert "\n" not in str(error.value)


def test_refuses_unknown_names():
    with pytest.raises(ConfigError, match=r"^gpu: 'h300' is not one of a100, h100, .*, l40s, cpu, and not a \.yaml"):
        read("h300")
    with pytest.raises(ConfigError, match=r"^none\.yaml: no such file$"):
        read("none.yaml")


def test_gpus_go_by_their_driver_s_name():
    names = {
        "NVIDIA H200": "h200",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA GB200": "gb200",
        "NVIDIA A100-SXM4-80GB": "a100",
        "NVIDIA A10G": "a10",
    }
    names |= {"NVIDIA L4": "l4", "NVIDIA L40S": "l40s", "NVIDIA GeForce RTX 4090": "rtx4090"}
    assert {name: by_device(name) for name in names} == {name: GPUS[kind] for name, kind in names.items()}
    assert by_device("cpu") is None and by_device("NVIDIA L40") is None
    assert by_device("NVIDIA RTX 6000 Ada Generation") is None


def test_price():
    assert priced(GPUS["h100"], 2.5).price == 2.5
    assert priced(GPUS["h100"], None) is GPUS["h100"]
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="is not a price"):
            priced(GPUS["h100"], wrong)


def test_the_gpu_of_a_run():
    """What is written, else what the name holds, else the usual one; a CPU is shared by the processes on it."""
    gpus = {
        "glm47": ["h100"],
        "glm47-b200": ["b200", "hardware.gpu=null"],
        "tiny": ["cpu", "hardware.gpu=null"],
        "qwen3-235b": ["a100", "name=on-a100", "hardware.gpu=null"],
        "llama31-70b": ["h100", "hardware.gpu=null", "hardware.price=2"],
    }
    for name, (gpu, *overrides) in gpus.items():
        assert of(load(name, overrides)).name == gpu
    assert of(load("llama31-70b", ["hardware.price=2"])).price == 2
    alone, of_two = of(load("tiny")), of(load("tiny", ["layout.gpus_per_node=2", "train.micro_batch=8"]))
    assert not alone.cuda and of_two.memory == alone.memory // 2 and of_two.per_host == 2


@pytest.mark.parametrize(
    "device, name",
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
    ],
)
def test_the_peak_of_a_training_is_that_of_the_plan(device, name):
    """metrics.jsonl has `mfu` for every GPU that can be planned for; its own table knew five."""
    assert peak(device) == GPUS[name].tflops["bf16"]
    assert peak("cpu") is None
    assert "PEAKS" not in (Path(__file__).parents[3] / "trainer/training/metrics.py").read_text()
