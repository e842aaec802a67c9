"""The wheel: it holds all that the commands read, nothing of the user's, and works from an empty folder."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("benchmarks/study", "conf", "contract", "flows", "tasks", "trainer")
ABSENT = ("conf/own/", "trainer/startup/cpu/vllm_name/")
BUILD = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy of the tree in which a user has a configuration, without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / "tree" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "prefect.yaml", "prefect.toml"):
        shutil.copy(ROOT / name, folder / "tree")
    (folder / "tree/conf/own/mine.yaml").write_text("name: mine\n")
    command = [sys.executable, "-c", BUILD, str(folder)]
    done = subprocess.run(command, cwd=folder / "tree", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture
def installed(wheel, tmp_path, monkeypatch):
    """Runs a command of the unpacked wheel in an empty folder."""
    (tmp_path / "empty").mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    monkeypatch.delenv("FINETUNE_RUNS", raising=False)

    def run(code: str, *words: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
        command = [sys.executable, "-c", code, *words]
        return subprocess.run(command, cwd=tmp_path / "empty", env=environment, capture_output=True, text=True)

    return run


def test_it_holds_the_code_the_configurations_and_no_private_file(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {*archive.namelist()}
    files = (file.relative_to(ROOT) for name in PACKAGES for file in (ROOT / name).rglob("*") if file.is_file())
    wanted = {file.as_posix() for file in files if "__pycache__" not in file.parts}
    assert {name for name in wanted - names if not name.startswith(ABSENT)} == set()
    assert {"conf/glm47.yaml", "conf/bases/gsm8k.yaml", "conf/models/glm47.json", "conf/schema.json"} <= names
    assert not any(name.startswith(ABSENT) for name in names)
    rest = {name for name in names - wanted if ".dist-info/" not in name}
    assert {name.rpartition(".data/")[2] for name in rest} == {
        f"data/share/finetune/prefect.{kind}" for kind in ("yaml", "toml")
    }
    tops = {name.partition("/")[0] for name in names}
    assert {name for name in tops if not name.startswith("finetune-")} == {name.partition("/")[0] for name in PACKAGES}


def test_its_command_works_in_an_empty_folder(installed, tmp_path):
    main = "from flows.__main__ import main; raise SystemExit(main())"
    done = installed(main, "--help")
    assert done.returncode == 0 and "Usage: finetune " in done.stdout, done.stderr
    done = installed(main, "plan", "tiny")
    assert done.returncode == 0 and "legal and fits" in done.stdout, done.stderr
    done = installed(main, "study", "tiny", "--gpus", "0")
    assert (done.returncode, done.stderr) == (2, "error: --gpus: 0 is not a number of GPUs\n")
    assert not [*(tmp_path / "empty").iterdir()]


def test_its_users_files_are_in_the_current_folder(installed, tmp_path):
    code = "from conf.load import OWN; from contract.installation import FILES; from flows import doctor\n"
    code += "from tasks.run.places import runs_folder; print(OWN, runs_folder(), doctor.runs_folder(), FILES)"
    done = installed(code)
    empty = tmp_path / "empty"
    assert done.stdout.split() == [f"{empty}/conf/own", *[f"{empty}/runs"] * 2, f"{sys.prefix}/share/finetune"], done
