"""The command finetune: every subcommand is its module's own command line, and shells complete it."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from conf.load import FOLDER
from flows import arguments
from flows.pipeline import PIPELINE

ROOT = FOLDER.parent
SHELL = """\
source <({0} completion bash)
COMP_WORDS=(finetune {1}); COMP_CWORD={2}
compopt() {{ echo files; }}
_finetune_completion finetune
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def finetune(tmp_path, monkeypatch) -> str:
    """The command on PATH, as an installation has it, in an empty folder."""
    file = tmp_path / "bin/finetune"
    file.parent.mkdir()
    head = f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
    file.write_text(f"{head}from flows.__main__ import main\nsys.exit(main())\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{file.parent}:{os.environ['PATH']}")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    return str(file)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True)


def test_it_is_declared_as_a_script_and_runs_as_a_module():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"finetune": "flows.__main__:main"}
    done = subprocess.run([sys.executable, "-m", "flows", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    for name in ["new", "adopt", "plan", "run", "serve", "logs", "artifacts", "gang", "study", "doctor", "up", "down"]:
        assert f"\n  {name} " in done.stdout, name


def test_the_tables_of_the_arguments_are_those_of_the_code():
    assert arguments.stages() == [*PIPELINE.names]
    for words in arguments.COMMANDS.values():
        module = words.partition(" ")[0]
        assert arguments.about(module) and arguments.of_command(module)


@pytest.mark.parametrize("name", [name for name in arguments.COMMANDS if name not in ("up", "down")])
def test_help_names_the_command_and_imports_nothing_heavy(finetune, name):
    code = f"import sys; sys.argv = ['finetune', {name!r}, '--help']\nfrom flows.__main__ import main\ntry: main()\n"
    code += "finally: print({'prefect', 'mlflow', 'boto3', 'torch', 'pandas'} & {*sys.modules}, file=sys.stderr)"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "set()\n"), done.stderr
    assert f"finetune {name}" in done.stdout and f"python -m {arguments.COMMANDS[name]}" not in done.stdout


def test_a_subcommand_does_what_its_module_does_from_an_empty_folder(finetune):
    done = run(finetune, "plan", "llama31-8b-1xh100", "--json")
    module = subprocess.run(
        [sys.executable, "-m", "flows.plan", "llama31-8b-1xh100", "--json"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, module.stdout)
    wrong = run(finetune, "plan", "glm-47")
    assert (wrong.returncode, wrong.stderr) == (2, "error: no such configuration: glm-47; did you mean glm47?\n")
    assert not [*Path.cwd().iterdir()]


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (["plam"], 2, "error: No such command 'plam'. Did you mean 'plan'?\n"),
        (["plan"], 2, "finetune plan: error: the following arguments are required: NAME"),
        (["completion", "tcsh"], 2, "error: Invalid value for '{bash|zsh|fish}'"),
        (["up", "now"], 2, "unrecognized arguments: now\n"),
    ],
)
def test_a_wrong_word_is_one_line(finetune, words, code, error):
    done = run(finetune, *words)
    assert done.returncode == code and error in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["pl"], {"plan"}),
        (["plan", "glm47-1"], {"glm47-16xh200"}),
        (["plan", "glm47", "--re"], {"--rehearse"}),
        (["run", "--until-stage", "ev"], {"evaluate-base", "evaluate-tuned"}),
        (["gang", "glm47", "--engine", ""], {"slurm", "kubernetes", "dstack", "skypilot"}),
        (["artifacts", ""], {"list", "show", "verify", "gc"}),
        (["artifacts", "gc", "--d"], {"--days", "--delete"}),
        (["doctor", "--extra", "c"], {"cpu"}),
        (["completion", ""], {"bash", "zsh", "fish"}),
        (["plan", "./mine"], {"files"}),
    ],
)
def test_bash_completes_subcommands_options_values_and_names(finetune, words, offered):
    quoted = " ".join(f"'{word}'" for word in words)
    done = run(shutil.which("bash") or "bash", "-c", SHELL.format(finetune, quoted, len(words)))
    assert {*done.stdout.split()} == offered, done


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script(finetune, shell):
    done = run(finetune, "completion", shell)
    assert done.returncode == 0 and "_FINETUNE_COMPLETE" in done.stdout
