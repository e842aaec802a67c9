"""Start ranks as torchrun does, but with a rendezvous store that nobody else can reach.

    python -m trainer.startup.torchrun [torchrun's options] -m MODULE ...

torchrun's own rendezvous listens on every address of the host without a password, and with --standalone it unpickles
data that anyone can send. Here the store listens on the loopback address of the first host, and nothing in it is
unpickled. Other hosts reach it through a relay (relay.py) at --rdzv-endpoint, and need the secret in GANG_KEY. Ranks do
not inherit the secret.
"""

# pyright: reportPrivateImportUsage=false

import os

from torch.distributed import PrefixStore, TCPStore, run
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from trainer.patches import store_address
from trainer.startup import relay

BACKEND = "relayed"
KEY = "GANG_KEY"
HOST = "127.0.0.1"
WITHIN = 600  # seconds for all hosts to join, as in torch's static rendezvous


class Rendezvous(StaticTCPRendezvous):
    """Rendezvous of hosts whose ranks are known in advance, as in torch's static rendezvous."""

    key: bytes

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        address = (self.master_addr, self.master_port)
        if self.rank == 0:
            store = store_address.listen(HOST, timeout=self.timeout, wait_for_workers=False)
            if self.world_size > 1:
                relay.admit(address, self.key, store.port)
        else:
            port = relay.reach(address, self.key, WITHIN)
            store = TCPStore(HOST, port, is_master=False, timeout=self.timeout)
        prefixed = PrefixStore(self.run_id, store)
        return RendezvousInfo(prefixed, self.rank, self.world_size, RendezvousStoreInfo(HOST, store.port))


def create(parameters: RendezvousParameters) -> Rendezvous:
    host, port = parse_rendezvous_endpoint(parameters.endpoint, 0)
    rank, hosts = int(parameters.config["rank"]), parameters.max_nodes
    rendezvous = Rendezvous(host, port, rank, hosts, parameters.run_id, WITHIN)
    rendezvous.key = os.environ.pop(KEY, "").encode()
    if hosts > 1 and not rendezvous.key:
        raise ValueError(f"{hosts} hosts need the same secret in {KEY} on each of them")
    return rendezvous


def main(arguments: list[str] | None = None) -> None:
    rendezvous_handler_registry.register(BACKEND, create)
    run.main(arguments)


if __name__ == "__main__":
    main()
