"""What a name stands for: versions in a registry (a toy), exports and runs in a store, and what is said of others."""

import json
from types import SimpleNamespace

import pytest

from contract.faults import Fault
from tasks.serving import artifacts
from tasks.stages import promote
from tasks.store import open_store
from tests.support.exports import exported

REGISTRY = "http://somebody:s3cr3t@registry:5000"


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def registry(monkeypatch):
    """Register versions: each an export, with the aliases that it has."""
    versions: list[SimpleNamespace] = []
    aliases: dict[str, str] = {}

    class Client:
        def search_registered_models(self, filter_string=""):
            return [SimpleNamespace(name="tickets")] if filter_string in ("", "name = 'tickets'") else []

        def get_registered_model(self, name):
            return SimpleNamespace(aliases=aliases)

        def search_model_versions(self, filter_string):
            return versions if filter_string == "name = 'tickets'" else []

    def register(made, *names: str, **tags: str) -> None:
        number = str(len(versions) + 1)
        own = {"finetune.fingerprint": made.stage.fingerprint, "finetune.digest": made.digest}
        versions.append(SimpleNamespace(version=number, tags=own | tags))
        aliases.update(dict.fromkeys(names, number))

    monkeypatch.setattr(promote, "registry", lambda uri: Client())
    return register


def test_a_name_alone_is_the_champion_and_an_at_sign_chooses(store, registry):
    first, second = exported(store, "first"), exported(store, "second")
    registry(first, "champion")
    registry(second, "challenger")
    for asked, title, made in (
        ("tickets", "tickets version 1", first),
        ("tickets@2", "tickets version 2", second),
        ("tickets@challenger", "tickets version 2", second),
    ):
        found = artifacts.find(asked, store, REGISTRY)
        assert (found.name, found.title, found.export.key) == ("tickets", title, made.key)


def test_promoting_the_earlier_version_rolls_back(store, registry):
    first, second = exported(store, "first"), exported(store, "second")
    registry(first)
    registry(second, "champion")
    assert artifacts.find("tickets", store, REGISTRY).export.key == second.key
    registry(first, "champion")
    assert artifacts.find("tickets", store, REGISTRY).export.key == first.key


def test_what_is_not_there_is_said_with_what_is(store, registry):
    registry(exported(store, "first"), "challenger")
    with pytest.raises(Fault) as refused:
        artifacts.find("tickets", store, REGISTRY)
    assert str(refused.value) == (
        "tickets: has no version or alias champion; it has 1 (challenger): tickets@1 is the newest"
    )
    with pytest.raises(Fault, match=r"^tickets: has no version or alias 7; ") as refused:
        artifacts.find("tickets@7", store, REGISTRY)
    with pytest.raises(Fault) as refused:
        artifacts.find("parcels", store, REGISTRY)
    assert str(refused.value) == (
        "parcels: neither a model in the registry at http://registry:5000, which has tickets, nor a run of the flow "
        f"with an export in {store.uri}"
    )


@pytest.mark.parametrize("asked", ["tickets@", "x' OR name LIKE '%", "../pins/x", "evaluate/0123"])
def test_a_name_that_is_none_is_one_line(store, registry, asked):
    with pytest.raises(Fault) as refused:
        artifacts.find(asked, store, REGISTRY)
    assert "\n" not in str(refused.value) and str(refused.value).startswith(asked)


def test_another_content_is_not_served_by_the_name_of_a_version(store, registry):
    made = exported(store, "first")
    registry(made, "champion", **{"finetune.digest": "0" * 16})
    with pytest.raises(Fault, match=f"differs from the registered version: {made.digest}, not 0000"):
        artifacts.find("tickets", store, REGISTRY)


def test_a_version_that_the_flow_has_not_registered_is_refused(store, registry):
    registry(exported(store, "first"), "champion", **{"finetune.fingerprint": "../../elsewhere"})
    with pytest.raises(Fault, match=r"^tickets version 1: it has no tag finetune.fingerprint"):
        artifacts.find("tickets", store, REGISTRY)


def test_a_damaged_export_is_not_served(store, registry, tmp_path):
    made = exported(store, "first")
    registry(made, "champion")
    (tmp_path / f"store/{made.key}/files/merged/model.safetensors").write_text("another")
    with pytest.raises(Fault, match=r"^tickets version 1: export/\w+ is incomplete in .*: merged/model.safetensors: "):
        artifacts.find("tickets", store, REGISTRY)


def test_an_export_is_named_by_what_tells_it_apart(store):
    made = exported(store, "first")
    found = artifacts.find(made.key[:11], store, "sqlite:////nowhere/mlflow.db")
    assert (found.title, found.export.key) == (made.key, made.key)
    with pytest.raises(Fault, match=r"^export/: matches 2 exports in "):
        exported(store, "second")
        artifacts.find("export/", store, REGISTRY)


def test_a_run_of_the_flow_is_named_as_prefect_has_it(store):
    """Also where there is no registry yet; none is made."""
    made = exported(store, "first")
    note = {"name": "tickets-1122-0300", "started": 1.0, "artifacts": ["download/0", made.key]}
    store.write("runs/1.json", json.dumps(note).encode())
    store.write("runs/2.json", b"{half")
    found = artifacts.find("tickets-1122-0300", store, "sqlite:////nowhere/mlflow.db")
    assert (found.name, found.export.key) == ("tickets-1122-0300", made.key)
    with pytest.raises(Fault, match="which has no model, nor a run of the flow"):
        artifacts.find("tickets-1122-0301", store, "sqlite:////nowhere/mlflow.db")
