"""Seconds of an evaluation by vLLM: start, weights, answers and log-likelihoods.

    duration(run, facts, gpu, serving) -> float

START and COMPILE were measured on an H200 with tiny models in bf16 (November 2026): 51 s until the first answer,
including 34 s for compiling, the profile of graphs and their capture; 52 s with 9.6 GB of weights. Everything else is
computed. A step of decoding reads all weights of a GPU and the cache of its rows, because many rows together use most
experts. A prompt takes 2 FLOPs per weight and token. Rows count with their full length; packed rows are far shorter, so
they are taken to be answered together, as many as vLLM computes at once.

Not covered: storage that several hosts read at once, an existing compile cache.
"""

from math import ceil

from conf.model_facts import ModelFacts
from conf.planner import parameters
from conf.planner.hardware import GB, Gpu
from conf.planner.rates import GEMM, HBM
from conf.planner.serving.layout import SEQUENCES, Serving
from conf.planner.traffic import LATENCY
from conf.schema.run import Run

START, COMPILE = 17.0, 34.0  # imports, device and engine; compiling and graphs, which eager skips
RANKS = 15.0  # for the processes of several GPUs to import and connect
READ = 2 * GB  # bytes/s of a host's storage, for all of its GPUs
ASKED = 10.0  # for each task: lm-eval's start, and the first batch of each shape
LAYER = {False: 0.03e-3, True: 0.4e-3}  # seconds of the host to start a layer: from a graph, and eager
ROWS = 1000  # assumption if evaluate.rows is null, as the data are not counted yet


def duration(run: Run, facts: ModelFacts, gpu: Gpu, serving: Serving) -> float:
    way, tasks = serving.way, max(1, len(run.evaluate.tasks))
    rows = run.evaluate.rows or ROWS
    at_once = max(1, min(SEQUENCES if run.data.packed else serving.at_once, rows))
    bytes_read = parameters.total(facts) * (way.codes.bytes if way.codes else way.byte)
    low = "fp8" if way.quantized and "fp8" in gpu.tflops else "fp32" if way.byte == 4 else "bf16"
    share = GEMM["current" if low == "fp8" else low]
    flops = gpu.flops(low) * share * way.tp  # stages of a pipeline wait for one another
    prompts = 2 * parameters.active(facts) * rows * serving.row / flops
    cached = min(at_once * serving.row, serving.memory.cached) * serving.memory.token
    read = (serving.memory.weights + cached) / (gpu.hbm * HBM)
    waits = facts.layers * ((2 * LATENCY if way.tp > 1 else 0) + LAYER[way.eager])
    step = way.hosts * read + waits
    answers = prompts + ceil(rows / at_once) * run.evaluate.max_tokens * step
    start = START + (0 if way.eager else COMPILE) + (RANKS if way.tp * way.hosts > 1 else 0) + ASKED * tasks
    return start + bytes_read / READ + tasks * (answers + prompts)  # the prompts once more, for log-likelihoods
