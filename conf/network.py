"""Environment variables of training on GPUs over several hosts, each with its reason; presets for kinds of networks.

    python -m conf.network                              the presets
    python -m conf.network ib-h100 [CONF] [--gpu b200]  what a run on such a network gets, and why

environment(run, gpu) is what a rank starts with: what every run on GPUs gets, and the preset that gang.network names.
Whatever the host's environment has already wins: a site knows its adapters, traffic classes and subnets, and what is
theirs (NCCL_IB_HCA, NCCL_IB_TC, NCCL_IB_GID_INDEX, NCCL_SOCKET_IFNAME) is set on its workers. Variables beat
/etc/nccl.conf as well, so that a preset has only what NCCL 2.28 does not find out by itself.

rank_order(places) is the order of hosts: those under one switch are neighbours, as pipeline and data parallel groups
talk to neighbours most. A host's place is GANG_PLACE of its environment (of its Prefect worker, or by slurm.export and
kubernetes.env), else SLURM_TOPOLOGY_ADDR, which Slurm sets where it knows the network (TopologyPlugin=topology/tree);
with kubernetes.topology it is the number of the pod, as Kueue puts neighbours next to one another.
Within a host the local rank is the number of the GPU on the bus (CUDA_DEVICE_ORDER), so that
rank i of each host sits on the same rail: NCCL then meets it over one switch, and all-to-all goes through NVLink to the
GPU of the right rail (PXN, on by default).

Not covered: TCP's kernel parameters, traffic classes of RoCE, SHARP, AMD's and Intel's networks.
"""

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from conf.load import load
from conf.schema.run import Run
from conf.schema.sections import Layout
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
    adapters: int | None = None  # RDMA devices of a host, where the kind of host has a number
    network: float | None = None  # GB/s per GPU and direction, by the data sheet


# Sources: [nccl] docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html, [ofi] aws/aws-ofi-nccl doc/efa-env-var.md,
# [aws] aws-samples/awsome-distributed-training, [torch] ProcessGroupNCCL.hpp of torch 2.11, [core] megatron-core 0.19,
# [bridge] the performance recipes in megatron-bridge 0.6, [te] Transformer Engine 2.20, [ibm] IBM Cloud's docs for H100
# on 8 subnets.
PRESETS = {
    "ib-h100": Preset(
        "InfiniBand, an adapter per GPU on its own rail, as DGX and HGX of H100, H200 and B200 have it",
        (
            # [nccl] NCCL_NET: "doesn't automatically fall back on the internal IB or Socket implementation"
            Setting(
                "NCCL_NET", "IB", "fail where InfiniBand is not there, instead of training a tenth as fast over TCP"
            ),
            # [nccl] NCCL_CROSS_NIC: "suited for networks with per NIC switches (rails)"; 2, the default, tries to
            Setting("NCCL_CROSS_NIC", "0", "stay on a rail: traffic between rails goes through the spine and collides"),
        ),
        adapters=8,
        network=50,
    ),
    "roce": Preset(
        "RDMA over Ethernet, several paths between hosts",
        (
            # [nccl] NCCL_NET, as above
            Setting("NCCL_NET", "IB", "fail where RDMA is not there, instead of falling back to TCP"),
            # [nccl] "useful on multi-level fabrics which need multiple queue pairs to have good routing entropy";
            # Google's gIB sets 4, [ibm] 16 for 8 separate subnets
            Setting("NCCL_IB_QPS_PER_CONNECTION", "4", "Ethernet sends a queue pair over one path: several use more"),
            # [nccl] 1 splits each message, which "may cause a visible latency degradation"; 0 takes queue pairs in turn
            Setting("NCCL_IB_SPLIT_DATA_ON_QPS", "0", "whole messages in turn, as all-to-all has many small ones"),
            # [ibm] 22; [nccl] 2 minutes until an error, 30 s by default
            Setting(
                "NCCL_IB_TIMEOUT", "22", "a link that flaps for a minute is waited for; a dead host is seen anyway"
            ),
        ),
        network=50,
    ),
    "efa-p5": Preset(
        "AWS p5.48xlarge and p5e.48xlarge: 32 EFA adapters of 100 Gb/s, aws-ofi-nccl 1.7.3 or newer",
        (
            # [nccl] NCCL_NET_PLUGIN: libnccl-net-ofi.so; NCCL_NET is left out, as the plugin has changed its name
            Setting("NCCL_NET_PLUGIN", "ofi", "NCCL reaches EFA only through this plugin, which brings its own tuner"),
            # [ofi] "set to 0 when os.fork() causes OSError: Cannot allocate memory"
            Setting(
                "FI_EFA_USE_HUGE_PAGE", "0", "data loaders and checkpoint writers are forked, which huge pages break"
            ),
            # [aws] micro-benchmarks/nccl-tests
            Setting("NCCL_SOCKET_IFNAME", "^lo,docker,veth", "ranks first meet over the host's own interface"),
            # Not set, [ofi]: FI_PROVIDER and NCCL_PROTO are for plugins up to 1.5, FI_EFA_USE_DEVICE_RDMA up to 1.6,
            # FI_EFA_FORK_SAFE is set by the plugin itself, RDMAV_FORK_SAFE breaks newer kernels.
        ),
        adapters=32,
        network=50,
    ),
    "efa-p6-b200": Preset(
        "AWS p6-b200.48xlarge: 8 EFA adapters of 400 Gb/s",
        (
            # as for p5
            Setting("NCCL_NET_PLUGIN", "ofi", "NCCL reaches EFA only through this plugin, which brings its own tuner"),
            Setting(
                "FI_EFA_USE_HUGE_PAGE", "0", "data loaders and checkpoint writers are forked, which huge pages break"
            ),
            Setting("NCCL_SOCKET_IFNAME", "^lo,docker,veth", "ranks first meet over the host's own interface"),
        ),
        adapters=8,
        network=50,
    ),
    "nvl72": Preset(
        "GB200 or GB300 NVL72: 18 hosts of 4 GPUs on one NVLink, InfiniBand between racks",
        (
            # [nccl] NCCL_MNNVL_ENABLE: 1 fails where it cannot be; 2, the default, falls back
            Setting("NCCL_MNNVL_ENABLE", "1", "fail where IMEX is not set up, instead of using InfiniBand in the rack"),
            # [nccl] "This feature also requires NCCL CUMEM support"
            Setting("NCCL_CUMEM_ENABLE", "1", "memory of another host is mapped by CUDA's cuMem calls alone"),
            Setting("NCCL_NET", "IB", "between racks, as ib-h100"),
        ),
        adapters=4,
        network=50,
    ),
    "ethernet": Preset(
        "no RDMA: TCP",
        (
            # [nccl] NCCL_IB_DISABLE, NCCL_NET
            Setting("NCCL_NET", "Socket", "do not look for RDMA"),
            # [nccl] "For generic 100G networks, this value can be manually set to 4", both; their product may be 64
            Setting("NCCL_SOCKET_NTHREADS", "4", "one thread copies about 25 Gb/s"),
            Setting("NCCL_NSOCKS_PERTHREAD", "4", "one TCP connection seldom fills a 100 Gb/s link"),
            # [aws]; by default NCCL leaves out lo and docker, and takes all else
            Setting("NCCL_SOCKET_IFNAME", "^lo,docker,veth,cni,flannel,cali", "not over the bridges of containers"),
        ),
    ),
}

