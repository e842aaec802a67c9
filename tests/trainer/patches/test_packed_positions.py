"""Rotary positions of packed rows: the patch beside megatron-core's own function, which it is to equal bit by bit."""

import json


def test_packed_rows_are_turned_at_once_to_the_same_numbers(configure, ranks, work):
    result = ranks("turned_rows", configure("llama", f"paths.output={work}/turned"))
    assert result.code == 0, result.output
    found = json.loads(next(line for line in result.output.splitlines() if line.startswith('{"different"')))
    assert found["different"] == []  # numbers and gradients, at cp 1, 2 and 4
    assert found["patched"] == 1 and found["computed"] == 1
    assert found["upstream"] == 2, "megatron-core has no loop any more: the patch can go"
