"""Options of torchrun, accelerate and deepspeed, which stand before the options of a stack."""

from collections.abc import Mapping

from flows.adopt.stack import Target

KEYS: Mapping[str, Target] = {
    "nproc_per_node": "gpus",
    "num_processes": "gpus",
    "num_gpus": "gpus",
    "nnodes": "nodes",
    "num_machines": "nodes",
}
START = "gang.engine starts the processes"
LEFT_OUT: Mapping[str, str] = {
    "node_rank": START,
    "machine_rank": START,
    "master_*": START,
    "main_process_*": START,
    "rdzv*": START,
    "standalone": START,
    "config_file": "a file of accelerate: FSDP and DeepSpeed have no counterpart; the planner chooses a layout",
    "multi_gpu": START,
    "mixed_precision": "the precision of the stack's own keys counts",
    "include": START,
    "no_python": START,
}
