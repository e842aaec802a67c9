"""A conversion or export that fills a disk says so in a line, and leaves nothing; it works once there is room."""

import subprocess

import pytest


@pytest.fixture
def disk(tmp_path):
    """disk(kilobytes): make a disk of that size, or the one that is there as large. Returns its folder."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = False

    def disk(kilobytes: int):
        nonlocal mounted
        options = f"{'remount,' if mounted else ''}size={kilobytes}k"
        if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True).returncode:
            pytest.skip("mounting is root's")
        mounted = True
        return folder

    yield disk
    if mounted:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command, kilobytes, more",
    [
        ("convert", 2048, ()),
        ("convert", 24, ("convert.to=none",)),
        ("convert", 600, ("convert.to=packed", "model.base=fp8")),
        ("export", 2048, ()),
    ],
)
def test_a_full_disk_is_said_and_nothing_is_left(command, kilobytes, more, configure, ranks, disk, tmp_path):
    where = disk(kilobytes)
    places = {"base": tmp_path / "base", "export": tmp_path / "export", "output": tmp_path / "output"}
    if command == "export":
        ready = configure("llama", *(f"paths.{name}={place}" for name, place in places.items()))
        assert ranks("convert", ready).code == 0
    places["base" if command == "convert" else "export"] = where / "made"
    paths = [f"paths.{name}={place}" for name, place in places.items()]
    run = configure("llama", *paths, "export.checkpoint=base", "layout.gpus_per_node=2", *more)
    full = ranks(command, run)
    lines = {line for line in full.output.splitlines() if line.startswith("error: ")}
    assert full.code == 2 and len(lines) == 1, full.output
    assert f"{where}/made: could not be written, the disk is full" in lines.pop()
    assert not [*where.iterdir()]
    disk(65536)
    again = ranks(command, run)
    assert again.code == 0, again.output
    assert (where / "made/complete.json").exists()
