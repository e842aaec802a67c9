"""A disk that is full while a checkpoint is written is one line: what libraries say of it goes to the rank's log."""

import logging

from trainer.startup import console
from trainer.training import bridge_loop


def test_what_a_writer_says_of_a_full_disk_goes_to_the_log_alone(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with console.megatron_to(tmp_path):
        logging.getLogger(console.WRITER).error("Local worker 0 encountered an error: unexpected pos 704 vs 598")
        logging.getLogger("megatron.core.other").error("something else")
    assert capfd.readouterr().err == "something else\n"
    assert "unexpected pos" in (tmp_path / "rank00000.log").read_text()


def test_a_writer_that_has_died_is_no_failure_of_the_loop():
    """Bridge logs it with a stack trace; trainer.train says in one line what became of it."""

    class CheckpointException(BaseException):
        """As torch has it."""

    def record(error: BaseException) -> logging.LogRecord:
        return logging.LogRecord("bridge", logging.ERROR, "file", 1, "failed", None, (type(error), error, None))

    text = "ranks:dict_keys([0])\nRuntimeError: Worker failure: An error is caught while starting worker 0"
    assert not bridge_loop._is_failure(record(CheckpointException(text)))
    assert bridge_loop._is_failure(record(CheckpointException("ranks:dict_keys([0])\nKeyError: 7")))
