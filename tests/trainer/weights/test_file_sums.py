"""Checksums of a base's files are read where they can be, and nothing that stands in their place holds anybody up."""

import os

import pytest

from trainer.weights import file_sums

MADE = {
    "nothing": lambda file: None,
    "a FIFO": os.mkfifo,
    "a folder": os.mkdir,
    "a list": lambda file: file.write_text("[1]"),
    "half a file": lambda file: file.write_text('{"__0_0.distcp": "12'),
    "brackets": lambda file: file.write_text("[" * 200_000),
    "no text": lambda file: file.write_bytes(b"\xff\xfe"),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("what", MADE)
def test_what_cannot_be_read_is_as_if_it_were_not_there(what, tmp_path):
    MADE[what](tmp_path / file_sums.FILE)
    assert file_sums.read(tmp_path) == {}


def test_what_was_written_is_read(tmp_path):
    file_sums.write(tmp_path, {"__0_0.distcp": "ab", "__1_0.distcp": "cd"})
    assert file_sums.read(tmp_path) == {"__0_0.distcp": "ab", "__1_0.distcp": "cd"}
