"""trainer/patches/store_address.py, with the store of a single process and torch's own."""

# pyright: reportPrivateImportUsage=false

import subprocess
import sys

import psutil
from torch.distributed import TCPStore

from tests.support.listening import is_exposed, listeners, listening

ALONE = """
import os, sys, time
from torch import distributed
from trainer.patches import store_address
store_address.install()
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0", GLOO_SOCKET_IFNAME="lo")
distributed.init_process_group("gloo")
print(os.getpid(), flush=True)
sys.stdin.read()
"""


def test_upstream_a_store_listens_on_every_address():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert store.port in {port for address, port in listeners(psutil.Process()) if is_exposed((address, port))}


def test_the_store_of_a_single_process_listens_on_the_loopback_address():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with listening() as seen, subprocess.Popen([sys.executable, "-c", ALONE], env=seen.environment, **pipes) as process:
        assert process.stdout.readline() == f"{process.pid}\n"
        seen.look()
        process.stdin.close()
    assert seen.at and not seen.exposed(), seen.at
