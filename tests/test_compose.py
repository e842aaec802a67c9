"""deploy/compose/compose.yaml: its schema, its references, and the rights of its services."""

import json
import re
from importlib import resources
from pathlib import Path

import jsonschema
import pytest
import yaml

COMPOSE = Path(__file__).parents[1] / "deploy/compose/compose.yaml"
FILE = yaml.safe_load(COMPOSE.read_text())
SERVICES = FILE["services"]


def test_the_schema_of_the_compose_specification_accepts_it():
    pytest.importorskip("check_jsonschema")
    schema = resources.files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json"
    jsonschema.validate(FILE, json.loads(schema.read_text()))


def test_everything_that_a_service_refers_to_is_declared():
    for name, service in SERVICES.items():
        assert {*service.get("secrets", ())} <= {*FILE["secrets"]}, name
        assert {*service.get("depends_on", ())} <= {*SERVICES}, name
        volumes = {volume.partition(":")[0] for volume in service.get("volumes", ())}
        assert {volume for volume in volumes if not volume.startswith(".")} <= {*FILE["volumes"]}, name
        for volume in volumes:
            assert not volume.startswith(".") or (COMPOSE.parent / volume).exists()
        awaited = [one for one, how in service.get("depends_on", {}).items() if how["condition"] == "service_healthy"]
        assert all("healthcheck" in SERVICES[one] for one in awaited), name


def test_the_database_is_healthy_only_when_it_answers_by_tcp():
    """While the image of PostgreSQL makes the databases, its server listens on a socket alone."""
    test = SERVICES["postgres"]["healthcheck"]["test"]
    assert test[test.index("-h") + 1] == "127.0.0.1"


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_confined(name: str):
    service = SERVICES[name]
    assert service["read_only"] and service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert int(service["user"].partition(":")[0]) > 0
    assert service["restart"] == ("no" if name == "deploy" else "unless-stopped")
    assert all("127.0.0.1" in port for port in service.get("ports", ()))


def test_no_secret_is_a_plain_value():
    for service in SERVICES.values():
        environment = service.get("environment", {})
        secrets = {key for key in environment if re.search("PASSWORD|SECRET|TOKEN|ACCESS_KEY", key)}
        assert all(environment[key].startswith("/run/secrets/") for key in secrets)
        assert not any(re.search(r"//\w+:[^@/]+@", value) for value in environment.values())
