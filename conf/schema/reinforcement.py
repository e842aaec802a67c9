"""Section `reinforce` of a run's YAML: reinforcement learning on rewards of the model's own answers, after training.

The stage is there where reinforce.steps is above 0. Sizes and rules that it shares with training are training's keys:
adapter, layout, precision, optimizer. Rules between its keys are in conf/rules/reinforcement.py.
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
    """Answers of the model to prompts, what they are worth, and the loss that makes the better ones likelier."""

    steps: Annotated[Number, bears("reinforce")] = Field(
        default=0, description="rounds of sampling and training; 0 = no such stage"
    )
    start: Annotated[Literal["trained", "base"], bears("reinforce")] = Field(
        default="trained", description="the policy to begin with: train's last checkpoint, or the released model"
    )
    source: Annotated[Place | None, bears(derived="prepare")] = Field(
        default=None,
        description="rows whose prompts are asked, and whose answers the rewards know, read as data.source is, by the "
        "other keys of data; evaluation asks their test split; null = the rows of data",
    )
    prompts: Annotated[Count, bears("reinforce")] = Field(default=16, description="prompts of a step")
    samples: Annotated[int, Field(ge=2, le=4096), bears("reinforce")] = Field(
        default=8, description="answers to each prompt, which are compared with one another"
    )
    max_tokens: Annotated[Count, bears("reinforce")] = Field(
        default=256, description="longest answer; prompt and answer fit into data.seq_length"
    )
    temperature: Annotated[float, bears("reinforce")] = Field(
        default=1.0,
        ge=0.01,
        le=10,
        description="of sampling; the policy that is trained is the one at this temperature",
    )
    lr: Annotated[float, bears("reinforce")] = Field(
        default=1e-6, ge=1e-12, le=1, description="learning rate, constant; in place of optimizer.lr and its schedule"
    )
    signal: Annotated[float, bears("reinforce", absent=0.0)] = Field(
        default=0.0,
        ge=0,
        le=100,
        description="deviations from chance by which gradients of steps have to point the same way for steps of full "
        "length; shorter below, and none below a third; 3 keeps a policy where rewards are noise; 0 = all are full",
    )
    updates: Annotated[Count, bears("reinforce")] = Field(
        default=1, description="optimizer steps of each step's answers, a part of the prompts each"
    )
    loss: Annotated[Loss, bears("reinforce")] = Field(
        default="grpo",
        description="grpo = mean of answers' means; dr_grpo = without lengths and deviations; dapo = mean of tokens; "
        "gspo = ratios of whole answers; cispo = clipped weights instead of clipped ratios",
    )
    clip_low: Annotated[float, bears("reinforce")] = Field(
        default=0.2, ge=0, le=1, description="a ratio counts down to 1 - this; gspo is used with 3e-4"
    )
    clip_high: Annotated[float, bears("reinforce")] = Field(
        default=0.2, ge=0, le=100, description="and up to 1 + this; dapo is used with 0.28, gspo with 4e-4"
    )
    kl: Annotated[float, bears("reinforce")] = Field(
        default=0.0, ge=0, le=100, description="weight of the divergence from the policy that the stage began with"
    )
    correction: Annotated[Correction, bears("reinforce")] = Field(
        default="tis",
        description="for what trainer and engine say differently of a token: tis = weights cut at correction_high; "
        "icepop = tokens beyond the bounds do not count; sequence_mask = answers beyond them do not",
    )
    correction_low: Annotated[float, bears("reinforce")] = Field(
        default=0.5, ge=0, le=1, description="lowest ratio of trainer to engine for icepop and sequence_mask"
    )
    correction_high: Annotated[float, bears("reinforce")] = Field(
        default=2.0, ge=1, le=10**6, description="highest ratio of trainer to engine"
    )
    replay_experts: Annotated[bool, bears("reinforce", absent=False)] = Field(
        default=False,
        description="train with the experts that vLLM chose for each token, where rounding would choose others (R3)",
    )
    rounds: Annotated[Count, bears("reinforce")] = Field(
        default=1,
        description="times that prompts are drawn again for those whose answers are all worth the same; 1 = never "
        "(dapo's dynamic sampling)",
    )
    overlong: Annotated[Number, bears("reinforce")] = Field(
        default=0,
        description="last tokens before max_tokens in which an answer loses up to 1 of its reward (dapo's); 0 = none",
    )
    reward: Annotated[RewardKind, bears("reinforce")] = Field(
        default="exact",
        description="exact = the row's answer; number = its last number; regex, json_schema = as pattern, or the row's "
        "answer, says; function = your own; judge = another model; code = the answer is Python, and the row's answer "
        "are its checks",
    )
    pattern: Annotated[Text | None, bears("reinforce")] = Field(
        default=None, description="regular expression, or JSON schema, that an answer has to fit; null = the row's"
    )
    function: Annotated[Text | None, bears(derived="reinforce")] = Field(
        default=None,
        description="PATH.py:NAME, called with prompt, answer and reference in a guarded process; its content counts",
    )
    judge: Annotated[Address | None, NOWHERE] = Field(
        default=None,
        description="OpenAI-compatible address of the model that judges: http://HOST:8000/v1; JUDGE_API_KEY is sent",
    )
    judge_model: Annotated[Text | None, bears("reinforce", absent=None)] = Field(
        default=None, description="name of that model there; other weights want another name"
    )
    judge_prompt: Annotated[Text | None, bears(derived="reinforce")] = Field(
        default=None,
        description="file with what the judge reads; {answer}, {prompt} and {reference} are put in, and its reply is a "
        "number from 0 to 1; its content counts",
    )
    judge_tries: Annotated[Count, NOWHERE] = Field(
        default=5, description="times that the judge is asked before the run ends, each within reward_seconds"
    )
    turns: Annotated[Count, bears("reinforce", absent=1)] = Field(
        default=1, description="answers to a prompt, with replies of the environment between them"
    )
    environment: Annotated[Text | None, bears(derived="reinforce")] = Field(
        default=None,
        description="PATH.py:NAME, called with prompt, the answers so far and reference in a guarded process; returns "
        "the text that comes next, or None where the conversation is over; its content counts",
    )
    reward_seconds: Annotated[float, bears("reinforce")] = Field(
        default=10.0, ge=0.01, le=3600, description="longest time for one reward by a function, by code or by a judge"
    )
    reward_memory_gb: Annotated[float, bears("reinforce")] = Field(
        default=1.0, ge=0.01, le=65536, description="memory of the guarded process"
    )
    seed: Annotated[Seed, bears("reinforce")] = Field(default=1234, description="of prompts and samples")
    transport: Annotated[Literal["ipc", "nccl", "gloo", "files", "adapter"] | None, NOWHERE] = Field(
        default=None,
        description="how weights get to vLLM: ipc = through memory that both see, of the GPU where there is one; nccl "
        "= from GPU to GPU, where vLLM has its own; gloo = from memory to memory of the host; files = as a file in "
        "/dev/shm; adapter = the adapter alone, beside the released weights, where vLLM can; null = ipc on GPUs "
        "that vLLM and training have in turn, nccl on its own, gloo on a CPU",
    )
    staleness: Annotated[Number, bears("reinforce", absent=0)] = Field(
        default=0,
        description="steps that the policy may have taken since the weights that sampled an answer: vLLM samples while "
        "Megatron trains, on a CPU or on GPUs of its own; 1 keeps both at work; 0 = in turn",
    )
    engines: Annotated[Count, NOWHERE] = Field(
        default=1, description="processes of vLLM, on each host that has some, which share the prompts of a step"
    )
    engine_gpus: Annotated[Number, NOWHERE] = Field(
        default=0,
        description="GPUs of each, which its model is cut over, behind those of training; 0 = the first one of "
        "training, in turn; on a CPU, 2 or more are processes",
    )
    in_turn: Annotated[bool | None, NOWHERE] = Field(
        default=None,
        description="whether engines have GPUs of training, in turn with it, and none of their own; null = where "
        "engine_gpus is 0",
    )
    hosts: Annotated[Number, NOWHERE] = Field(
        default=0,
        description="hosts that vLLM has beside those of training, as gang.engine starts them; one that is lost is "
        "left out; 0 = vLLM is on the first host of training",
    )
    held_out: Annotated[Number, NOWHERE] = Field(
        default=200, description="rows of the test split that are asked before and after, greedily; 0 = none"
    )
    probe_rows: Annotated[Count, NOWHERE] = Field(
        default=4, description="fixed rows on which trainer and vLLM must agree after each transfer of weights"
    )
    probe_bound: Annotated[float | None, NOWHERE] = Field(
        default=None, gt=0, le=1, description="mean difference, nats per token; null = 1e-4 in fp32, else 0.05"
    )
    patience: Annotated[Count, NOWHERE] = Field(
        default=10, description="steps without any difference between rewards, after which the run ends"
    )
