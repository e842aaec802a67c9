"""deploy/image: the builder gets the files of the commit, and the arguments."""

import os
import subprocess
from pathlib import Path

import pytest

from conf.schema.clusters import Kubernetes

ROOT = Path(__file__).parents[1]
BUILDER = """#!/bin/sh
for last; do :; done
echo "$@" >"$SEEN/arguments"
cd "$last" && find . -type f >"$SEEN/files"
"""


@pytest.fixture
def repository(tmp_path):
    """A repository with the folder deploy/image, a test, and a file that is not committed."""
    folder = tmp_path / "repository"
    (folder / "tests").mkdir(parents=True)
    (folder / "deploy").mkdir()
    subprocess.run(["cp", "-r", ROOT / "deploy/image", folder / "deploy"], check=True)
    (folder / "tests/test_one.py").touch()
    who = [f"GIT_{who}_{what}" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")]
    environment = os.environ | dict.fromkeys(who, "one@example.org")
    for line in ("init --quiet", "add --all", "commit --quiet --message one"):
        subprocess.run(["git", *line.split()], cwd=folder, check=True, env=environment)
    (folder / "secret.txt").touch()
    return folder


def build(folder: Path, builder: str, *arguments: str) -> subprocess.CompletedProcess:
    tools = folder.parent / "tools"
    tools.mkdir()
    for name in ("git", "tar", "mktemp", "rm", "dirname", "find", "sh"):
        (tools / name).symlink_to(f"/usr/bin/{name}")
    if builder:
        (tools / builder).write_text(BUILDER)
        (tools / builder).chmod(0o755)
    command = ["/bin/sh", folder / "deploy/image/build.sh", *arguments]
    environment = {"PATH": str(tools), "SEEN": str(folder.parent), "OPTIONS": "--network host"}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("builder", "expected"), [("podman", "build --timestamp 315532800"), ("docker", "buildx build")]
)
def test_the_builder_gets_the_commit(repository, builder, expected):
    done = build(repository, builder, "here:1", "EXTRA=gpu", "KUBECTL=v1 2")
    assert done.returncode == 0 and "without the changes since" in done.stderr, done.stderr
    given = (repository.parent / "arguments").read_text()
    assert given.startswith(expected) and "--network host --tag here:1 --file" in given
    assert "--build-arg EXTRA=gpu --build-arg KUBECTL=v1 2" in given
    files = (repository.parent / "files").read_text().split()
    assert sorted(files) == ["./deploy/image/Containerfile", "./deploy/image/build.sh"]


def test_without_a_builder_it_says_what_to_install(repository):
    done = build(repository, "", "here:1")
    assert done.returncode == 1 and done.stderr.endswith("no buildah, podman or docker here: apt-get install buildah\n")


def test_the_folder_is_where_kubernetes_looks():
    lines = (ROOT / "deploy/image/Containerfile").read_text().splitlines()
    assert f"ARG UV_PROJECT_ENVIRONMENT={Kubernetes.model_fields['folder'].default}/.venv" in lines
