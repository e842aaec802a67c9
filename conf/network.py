"""Environment variables of training on GPUs over several hosts, each with its reason; presets for kinds of networks.

    python -m conf.network                              the presets
    python -m conf.network ib-h100 [CONF] [--gpu b200]  the environment of a run on such a network, with reasons

environment(run, gpu) has the variables of every run on GPUs, and those of the preset in gang.network. Variables of the
host's environment take precedence: site-specific ones (NCCL_IB_HCA, NCCL_IB_TC, NCCL_IB_GID_INDEX, NCCL_SOCKET_IFNAME)
are set on its workers. Variables also override /etc/nccl.conf, so a preset has only settings that NCCL 2.28 does not
detect.

rank_order(places) is the order of hosts: hosts under one switch are neighbours, as pipeline and data parallel groups
communicate most with neighbours. A host's place is GANG_PLACE in its environment (of its Prefect worker, or by
slurm.export and kubernetes.env), else SLURM_TOPOLOGY_ADDR, which Slurm sets if it knows the network
(TopologyPlugin=topology/tree); with kubernetes.topology it is the number of the pod, as Kueue places neighbours next to
each other. Within a host the local rank is the number of the GPU on the bus (CUDA_DEVICE_ORDER). Rank i of each host is
therefore on the same rail: NCCL connects them over one switch, and all-to-all uses NVLink to the GPU of the right rail
(PXN, on by default).

conf/tables/networks.yaml has the presets, and settings of every run. Sources of the other settings: [torch]
ProcessGroupNCCL.hpp of torch 2.11, [core] megatron-core 0.19, [bridge] the performance recipes in megatron-bridge 0.6,
[te] Transformer Engine 2.20, [nccl] NCCL's user guide.

Not covered: TCP's kernel parameters, traffic classes of RoCE, SHARP, AMD's and Intel's networks.
"""

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from conf import strict_yaml
from conf.load import load
from conf.schema.run import Run
from contract import closed_pipe
from contract.faults import ConfigError

BLACKWELL = ("b200", "gb200", "b300", "gb300")


@dataclass(frozen=True)
class Setting:
    name: str
    value: str
    why: str


@dataclass(frozen=True)
class Preset:
    means: str
    settings: tuple[Setting, ...]
    adapters: int | None = None  # RDMA devices per host, if this kind of host has a fixed number
    network: float | None = None  # GB/s per GPU and direction, by the data sheet


_TABLE = strict_yaml.table("networks")
PRESETS = {
    name: Preset(**{**preset, "settings": tuple(Setting(**setting) for setting in preset["settings"])})
    for name, preset in _TABLE["presets"].items()
}
EVERY = [Setting(**setting) for setting in _TABLE["every"]]
LEFT_OUT: dict[str, str] = _TABLE["left_out"]  # variables that other systems set and this one does not, with the reason


def environment(run: Run, gpu: str | None) -> dict[str, str]:
    """Environment variables of a rank of this run.

    `gpu` is a name of conf/planner/hardware.py, or the driver's name of the GPU. None means a CPU, which needs no
    variables.
    """
    return {setting.name: setting.value for setting in settings(run, gpu)}


def settings(run: Run, gpu: str | None) -> list[Setting]:
    """Return the settings of a run, each with its reason. A later setting replaces an earlier one of the same name."""
    if gpu is None:
        return []
    blackwell = any(name in gpu.lower() for name in BLACKWELL)
    all_of_run = [*_of_run(run, blackwell)]
    if run.gang.network and run.layout.nodes > 1:
        all_of_run += PRESETS[run.gang.network].settings
        if run.moe.dispatcher == "flex":
            all_of_run += _of_flex(run.gang.network == "nvl72")
    return list({setting.name: setting for setting in all_of_run}.values())


