"""Names of a server's adapters, and servers that take none."""

from dataclasses import replace

import pytest

from contract.faults import Fault
from contract.served_model import ServedAdapter, ServedModel
from tasks.serving import adapters, server

SEVEN, EIGHT = (ServedAdapter([f"tickets@{number}", "tickets"], f"/{number}", "/data") for number in (7, 8))
SERVED = ServedModel("tickets-base", "/m", "/d", "bf16", "127.0.0.1", 1, "/k", "s", room=2)


def named(*placed: ServedAdapter) -> dict[str, list[str]]:
    return {one.folder: one.names for one in placed}


@pytest.mark.parametrize(
    ("moves", "names"), [(False, (["tickets@7", "tickets"], ["tickets@8"])), (True, (["tickets@7"], EIGHT.names))]
)
def test_the_name_without_a_version_moves_only_if_it_was_asked_for(moves, names):
    first = adapters.placed([], SEVEN, moves=False)
    placed = adapters.placed(first, EIGHT, moves)
    assert named(*placed) == {"/7": names[0], "/8": names[1]}
    assert named(*adapters.placed(placed, EIGHT, moves)) == named(*placed)
    assert adapters.placed(placed, SEVEN, moves=True)[1].names == SEVEN.names  # back to the former version


def test_a_version_that_was_registered_again_replaces_the_former(tmp_path):
    again = ServedAdapter(["tickets@7", "tickets"], "/again", "/data")
    assert adapters.placed([SEVEN], again, moves=False) == [again]


def test_an_adapter_is_removed_by_any_of_its_names():
    served = replace(SERVED, adapters=[SEVEN])
    assert adapters.without(served, "tickets").adapters == adapters.without(served, "tickets@7").adapters == []
    with pytest.raises(Fault, match=r"^tickets@8: not loaded; the server has tickets@7$"):
        adapters.without(served, "tickets@8")


def test_servers_that_take_no_adapters_are_refused_in_one_line(tmp_path):
    with pytest.raises(Fault, match=r"^--port 1: no server was started at this port; python -m flows.serve NAME"):
        adapters.running(tmp_path, 1)
    replace(SERVED, room=0).write(tmp_path / server.FILE)
    with pytest.raises(Fault, match=r"^--port 1: the server has a merged model; it takes adapters if started with"):
        adapters.running(tmp_path, 1)
    SERVED.write(tmp_path / server.FILE)
    with pytest.raises(Fault, match=r"^http://127.0.0.1:1 does not answer"):
        adapters.running(tmp_path, 1)
    full = replace(SERVED, adapters=[SEVEN, EIGHT, ServedAdapter(["a@1"], "/a", "/data")])
    with pytest.raises(
        Fault, match=r"memory for 2 adapters, and tickets@7, tickets@8, a@1 are 3; unload one, or start"
    ):
        adapters.change(SERVED, full, tmp_path)
    assert ServedModel.read(tmp_path / server.FILE) == SERVED
