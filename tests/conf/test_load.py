"""conf/load.py: every kind of wrong file and override gets its line; what is right comes back equal from a dump."""

import os
import pickle
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from conf import load as conf_load
from conf.load import FOLDER, FOLDERS, dump, load, main
from conf.rules import layout, pretraining
from conf.rules.contradictions import contradictions
from conf.schema.data import Part, Rows
from conf.schema.run import Run, sections
from conf.schema.training import Train
from contract.faults import ConfigError

RIGHT = """\
name: a-run
model: {source: org/model}
data: {seq_length: 64}
train: {steps: 10, global_batch: 2}
optimizer: {lr: 1e-4}
checkpoint: {save_every: 5}
"""


@pytest.fixture
def conf(tmp_path, monkeypatch):
    """Writes run.yaml in the current folder and returns its name, as the messages show it."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        Path("run.yaml").write_text(text, "utf-8")
        return "run.yaml"

    return write


def lines(*args) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load(*args)
    return str(error.value).splitlines()


def test_right_file(conf):
    run = load(conf(RIGHT))
    assert (run.optimizer.lr, run.train.steps, run.world) == (1e-4, 10, 1)
    assert run.adapter.targets == ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@pytest.mark.parametrize("name", [file.stem for file in FOLDER.glob("*.yaml")])
def test_files_in_conf(name):
    run = load(name)
    assert run.name == name
    first = (FOLDER / f"{name}.yaml").read_text().splitlines()[0]
    assert first == "# yaml-language-server: $schema=schema.json"


@pytest.mark.parametrize("name", [file.stem for file in FOLDER.glob("*.yaml")])
def test_every_configuration_but_a_pretraining_is_evaluated(name):
    run = load(name)
    assert run.evaluate.tasks or pretraining.is_drawn(run)


@pytest.mark.parametrize(
    "old, new, line",
    [
        ("steps:", "stps:", "train.stps: unknown key; did you mean train.steps?"),
        ("steps:", "lr:", "train.lr: unknown key; did you mean optimizer.lr or reinforce.lr?"),
        ("steps:", "seed: 3, seeed:", "train.seeed: unknown key; did you mean train.seed?"),
        ("steps:", "qqq:", "train.qqq: unknown key; the keys here are objective, dpo_beta, "),
        ("train:", "trian:", "trian: unknown key; did you mean train?"),
        ("train:", "train: {}\n7:", "7: unknown key"),
        ("steps: 10, ", "", "train.steps: required, and missing"),
        ("10", "ten", 'train.steps: "ten" is not an integer'),
        ("10", "'10'", 'train.steps: "10" is not an integer'),
        ("10", "10.0", "train.steps: 10.0 is not an integer"),
        ("10", "1e1", "train.steps: 10.0 is not an integer"),
        ("10", "true", "train.steps: true is not an integer"),
        ("10", "010", 'train.steps: "010" is not an integer'),
        ("10", "1_0", 'train.steps: "1_0" is not an integer'),
        ("10", "1:30", "run.yaml: train"),
        ("10", "2026-01-01", 'train.steps: "2026-01-01" is not an integer'),
        ("10", "9" * 5000, "is not an integer"),
        ("10", "[10]", "train.steps: a list is not an integer"),
        ("10", "", "train.steps: required, and missing; or train.epochs"),
        ("10", "0", "train.steps: 0 is too small: it must be at least 1"),
        ("1e-4", "'1e-4'", 'optimizer.lr: "1e-4" is not a number'),
        ("1e-4", ".nan", "is not a number"),
        ("1e-4", "1e999", "is not a finite number"),
        ("1e-4", "0", "optimizer.lr: 0 is too small: it must be above 0"),
        ("1e-4", "2", "optimizer.lr: 2 is too large: it must be at most 1"),
        ("1e-4", "1e-4, distributed: yes", 'optimizer.distributed: "yes" is not true or false'),
        ("1e-4", "1e-4, decay: cosin", "optimizer.decay: \"cosin\" is not one of 'cosine', 'linear' or 'constant'"),
        ("org/model", "2026", "model.source: 2026 is not a string; quote it to make it one"),
        ("a-run", "A run", 'name: "A run" does not match ^[a-z0-9-]+$'),
        ("64", "64, template: '{input}'", 'data.template: "{input}" does not match'),
        ("64", "64, template: '{output} {input}'", "data.template: "),
        ("64", "64, template: '{input.x} {output}'", "data.template: "),
        ("{source: org/model}", "", "model: null is not a section of keys"),
        (
            "name:",
            "adapter: {targets: linear_qkv}\nname:",
            'adapter.targets: "linear_qkv": must be all-linear or a list',
        ),
        ("name:", "adapter: {targets: [linear_qvk]}\nname:", 'adapter.targets: "linear_qvk" is not one of '),
        ("name:", "adapter: {targets: []}\nname:", "adapter.targets: empty, but adapter.kind is lora"),
        ("10", "10, stop_after: 11", "train.stop_after: 11 is after the last step, 10"),
        ("1e-4", "1e-4, warmup_steps: 10", "optimizer.warmup_steps: 10 leaves none of the 10 steps"),
        ("1e-4", "1e-4, min_lr: 1e-3", "optimizer.min_lr: 0.001 is above optimizer.lr 0.0001"),
        ("10", "10, recompute: selective", "train.recompute_modules: empty, but train.recompute is selective"),
        ("10", "10, recompute_modules: [mlp]", "train.recompute_modules: has no effect with train.recompute none"),
        (
            "10",
            "10, recompute: full, cuda_graphs: true",
            "train.cuda_graphs: true, but train.recompute full repeats a layer outside of its graph; selective",
        ),
        (
            "10",
            "10, overlap_tp: true",
            "train.overlap_tp: true, but adapter.kind lora needs activations that are not gathered: none",
        ),
        (
            "10",
            "10, overlap_tp: true",
            "train.overlap_tp: true, but layout.tp is 1 and layout.sp false: tp must be above 1, and sp true",
        ),
        (
            "batch: 2}",
            "batch: 2, overlap_tp: true}\nlayout: {nodes: 2, gpus_per_node: 2, tp: 4, sp: true}",
            "train.overlap_tp: true, but layout.tp 4 is more than the 2 GPUs of a host",
        ),
        ("10", "10, recompute_layers: 2", "train.recompute_layers: has no effect with train.recompute none"),
        ("name:", "layout: {gpus_per_node: 8, tp: 3}\nname:", "layout.tp: 3 does not divide the 8 processes"),
    ],
)
def test_wrong_value_or_key(conf, old, new, line):
    found = lines(conf(RIGHT.replace(old, new, 1)))
    assert any(each.startswith("run.yaml: ") and line in each for each in found), found


@pytest.mark.parametrize(
    "text, line",
    [
        ("", "run.yaml: empty; it takes the sections model, data"),
        ("# only a remark\n", "run.yaml: empty"),
        ("- 1\n", "run.yaml: a list; "),
        ("tiny\n", 'run.yaml: "tiny"; '),
        ("name: x\nname: y\n", "run.yaml:2: name: again; first on line 1"),
        ("train: {steps: 1, steps: 2}\n", "run.yaml:1: steps: again; first on line 1"),
        ("name: [\n", "run.yaml:2: while parsing a flow node, "),
        ("name: x\n\tmodel: y\n", "run.yaml:2: "),
        ("name: x\n---\nname: y\n", "run.yaml:2: expected a single document"),
        ("name: !!python/object:os.system x\n", "run.yaml:1: could not determine a constructor"),
        ("steps: !!int ten\n", "run.yaml: not YAML: "),
        ("[a]: 1\n", "run.yaml:1: while constructing a mapping"),
        ("[" * 500, "run.yaml: not YAML: maximum recursion depth"),
    ],
)
def test_file_that_is_no_configuration(conf, text, line):
    assert lines(conf(text))[0].startswith(line)


def test_file_that_cannot_be_read(conf, tmp_path):
    conf("")
    names = sorted(file.stem for folder in FOLDERS for file in folder.glob("*.yaml"))
    assert {"glm47", "mixtral-8x7b", "qwen3-235b-as-documented"} <= {*names}
    assert lines("nope") == [f"no such configuration: nope; it is a file, or one of {', '.join(names)}"]
    assert lines("glm-47") == ["no such configuration: glm-47; did you mean glm47?"]
    assert lines("tiny.yaml") == ["no such configuration: tiny.yaml; did you mean tiny?"]
    assert lines("./run.yml") == ["no such configuration: ./run.yml; did you mean run.yaml?"]
    assert lines(tmp_path) == [f"{tmp_path}: a folder, not a file"]
    Path("run.yaml").write_bytes(b"\xff")
    assert lines("run.yaml")[0].startswith("run.yaml: 'utf-8' codec")


def test_own_configurations_come_first_and_are_offered(tmp_path, monkeypatch):
    monkeypatch.setattr(conf_load, "OWN", tmp_path)
    monkeypatch.setattr(conf_load, "FOLDERS", (tmp_path, *FOLDERS[1:]))
    for name in ("desk", "glm47"):
        (tmp_path / f"{name}.yaml").write_text((FOLDER / "tiny.yaml").read_text())
    assert load("desk") == load("glm47") == load("tiny")
    assert conf_load.names() == sorted({"desk", *(file.stem for file in FOLDER.glob("*.yaml"))})


def test_all_problems_at_once(conf):
    found = lines(conf("name: X\ntrain: {stps: 1, seed: 0}\n"), ["log.every=x", "nonsense"])
    assert len(found) == 11
    for part in (": name: ", ".stps: ", ".seed: ", ".steps: ", ".global_batch: ", ": model: ", ": data: "):
        assert any(part in line for line in found)
    assert found[0] == "override nonsense: not of the form key=value"
    assert 'override log.every=x: log.every: "x" is not an integer' in found


def test_one_line_per_problem(conf):
    assert len(lines(conf(RIGHT), ['name="a\\nb\\u2028c"', "log.every=x\u2028y"])) == 2


def test_overrides(conf):
    path = conf(RIGHT)
    run = load(path, ["train.steps=20", "optimizer.lr=1e-5", "adapter.targets=[linear_qkv]", "moe.z_loss_coeff=1"])
    assert (run.train.steps, run.optimizer.lr, run.adapter.targets) == (20, 1e-5, ("linear_qkv",))
    assert isinstance(run.moe.z_loss_coeff, float)
    assert load(path, ["checkpoint.keep=3"]) == load(path, ["checkpoint.keep=3", "checkpoint.keep=null"][:1])
    assert load(path, ['data.template="Q: {input}\\nA: {output}"']).data.template == "Q: {input}\nA: {output}"
    assert load(path, ["name=other"]).paths.output == "runs/other/output"


@pytest.mark.parametrize(
    "override, line",
    [
        ("train.stps=1", "train.stps: unknown key; did you mean train.steps?"),
        ("trian.steps=1", "trian.steps: unknown key; did you mean train.steps or reinforce.steps?"),
        ("train.steps=1.0", "train.steps: 1.0 is not an integer"),
        ("train.steps=", "train.steps: required, and missing; or train.epochs"),
        ("train.steps", "not of the form key=value"),
        ("train=3", "train is a section; set one of its keys"),
        ("name={a: 1}", "name: takes one value, or a list; quote a text that begins with * or holds braces or a colon"),
        (
            "optimizer.without_decay=[*norm*]",
            "optimizer.without_decay: takes one value, or a list; quote a text that begins with *",
        ),
        ("data.template={input} {output}", "data.template: takes one value, or a list; quote a text"),
        ("layout.sp=true", "layout.sp: true, but it needs tp above 1, and tp is 1; nearest legal: false"),
        ("train.stop_after=99", "train.stop_after: 99 is after the last step, 10"),
    ],
)
def test_wrong_override(conf, override, line):
    [found] = lines(conf(RIGHT), [override])
    assert found.startswith(f"override {override}: {line}")


@pytest.mark.parametrize(
    "part, said",
    [
        ("{source: b, weight: 0}", "weight: 0 is too small: it must be above 0"),
        ("{source: b, wieght: 1}", "wieght: unknown key; did you mean data.mixture[1].weight?"),
        ("{source: b, shape: tixt}", "shape: \"tixt\" is not one of 'auto'"),
        ("{weight: 1}", "source: missing"),
    ],
)
def test_what_is_wrong_with_a_part_of_a_mixture_names_which_and_the_override(conf, part, said):
    override = f"data.mixture=[{{source: a}}, {part}]"
    [found] = lines(conf(RIGHT), [override])
    assert found.startswith(f"override {override}: data.mixture[1].{said}")


def test_override_given_twice(conf):
    assert lines(conf(RIGHT), ["train.steps=1", "train.steps=2"]) == ["override train.steps=2: train.steps: set twice"]


@pytest.mark.parametrize(
    "here, overrides, gpus",
    [
        (0, [], 8),
        (1, [], 1),
        (2, [], 2),
        (16, [], 8),
        (1, ["hardware.gpu=cpu"], 1),
        (1, ["layout.nodes=2"], 8),
        (1, ["gang.engine=slurm"], 8),
        (1, ["layout.gpus_per_node=4"], 4),
    ],
)
def test_auto_alone_means_the_gpus_of_the_host_that_runs_it(conf, monkeypatch, here, overrides, gpus):
    monkeypatch.setattr("conf.host.nvidia_smi.visible", lambda: ("GPU",) * here)
    assert load(conf(RIGHT + "layout: auto\nhardware: {gpu: h200}\n"), overrides).layout.gpus_per_node == gpus


def test_null_paths_lie_under_the_name(conf):
    run = load(conf(RIGHT + "paths: {model: null, data: /mnt/pairs}\n"))
    assert (run.paths.model, run.paths.data) == ("runs/a-run/model", "/mnt/pairs")


def test_error_survives_pickling():
    error = pickle.loads(pickle.dumps(ConfigError("one", "two")))
    assert str(error) == "one\ntwo"


def test_command_line(conf, capsys):
    path = conf(RIGHT)
    assert main([path, "train.steps=20"]) == 0
    Path("resolved.yaml").write_text(capsys.readouterr().out)
    assert load("resolved.yaml") == load(path, ["train.steps=20"])
    assert main([path, "train.steps=x", "train.seed=y"]) == 2
    printed = capsys.readouterr()
    assert (printed.out, len(printed.err.splitlines())) == ("", 2)


def test_dump_is_whole_or_not_there(conf, monkeypatch):
    run = load(conf(RIGHT))
    Path("dumped.yaml").write_text("old")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        dump(run, "dumped.yaml")
    assert Path("dumped.yaml").read_text() == "old"
    dump(run, "dumped.yaml")
    assert load("dumped.yaml") == run
    assert {file.name for file in Path().iterdir()} == {"run.yaml", "dumped.yaml"}


def test_import_is_light():
    code = "import sys, conf.load; print(*{'torch', 'megatron', 'transformers', 'prefect', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def values(field: dict[str, Any]) -> st.SearchStrategy[Any]:
    """What a JSON schema property allows."""
    match field:
        case {"const": only}:
            return st.just(only)
        case {"anyOf": alternatives}:
            return st.one_of(*map(values, alternatives))
        case {"enum": choices}:
            return st.sampled_from(choices)
        case {"pattern": _, "default": "auto"}:
            plain = st.text(string.printable).filter(lambda text: not set(text) & set("{}"))
            return st.sampled_from(["auto", "chat", "a/b.jinja"]) | plain.map(lambda text: text + "{input} {output}")
        case {"pattern": pattern}:
            return st.from_regex(pattern.replace("$", r"\Z"), fullmatch=True)
        case {"type": "string"}:
            traps = st.sampled_from(["1e-4", "null", "~", "yes", "0x1F", "2026-01-01", " a: b #c", "=", "<<", "-", "'"])
            return traps | st.text(
                st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=60
            ).filter(_is_taken)
        case {"type": "integer"}:
            return st.integers(field.get("minimum", 0), min(10, field.get("maximum", 10)))
        case {"type": "number"}:
            low = field.get("minimum", 0)
            high = min(low + 1, field.get("maximum", low + 1), field.get("exclusiveMaximum", low + 1))
            return st.floats(
                low, high, exclude_min="exclusiveMinimum" in field, exclude_max="exclusiveMaximum" in field
            )
        case {"type": "array", "items": item}:
            return st.lists(values(item), min_size=1, max_size=3, unique_by=repr)
        case {"$ref": "#/$defs/Part"}:
            return section(Part.model_json_schema())
        case {"type": "object"}:
            return st.dictionaries(st.text(min_size=1), st.booleans() | st.integers() | st.text(), max_size=2)
        case {"type": kind}:
            return {"boolean": st.booleans(), "null": st.none()}[kind]
    raise AssertionError(field)


def _is_taken(text: str) -> bool:
    """Whether a text is a name: it holds more than blanks, and ~name is refused."""
    return bool(text.strip()) and not text.startswith("~")


def section(schema: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({key: values(field) for key, field in schema["properties"].items()})


SECTIONS = st.fixed_dictionaries({name: section(kind.model_json_schema()) for name, kind in sections().items()})
NAMES = values(Run.model_json_schema()["properties"]["name"])
UNCUT = dict.fromkeys(["tp", "pp", "cp", "ep", "etp"], 1) | {"sp": False}
EVEN_STAGES = dict.fromkeys(["vpp", "first_stage_layers", "last_stage_layers"])


@st.composite
def runs(draw) -> Run:
    data = draw(SECTIONS) | {"name": draw(NAMES)}
    data["layout"] |= UNCUT | EVEN_STAGES
    data["model"]["family"] = None  # the schema loads what it names
    data["data"]["packed"] = False
    rows = {key: field.default for key, field in Rows.model_fields.items()}
    data["data"] |= draw(st.sampled_from([{"mixture": ()}, rows]))
    for part in data["data"]["mixture"]:
        part["source"] = part["source"] or "some"
    train, optimizer = data["train"], data["optimizer"]
    train |= {"steps": draw(st.integers(11, 99)), "epochs": None, "recompute": "selective", "recompute_layers": 1}
    train["global_batch"] *= train["micro_batch"] * data["layout"]["nodes"] * data["layout"]["gpus_per_node"]
    train |= {"fp8": None, "fp8_weights": False, "recompute_first": None}
    train |= {key: Train.model_fields[key].default for key in ("ramp_from", "ramp_by", "ramp_sequences")}
    train["loss_scale"] = (
        train["loss_scale"] if train["precision"] == "fp16" else Train.model_fields["loss_scale"].default
    )
    data["kubernetes"] |= {"image": "an-image", "claim": "a-claim", "resources": (), "env": ()}
    optimizer |= {"warmup": None, "distributed": True, "states": "fp32", "gradients": "fp32", "offload": 0.0}
    if train["precision"] == "bf16":
        train["fp8"] = draw(st.sampled_from([None, "current", "blockwise", "mxfp8"]))
        optimizer |= draw(st.sampled_from([{"states": "bf16", "gradients": "bf16"}, {"offload": 0.5}]))
    optimizer["min_lr"] = min(optimizer["min_lr"], optimizer["lr"])
    data["data"]["test"] *= 1 - data["data"]["validation"]
    data["evaluate"] |= draw(st.sampled_from([{"precision": "bf16"}, {"quantization": None}]))
    if data["adapter"]["kind"] != "lora":
        data["evaluate"]["adapter"] = "merged"
        data["adapter"] |= {"rslora": False, "b_lr_ratio": 1.0}
    data["model"] |= {"source": draw(NAMES), "family": sections()["model"].model_fields["family"].default}
    if data["adapter"]["kind"] != "lora" or train["fp8"]:
        data["model"]["base"] = "bf16"
    data["reinforce"]["steps"] = 0  # else most of what is drawn for its other keys contradicts something
    run = Run.model_validate(data)
    for _ in range(5):  # what contradicts something else gets its default
        for key, _ in contradictions(run):
            part, name = key.partition("[")[0].split(".")[:2]
            name = {"save_every": "keep_best"}.get(name, name)  # has no default, and is wrong for this one alone
            data[part][name] = sections()[part].model_fields[name].get_default(call_default_factory=True)
        run = Run.model_validate(data)
    assume(not list(contradictions(run)))
    assert not layout.problems(run)
    return run


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(run=runs())
def test_every_run_survives_dump_and_load(tmp_path_factory, run):
    path = tmp_path_factory.getbasetemp() / "survivor.yaml"
    dump(run, path)
    assert load(path) == run


BOMB = "a: &a !!int 7\n" + "\n".join(
    f"{name}: &{name} {{{', '.join(f'!!merge <<: *{before}' for _ in range(9))}}}"
    for before, name in zip("bcdefgh", "cdefghi", strict=True)
)


@pytest.mark.parametrize(
    "text, says",
    [
        ("train.steps=" + "9" * 27, "train.steps: 9{27} is too large: it must be at most 2147483647"),
        # what a socket takes: it is told of as the configuration is read, and not when engines meet
        ("gang.silent_after=1e30", "gang.silent_after: 1e\\+30 is too large: it must be at most 1000000"),
        ("checkpoint.keep=1e26", "checkpoint.keep: 1e\\+26 is not an integer"),
        ("adapter.targets=[linear_qkv, linear_qkv]", "adapter.targets: linear_qkv occurs twice"),
        ("evaluate.tasks=[held_out, held_out]", "evaluate.tasks: held_out occurs twice"),
        ("export.formats=[merged, merged]", "export.formats: merged occurs twice"),
        (f"name={'x' * 101}", 'name: "x{101}" is too long: it must have at most 100 characters'),
        (f"paths.model=a/{'x' * 256}/b", "paths.model: .*: a name in it is longer than 255 bytes, or all of it than"),
        (f"paths.base={'x/' * 2050}", "paths.base: .*: a name in it is longer than 255 bytes, or all of it than 4095"),
        (f"model.source=a/{'x' * 256}", "model.source: .*: a name in it is longer than 255 bytes, or all of it than"),
        ("data.source=~nobody/rows.jsonl", "data.source: .*: ~USER is not supported"),
        ('paths.data="a\\0b"', 'paths.data: "a\\\\u0000b": contains a NUL character'),
    ],
)
def test_counts_lists_and_paths_have_limits(text, says):
    with pytest.raises(ConfigError, match=f"^override [^\n]*: {says}[^\n]*$"):
        load("tiny", [text])


@pytest.mark.parametrize(
    "text", ['a: !!int ""', "a: !!set [b]", "a: !!omap {b: c}", "a: !!timestamp x", "[" * 9999, BOMB, "a: \ud800\n"]
)
@pytest.mark.timeout(100)
def test_yaml_that_fits_no_tag_or_grows_for_ever_is_one_line(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError, match=f"^{path}"):
        load(path)


@pytest.mark.timeout(100)
def test_a_fifo_as_configuration_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match=r"run.yaml: a FIFO, not a file$"):
        load(tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match=r"^no such configuration: /x{300}/run.yaml"):
        load(f"/{'x' * 300}/run.yaml")
