import pytest

from tests.support.flow_world import world


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    with world(tmp_path_factory.mktemp("world")) as made:
        yield made


@pytest.fixture(scope="session")
def first(place) -> str:
    """The whole pipeline, once; what it printed."""
    return place.run()