def sockets(interface: str = "lo") -> dict[str, str]:
    """Return variables that make ranks listen on one interface only. Other hosts cannot connect to the loopback."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}


def meeting(nodes: int, node: int, address: str, port: int) -> list[str]:
    """Return options of trainer/startup/torchrun.py: number and rank of hosts, and the address of the first host."""
    options = ["--nnodes", str(nodes), "--rdzv-backend", "relayed", "--rdzv-conf", f"rank={node}"]
    return [*options, "--rdzv-endpoint", f"{address}:{port}", "--max-restarts", "0"]


def _of_run(run: Run, blackwell: bool) -> Iterator[Setting]:
    """Yield settings of every run on GPUs, then those that depend on its keys."""
    yield from (replace(setting, value=setting.value.format(run=run)) for setting in EVERY)
    # [torch] default 480; longer than gang.stall_seconds, as the gang's watch names the late rank
    beat = str(round(max(300, 2 * run.gang.stall_seconds)))
    why = "end a rank that hangs in a CUDA call, if nothing else notices it"
    yield Setting("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", beat, why)
    if run.train.overlap_tp:
        # [te] otherwise its buffers need NVLink multicast, which not every host allows in a container
        yield Setting("UB_SKIPMC", "1", "buffers between tensor-parallel ranks are shared by CUDA IPC")
    if run.train.cuda_graphs:
        # [core] requires it together with the allocator's expandable segments
        yield Setting("NCCL_GRAPH_REGISTER", "0", "NCCL does not register buffers of CUDA graphs")
    layout = run.layout
    if blackwell:
        # [bridge] 32 in all recipes for B200 and GB200; [core] the rule below "no longer exists since Blackwell"
        yield Setting("CUDA_DEVICE_MAX_CONNECTIONS", "32", "streams do not wait for one another")
    elif layout.tp > 1 or layout.cp > 1:
        # [core] asserts it for tp or cp before Blackwell
        why = "kernels start in the order of their calls, and tp and cp communication overlaps"
        yield Setting("CUDA_DEVICE_MAX_CONNECTIONS", "1", why)
    if layout.world > 1:
        # [bridge] 20 in 441 of 452 recipes
        for direction in ("FWD", "BWD"):
            name = f"NVTE_{direction}_LAYERNORM_SM_MARGIN"
            yield Setting(name, "20", "norms leave 20 multiprocessors to communication")
    if layout.pp > 1 and layout.nodes > 1:
        # [bridge] 49 recipes; [nccl] 128 KiB by default
        yield Setting("NCCL_P2P_NET_CHUNKSIZE", "2097152", "stages send whole layers' inputs: large pieces")


def _of_flex(rack: bool) -> Iterator[Setting]:
    """Settings for DeepEP's HybridEP; their source is [bridge]."""
    yield Setting("USE_MNNVL", "1" if rack else "0", "whether NVLink joins hosts")
    yield Setting("NVLINK_DOMAIN_SIZE", "72" if rack else "8", "GPUs that NVLink joins")


def rank_order(places: Mapping[str, str]) -> list[str]:
    """Sort hosts by their place, such as a rack or Slurm's SLURM_TOPOLOGY_ADDR ("spine.leaf.host"), then by name.

    Numbers in names are compared as numbers: host10 comes after host9.
    """
    return sorted(places, key=lambda host: (_natural(places[host]), _natural(host)))


def _natural(text: str) -> list[tuple[int, int, str]]:
    parts = re.findall(r"\d+|\D+", text)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conf.network", description="Print the environment of a network.")
    parser.add_argument("name", nargs="?", choices=sorted(PRESETS), help="a preset; none = list them")
    parser.add_argument("conf", nargs="?", default="glm47", help="the run (default glm47)")
    parser.add_argument("--gpu", default="h100", help="default h100")
    options = parser.parse_args()
    if options.name is None:
        for name, preset in PRESETS.items():
            print(f"{name:12} {preset.means}")
        return 0
    try:
        run = load(options.conf, [f"gang.network={options.name}"])
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"# {options.name}: {PRESETS[options.name].means}")
    for setting in settings(run, options.gpu):
        print(f"{setting.name + '=' + setting.value:55} # {setting.why}")
    print("# Left out:")
    for name, why in LEFT_OUT.items():
        print(textwrap.fill(f"{name}: {why}", 118, initial_indent="#   ", subsequent_indent="#     "))
    return 0


if __name__ == "__main__":
    closed_pipe.run(main)
