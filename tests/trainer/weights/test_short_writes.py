"""Large content goes into files in short writes, for which the kernel has memory at hand, and is all there."""

import io
import itertools
import os

import pytest
import xxhash

from trainer.weights import short_writes
from trainer.weights.conversion.summed_stream import SummedStream

LONGEST = short_writes.LONGEST
CONTENT = bytes(number % 251 for number in range(3 * LONGEST + 5))


@pytest.fixture
def lengths(monkeypatch):
    """Lengths of what is written by os.pwrite(), which takes but half of it, as it may."""
    found, pwrite = [], os.pwrite

    def write(descriptor, content, at):
        found.append(len(content))
        return pwrite(descriptor, content[: -(-len(content) // 2)], at)

    monkeypatch.setattr(os, "pwrite", write)
    return found


class Noting(io.BytesIO):
    """A file in memory that notes the lengths of what is written."""

    def __init__(self):
        super().__init__()
        self.lengths: list[int] = []

    def write(self, content) -> int:
        self.lengths.append(len(content))
        return super().write(content)


@pytest.mark.parametrize("at", [0, 1, LONGEST - 1, LONGEST, 5 * LONGEST + 17])
@pytest.mark.parametrize("length", [0, 1, LONGEST - 17, LONGEST, LONGEST + 1, len(CONTENT)])
def test_writes_are_short_end_at_whole_blocks_and_are_all_of_it(at, length):
    found = [*short_writes.cut(memoryview(CONTENT)[:length], at)]
    assert b"".join(found) == CONTENT[:length]
    for some in found[:-1]:
        at += len(some)
        assert len(some) <= LONGEST and not at % LONGEST
    assert len(found[-1]) <= LONGEST


def test_a_conversion_writes_so_and_sums_up_each_piece():
    file = Noting()
    stream = SummedStream(file)
    for content in (CONTENT, CONTENT[:100]):
        stream.tell()
        stream.write(b"its header")
        stream.write(content)
    end = stream.tell()
    assert max(file.lengths) == LONGEST
    places = [*stream.sums, end]
    written = file.getvalue()
    assert len(places) == 3 and len(written) == end and not any(place % 64 for place in places)
    for first, last in itertools.pairwise(places):
        assert stream.sums[first] == xxhash.xxh3_128_hexdigest(written[first:last])


def test_what_the_kernel_leaves_of_a_write_follows(lengths, tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        short_writes.write_at(file.fileno(), memoryview(CONTENT), 100)
    assert path.read_bytes() == bytes(100) + CONTENT
    assert max(lengths) == LONGEST