# What the five older systems set and this one does not, and why.
LEFT_OUT = {
    "NVTE_FUSED_ATTN=0": "megatron-core sets it for the attention that is chosen, and stops where it finds another "
    "value; without the package flash-attn it would leave the slow attention only",
    "NCCL_ALGO=Ring": "for results that repeat to the last bit; NCCL's choice is faster",
    "NCCL_TIMEOUT=3600": "no variable of NCCL's or torch's",
    "NCCL_DEBUG=INFO": "thousands of lines per rank; WARN is set, and names what fails",
    "NCCL_HOSTID": "NCCL takes host name and boot id; set it where containers of one host differ in these",
    "NCCL_ASYNC_ERROR_HANDLING": "the old name of TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCHDYNAMO_DISABLE=1": "the trainer sets it on a CPU; on a GPU compiled activations are faster",
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True": "the trainer sets it itself, on one host as well",
}


def environment(run: Run, gpu: str | None) -> dict[str, str]:
    """Environment variables that a rank of this run starts with.

    `gpu` is one of conf/planner/hardware.py's names, or the name that the GPU's driver gives. None means a CPU, which
    needs none of them.
    """
    return {setting.name: setting.value for setting in settings(run, gpu)}


def settings(run: Run, gpu: str | None) -> list[Setting]:
    """Settings of a run, each with its reason. A later one replaces an earlier one of the same name."""
    if gpu is None:
        return []
    found = {setting.name: setting for setting in (*_of_any(run), *_of_model(run.layout, is_blackwell(gpu)))}
    if run.gang.network and run.layout.nodes > 1:
        chosen = PRESETS[run.gang.network]
        found |= {setting.name: setting for setting in chosen.settings}
        if run.moe.dispatcher == "flex":
            found |= {setting.name: setting for setting in _of_flex(run.gang.network == "nvl72")}
    return list(found.values())


