"""tasks/sources/adapters.py: adapters in folders and in the registry, by their content."""

from types import SimpleNamespace

import pytest

from conf.load import load
from contract.faults import Fault
from flows.pipeline import PIPELINE
from tasks.sources import adapters


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "an adapter"
    place.mkdir()
    for number, name in enumerate(adapters.FILES):
        (place / name).write_text(f'{{"r": {number}}}')
    (place / "README.md").write_text("not of the adapter")
    return place


@pytest.fixture
def registered(monkeypatch, folder):
    """The tags of version 3 of the model mine."""
    from mlflow.exceptions import MlflowException

    tags = {"finetune.adapter": folder.as_uri()}

    def version(name: str, number: str) -> SimpleNamespace:
        if (name, number) != ("mine", "3"):
            raise MlflowException(f"Model Version (name={name}, version={number}) not found")
        return SimpleNamespace(tags=tags)

    monkeypatch.setattr(adapters.address, "registry", lambda _: SimpleNamespace(get_model_version=version))
    return tags


def test_a_version_in_the_registry_is_its_adapter(folder, registered, tmp_path):
    found = adapters.identity("models:/mine/3")
    assert found == adapters.identity(str(folder)) and found.keys() == {*adapters.FILES}
    adapters.fetch("models:/mine/3", found, tmp_path / "here")
    assert sorted(path.name for path in (tmp_path / "here").iterdir() if path.is_file()) == sorted(adapters.FILES)


def test_its_content_is_part_of_the_trainings_identity(folder, tmp_path):
    def fingerprint(*overrides: str) -> str:
        return PIPELINE.stages(load("tiny", [*overrides]))["train"].fingerprint

    asked = f"model.adapter={folder}"
    none, first = fingerprint(), fingerprint(asked)
    (folder / "README.md").write_text("changed")
    same = fingerprint(asked)
    (folder / adapters.FILES[1]).write_text("other weights")
    assert first == same and len({none, first, fingerprint(asked)}) == 3


def test_an_adapter_that_changes_under_a_run_is_not_taken(folder, tmp_path):
    found = adapters.identity(str(folder))
    (folder / adapters.FILES[1]).write_text("other weights")
    with pytest.raises(Fault, match=r"^model\.adapter: .* its files have changed since the run began"):
        adapters.fetch(str(folder), found, tmp_path / "here")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("models:/mine/4", r"models:/mine/4: .*not found"),
        ("models:/mine", r"models:/mine: .*models:/mine/3"),
        ("./nowhere", r"\./nowhere: no such folder"),
    ],
)
def test_what_is_not_there_is_one_line(registered, tmp_path, source, says):
    with pytest.raises(Fault, match=rf"^model\.adapter: {says}"):
        adapters.identity(source)


def test_a_version_without_its_adapter_and_a_folder_without_weights_are_one_line(folder, registered, tmp_path):
    registered.clear()
    with pytest.raises(Fault, match=r"has no tag finetune\.adapter: it was not exported with its adapter"):
        adapters.identity("models:/mine/3")
    (folder / adapters.FILES[1]).unlink()
    with pytest.raises(Fault, match=r"no adapter_model\.safetensors; an adapter in PEFT's form has"):
        adapters.identity(str(folder))
