"""Section `reinforce` of a run's YAML: reinforcement learning on rewards of the model's answers, after training.

The stage exists if reinforce.steps is above 0. For adapter, layout, precision and optimizer it uses training's keys.
Rules between its keys are in conf/rules/reinforcement.py.
"""

from typing import Annotated, Literal

from pydantic import Field

from conf.schema.bearing import NOWHERE, bears
from conf.schema.sections import Count, Number, Place, Section, Seed, Text

Loss = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"]
Correction = Literal["none", "tis", "icepop", "sequence_mask"]
RewardKind = Literal["exact", "regex", "number", "json_schema", "function", "judge", "code"]
Address = Annotated[str, Field(pattern=r"^https?://")]


class Reinforce(Section):
    """Sampling of answers to prompts, their rewards, and the loss that makes better answers more likely."""

    steps: Annotated[Number, bears("reinforce")] = 0
    """rounds of sampling and training; 0 = no reinforcement learning"""
    start: Annotated[Literal["trained", "base"], bears("reinforce")] = "trained"
    """initial policy: train's last checkpoint, or the released model"""
    source: Annotated[Place | None, bears(derived="prepare")] = None
    """rows with the prompts, and the answers for the rewards, read with the other keys of data like data.source;
    evaluation uses their test split; null = the rows of data"""
    prompts: Annotated[Count, bears("reinforce")] = 16
    """prompts per step"""
    samples: Annotated[int, Field(ge=2, le=4096), bears("reinforce")] = 8
    """answers to each prompt, which are compared with each other"""
    max_tokens: Annotated[Count, bears("reinforce")] = 256
    """longest answer; prompt and answer must fit into data.seq_length"""
    temperature: Annotated[float, bears("reinforce")] = Field(default=1.0, ge=0.01, le=10)
    """of sampling; the policy is trained at this temperature"""
    lr: Annotated[float, bears("reinforce")] = Field(default=1e-6, ge=1e-12, le=1)
    """constant learning rate, instead of optimizer.lr and its schedule"""
    signal: Annotated[float, bears("reinforce", absent=0.0)] = Field(default=0.0, ge=0, le=100)
    """agreement of the steps' gradients, in standard deviations above chance, that is needed for steps of full length;
    below it steps are shorter, and below a third of it none; 3 keeps the policy if rewards are noise; 0 = all steps are
    full"""
    updates: Annotated[Count, bears("reinforce")] = 1
    """optimizer steps per step, each on a part of the prompts"""
    loss: Annotated[Loss, bears("reinforce")] = "grpo"
    """grpo = mean of the answers' means; dr_grpo = without lengths and deviations; dapo = mean of tokens; gspo = ratios
    of complete answers; cispo = clipped weights instead of clipped ratios"""
    clip_low: Annotated[float, bears("reinforce")] = Field(default=0.2, ge=0, le=1)
    """ratios are clipped below 1 - this; usual for gspo: 3e-4"""
    clip_high: Annotated[float, bears("reinforce")] = Field(default=0.2, ge=0, le=100)
    """ratios are clipped above 1 + this; usual for dapo: 0.28, for gspo: 4e-4"""
    kl: Annotated[float, bears("reinforce")] = Field(default=0.0, ge=0, le=100)
    """weight of the divergence from the initial policy"""
    correction: Annotated[Correction, bears("reinforce")] = "tis"
    """for different probabilities of trainer and engine: tis = weights limited to correction_high; icepop = tokens
    outside of the bounds do not count; sequence_mask = answers outside of them do not"""
    correction_low: Annotated[float, bears("reinforce")] = Field(default=0.5, ge=0, le=1)
    """lowest ratio of trainer to engine for icepop and sequence_mask"""
    correction_high: Annotated[float, bears("reinforce")] = Field(default=2.0, ge=1, le=10**6)
    """highest ratio of trainer to engine"""
    replay_experts: Annotated[bool, bears("reinforce", absent=False)] = False
    """train with the experts that vLLM chose for each token, as rounding may choose others (R3)"""
    rounds: Annotated[Count, bears("reinforce")] = 1
    """rounds of sampling, in which prompts with equal rewards of all answers are replaced; 1 = no replacement (dapo's
    dynamic sampling)"""
    overlong: Annotated[Number, bears("reinforce")] = 0
    """last tokens before max_tokens in which an answer loses up to 1 of its reward (dapo's); 0 = none"""
    reward: Annotated[RewardKind, bears("reinforce")] = "exact"
    """exact = the row's answer; number = its last number; regex, json_schema = fits pattern, or the row's answer;
    function = a Python function; judge = another model; code = the answer is Python, and the row's answer has its
    checks"""
    pattern: Annotated[Text | None, bears("reinforce")] = None
    """regular expression or JSON schema that an answer must fit; null = the row's answer"""
    function: Annotated[Text | None, bears(derived="reinforce")] = None
    """PATH.py:NAME, called with prompt, answer and reference in a guarded process; the file's content counts for
    identity"""
    judge: Annotated[Address | None, NOWHERE] = None
    """OpenAI-compatible address of the judging model: http://HOST:8000/v1; JUDGE_API_KEY is sent"""
    judge_model: Annotated[Text | None, bears("reinforce", absent=None)] = None
    """name of the judging model; use another name for other weights"""
    judge_prompt: Annotated[Text | None, bears(derived="reinforce")] = None
    """file with the judge's prompt, in which {answer}, {prompt} and {reference} are replaced; its reply must be a
    number from 0 to 1; the file's content counts for identity"""
    judge_tries: Annotated[Count, NOWHERE] = 5
    """requests to the judge before the run ends, each within reward_seconds"""
    turns: Annotated[Count, bears("reinforce", absent=1)] = 1
    """answers to a prompt, with replies of the environment between them"""
    environment: Annotated[Text | None, bears(derived="reinforce")] = None
    """PATH.py:NAME, called with prompt, the answers so far and reference in a guarded process; returns the next text,
    or None at the end of the conversation; the file's content counts for identity"""
    reward_seconds: Annotated[float, bears("reinforce")] = Field(default=10.0, ge=0.01, le=3600)
    """time limit for one reward of a function, code or judge"""
    reward_memory_gb: Annotated[float, bears("reinforce")] = Field(default=1.0, ge=0.01, le=65536)
    """memory of the guarded process"""
    seed: Annotated[Seed, bears("reinforce")] = 1234
    """seed of prompts and samples"""
    transport: Annotated[Literal["ipc", "nccl", "gloo", "files", "adapter"] | None, NOWHERE] = None
    """how weights are sent to vLLM: ipc = through shared memory, of the GPU if there is one; nccl = from GPU to GPU, if
    vLLM has separate GPUs; gloo = between processes through the host's memory; files = as a file in /dev/shm; adapter =
    only the adapter, if vLLM can serve it with the released weights; null = ipc on GPUs that vLLM and training share,
    nccl on separate GPUs, gloo on a CPU"""
    staleness: Annotated[Number, bears("reinforce", absent=0)] = 0
    """steps between the weights that sample an answer and the policy that trains on it: vLLM samples while Megatron
    trains, on a CPU or on separate GPUs; 1 keeps both busy; 0 = one after the other"""
    engines: Annotated[Count, NOWHERE] = 1
    """processes of vLLM on each of its hosts, which share the prompts of a step"""
    engine_gpus: Annotated[Number, NOWHERE] = 0
    """GPUs of each engine, over which its model is cut, after those of training; 0 = shares the first GPU of training;
    on a CPU, 2 or more are processes"""
    in_turn: Annotated[bool | None, NOWHERE] = None
    """whether engines and training share GPUs and use them alternately; null = if engine_gpus is 0"""
    hosts: Annotated[Number, NOWHERE] = 0
    """separate hosts of vLLM, started by gang.engine; a run continues without a lost one; 0 = vLLM runs on the first
    host of training"""
    held_out: Annotated[Number, NOWHERE] = 200
    """rows of the test split that are answered greedily before and after; 0 = none"""
    probe_rows: Annotated[Count, NOWHERE] = 4
    """fixed rows on which trainer and vLLM must agree after each transfer of weights"""
    probe_bound: Annotated[float | None, NOWHERE] = Field(default=None, gt=0, le=1)
    """mean difference, nats per token; null = 1e-4 in fp32, else 0.05"""
    patience: Annotated[Count, NOWHERE] = 10
    """the run ends after this many steps without any difference between rewards"""
