"""Patch: stores through which processes connect listen only on the given address.

torch's TCPStore takes a host name, but its server listens on every address of the host, without a password
(https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/TCPStore.cpp). Anyone who can write to it can
direct ranks to another address, and ranks unpickle the messages that they exchange. Remove when TCPStore listens on the
address of its host name.
"""

# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false

import importlib
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from trainer.patches import versions

if TYPE_CHECKING:
    from torch.distributed import TCPStore


def listen(host: str, port: int = 0, **settings: Any) -> "TCPStore":
    """Open a store that listens on one address. Port 0 selects a free port."""
    from torch.distributed import TCPStore

    listener = socket.create_server((host, port), backlog=2048)
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, master_listen_fd=listener.detach(), **settings)


def install() -> None:
    """Make the store of a process group's first rank listen on MASTER_ADDR, or on the address of its tcp:// URL."""
    versions.check(__name__)
    from torch.distributed import TCPStore

    # The package also has a function of this name.
    rendezvous = importlib.import_module("torch.distributed.rendezvous")

    def create(
        hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, use_libuv: bool = True
    ) -> TCPStore:
        if rank == 0 and not rendezvous._torchelastic_use_agent_store():
            return listen(hostname, port, world_size=world_size, timeout=timeout)
        return TCPStore(hostname, port, world_size, is_master=False, timeout=timeout)

    rendezvous._create_c10d_store = create
