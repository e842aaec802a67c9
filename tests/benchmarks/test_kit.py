"""benchmarks/gpu: what is packed for a GPU machine is put together there, in as many transfers as it takes."""

import importlib
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from benchmarks.gpu.imports_seen import Recorder
from benchmarks.gpu.parts import cut, together

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"


@pytest.fixture
def machine(tmp_path):
    """Environment variables with which the first Python has a torch, as on a GPU machine, and nothing else."""
    for package in ("torch", "nvidia", "own-1.0.dist-info"):
        (tmp_path / "machine" / package).mkdir(parents=True)
    (tmp_path / "machine/torch/__init__.py").touch()
    (tmp_path / "machine/own-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    python = tmp_path / "bin/python3.12"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/machine exec {sys._base_executable} "$@"\n')
    python.chmod(0o755)
    return os.environ | {"PATH": f"{python.parent}:{os.environ['PATH']}", "PYTHONPATH": "/nowhere"}


def archive(folder: Path, name: str, **files: str) -> Path:
    for file, text in files.items():
        (folder / name / "site").mkdir(parents=True, exist_ok=True)
        (folder / name / file.replace("__", "/").replace("_txt", ".txt").replace("_py", ".py")).write_text(text)
    to = folder / f"{name}.tar.xz"
    subprocess.run(["tar", "-C", folder / name, "-cJf", to, "."], check=True)
    return to


@pytest.fixture
def kit(tmp_path):
    said = "import os, sys; print(os.environ['VLLM_USE_FLASHINFER_SAMPLER'], __file__, *sys.argv[1:])"
    first = archive(tmp_path, "kit", site__first_py=said, packages_txt="first==1\n")
    second = archive(tmp_path, "rest", site__second_py=f"# {os.urandom(500).hex()}", machine_txt="own\nother\n")
    cut([first, second], tmp_path / "parts", 400)
    return tmp_path / "parts"


def unpack(machine, folder, *parts):
    command = ["bash", FOLDER / "unpack.sh", folder, *parts]
    done = subprocess.run(command, env=machine, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def run(machine, kit, *arguments):
    command = ["bash", FOLDER / "run", *arguments]
    done = subprocess.run(command, env=machine | {"GPU_KIT": str(kit)}, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_parts_join_to_the_archives(tmp_path):
    whole = {name: os.urandom(size) for name, size in (("a.xz", 2500), ("b.xz", 300), ("c.xz", 1000))}
    for name, content in whole.items():
        (tmp_path / name).write_bytes(content)
    transfers = cut([tmp_path / name for name in whole], tmp_path / "parts", 1000)
    for name, content in whole.items():
        parts = sorted((tmp_path / "parts").glob(f"{name}.*"))
        assert b"".join(part.read_bytes() for part in parts) == content
    names = ["a.xz.1of3", "a.xz.2of3", "a.xz.3of3", "b.xz.1of1", "c.xz.1of1"]
    assert sorted(name for transfer in transfers for name in transfer) == names
    subprocess.run(["sha256sum", "--quiet", "-c", "parts.txt"], cwd=tmp_path / "parts", check=True)


def test_the_kit_has_what_gated_delta_nets_need(monkeypatch):
    """The package whose version a patch looks up, and all that it requires; the trainer imports transformers anyway."""
    monkeypatch.syspath_prepend(FOLDER)
    kit = importlib.import_module("kit")
    packed = kit.of_trainer({"Transformers"})
    assert {"transformers", "transformer-engine", "flash-linear-attention"} <= packed
    for name in packed & {"flash-linear-attention", "fla-core"}:
        assert {*map(kit.normal, kit.needs(metadata.distribution(name)))} - kit.required(kit.MACHINE) <= packed


def test_parts_share_transfers():
    assert together({"a": 55, "b": 9, "c": 44, "d": 30}, 55) == [["a"], ["c", "b"], ["d"]]


def test_parts_of_several_transfers_become_an_environment(machine, kit, tmp_path):
    folder, parts = tmp_path / "made", sorted(kit.glob("*of*"))
    assert len(parts) > 3
    assert run(machine, folder, "-m", "first")[0] == 2
    code, said = unpack(machine, folder, parts[1], parts[-1])
    assert code == 0 and f"still to come: {parts[0].name} {parts[2].name}" in said and parts[1].name not in said
    code, said = run(machine, folder, "-m", "first")
    assert code == 2 and "no environment" in said
    unpack(machine, folder, *parts[:2])
    code, said = unpack(machine, folder, *parts[2:])
    assert code == 0 and "is made" in said and "lacks other," in said, said
    assert [*(folder / "site/__pycache__").glob("second.*.pyc")] and not (folder / "in").exists()
    code, said = unpack(machine, folder, *parts[:2])
    assert code == 0 and "is there" in said
    assert run(machine, folder, "-m", "first", "a b") == (0, f"0 {folder}/site-packages/first.py a b\n")


def test_what_cannot_be_used_is_said_and_costs_nothing(machine, kit, tmp_path):
    folder, parts = tmp_path / "made", sorted(kit.glob("*of*"))
    content = parts[0].read_bytes()
    parts[0].write_bytes(content[:-1])
    code, said = unpack(machine, folder, *parts)
    assert code == 2 and f"{parts[0]} is broken" in said
    parts[0].write_bytes(content)
    assert unpack(machine, folder, kit / "kit.tar.xz.9of9") == (2, f"unpack: no {kit}/kit.tar.xz.9of9\n")
    unpack(machine, folder, parts[0])
    other = tmp_path / "other"
    cut([tmp_path / "kit.tar.xz"], other, 10**6)
    code, said = unpack(machine, folder, other / "kit.tar.xz.1of1")
    assert code == 2 and "of another kit" in said
    (folder / "in/rest.tar.xz.1of9.new").write_bytes(b"broken off")
    (folder / "new/site").mkdir(parents=True)
    assert "is made" in unpack(machine, folder, *parts[1:])[1]
    assert "of another kit" in unpack(machine, folder, other / "kit.tar.xz.1of1")[1]


def test_a_whole_archive_becomes_an_environment(machine, kit, tmp_path):
    whole = tmp_path / "kit.tar.xz"
    assert "/site-packages/first.py\n" in run(machine, whole, "-m", "first")[1]
    assert "is made" in unpack(machine, tmp_path / "made", whole)[1]
    assert "is there" in unpack(machine, tmp_path / "made", whole)[1]
    whole.write_bytes(whole.read_bytes()[:-50])
    assert unpack(machine, tmp_path / "made", whole)[0] == 2
    code, said = unpack(machine, tmp_path / "again", whole)
    assert code == 2 and "no whole archive" in said and not (tmp_path / "again/made").exists()


def test_imports_of_every_process_are_seen(tmp_path):
    recorder = Recorder(tmp_path, hidden=["httpx"])
    inner = "import os, yaml; os._exit(0)"
    outer = "import importlib.util as u, subprocess, sys; u.find_spec('idna')\n"
    outer += f"assert not subprocess.call([sys.executable, '-c', '{inner}'], env={{}})\n"
    outer += "try: import httpx\nexcept ImportError: pass\nelse: raise AssertionError"
    recorder.run("-c", outer)
    assert recorder.distributions() == {"PyYAML"}
    with pytest.raises(RuntimeError, match="division by zero"):
        recorder.run("-c", "1 / 0")
