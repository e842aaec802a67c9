"""trainer/patches/store_address.py, with the store of a single process and torch's own."""

import os
import subprocess
import sys

from torch.distributed import TCPStore

from tests.support.listening import Listening, listening

ALONE = """
import os, sys, time
from torch import distributed
from trainer.patches import store_address
store_address.install()
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
distributed.init_process_group("gloo")
print(distributed.distributed_c10d._get_default_store().underlying_store.port, flush=True)
sys.stdin.read()
"""


def test_upstream_a_store_listens_on_every_address():
    store, seen = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), Listening(os.getpid())
    seen.look()
    assert store.port in {port for _, port in seen.exposed()}


def test_the_store_of_a_single_process_listens_on_the_loopback_address():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", ALONE], **pipes)
    with process, listening(process) as seen:
        port = int(process.stdout.readline())
        seen.look()
        process.stdin.close()
    assert ("127.0.0.1", port) in seen.at and not seen.exposed(), seen.at