def sockets(interface: str = "lo") -> dict[str, str]:
    """Variables that have ranks listen on one interface. On the loopback interface no other host can connect."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}


def meeting(nodes: int, node: int, address: str, port: int) -> list[str]:
    """Options of trainer/startup/torchrun.py: number and rank of hosts, and the address of the first."""
    options = ["--nnodes", str(nodes), "--rdzv-backend", "relayed", "--rdzv-conf", f"rank={node}"]
    return [*options, "--rdzv-endpoint", f"{address}:{port}", "--max-restarts", "0"]


def is_blackwell(gpu: str) -> bool:
    return any(name in gpu.lower() for name in BLACKWELL)


def _of_any(run: Run) -> Iterator[Setting]:
    """Settings of every run on GPUs. They make sure that failures are found quickly, once, and with their cause."""
    # [torch] 3 = SkipCleanUp, torch's own default; torchrun would set 1, which first calls ncclCommAbort
    yield Setting(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING", "3", "end at an error at once: aborting NCCL first may hang itself"
    )
    # [torch] default 480; longer than gang.stall_seconds, whose watch names the rank that is behind
    beat = str(round(max(300, 2 * run.gang.stall_seconds)))
    yield Setting(
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", beat, "a rank stuck in a call of CUDA's ends, if nothing else saw it"
    )
    # [torch] the flight recorder, by the names that torch 2.11 wants; an entry takes about 1 KB
    yield Setting("TORCH_FR_BUFFER_SIZE", "2000", "remember the last collectives of each rank")
    yield Setting(
        "TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "write them down when one runs out of time: shows who did not come"
    )
    yield Setting("TORCH_FR_DUMP_TEMP_FILE", f"{run.paths.logs}/collectives-", "where; the rank is appended")
    # [torch] default 15000; seen on 2 H200: written after 8 s, both ranks still there after 50 s; with 5000 for 24 s
    yield Setting("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "5000", "and then end, after four times as long")
    yield Setting("NCCL_DEBUG", "WARN", "a line for what fails, which tells the cause of a failure; default: none")
    # [bridge] COMMON_PERF_ENV_VARS, in all recipes
    yield Setting("TORCH_NCCL_HIGH_PRIORITY", "1", "communication is waited for by all: its kernels go first")
    # Transformer Engine 2.20: on Hopper, in bf16, widths of whole 128s; elsewhere it starts a product an expert
    yield Setting("NVTE_USE_CUTLASS_GROUPED_GEMM", "1", "one kernel for all experts: the host starts less")
    # [torch] default /tmp/torchinductor_USER, which goes with a container; Triton keeps its own below it
    kept = f"{run.paths.kernels}/inductor"
    yield Setting("TORCHINDUCTOR_CACHE_DIR", kept, "what a first step compiles is there for the next start")
    yield Setting("CUDA_DEVICE_ORDER", "PCI_BUS_ID", "local rank i is GPU i of every host, on the same rail")
    if run.train.overlap_tp:
        # [te] else its buffers want NVLink multicast, which not every host lets a container have
        yield Setting("UB_SKIPMC", "1", "buffers between tensor-parallel ranks are shared by CUDA IPC")
    if run.train.cuda_graphs:
        # [core] asks for it beside the allocator's expandable segments
        yield Setting("NCCL_GRAPH_REGISTER", "0", "buffers of CUDA graphs are not NCCL's to register")


def _of_model(layout: Layout, blackwell: bool) -> Iterator[Setting]:
    # two of the older systems; [bridge] 427 of 443 recipes: buffers in every GPU, which recomputation could use
    yield Setting("NCCL_NVLS_ENABLE", "0", "NVLink SHARP takes memory of each communicator, and MoE has many")
    if blackwell:
        # [bridge] 32 in all recipes for B200 and GB200; [core] the rule below "no longer exists since Blackwell"
        yield Setting("CUDA_DEVICE_MAX_CONNECTIONS", "32", "streams do not wait for one another")
    elif layout.tp > 1 or layout.cp > 1:
        # [core] asserts it for tp or cp before Blackwell
        why = "kernels start in the order of their calls, so that tp and cp communication overlaps"
        yield Setting("CUDA_DEVICE_MAX_CONNECTIONS", "1", why)
    if layout.world > 1:
        # [bridge] 20 in 441 of 452 recipes; one of the older systems 16
        for direction in ("FWD", "BWD"):
            name = f"NVTE_{direction}_LAYERNORM_SM_MARGIN"
            yield Setting(name, "20", "norms leave 20 multiprocessors to communication")
    if layout.pp > 1 and layout.nodes > 1:
        # [bridge] 49 recipes; [nccl] 128 KiB by default
        yield Setting("NCCL_P2P_NET_CHUNKSIZE", "2097152", "stages send whole layers' inputs: large pieces")


def _of_flex(rack: bool) -> Iterator[Setting]:
    """Settings that DeepEP's HybridEP reads; their source is [bridge]."""
    yield Setting("USE_MNNVL", "1" if rack else "0", "whether NVLink joins hosts")
    yield Setting("NVLINK_DOMAIN_SIZE", "72" if rack else "8", "GPUs that NVLink joins")


def rank_order(places: Mapping[str, str]) -> list[str]:
    """Sort hosts by their place, such as a rack or Slurm's SLURM_TOPOLOGY_ADDR ("spine.leaf.host"), then by name.

    Numbers count as numbers, so that host10 comes after host9.
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
    with closed_pipe.quiet():
        sys.exit(main())
