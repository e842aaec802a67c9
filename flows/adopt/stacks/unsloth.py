"""Keys of Unsloth: Python scripts with FastLanguageModel and the trainers of TRL."""

from flows.adopt.concepts import is_on
from flows.adopt.stack import Source, Stack
from flows.adopt.stacks import transformers as hf
from flows.adopt.stacks import trl

LOAD, PEFT = "FastLanguageModel.from_pretrained.", "get_peft_model."


def _recognises(source: Source) -> int:
    imports = any(name.split(".")[0] == "unsloth" for name in source.words)
    return 30 + len(source.keys) if imports and any(LOAD in key or PEFT in key for key in source.keys) else 0


def _spelled(key: str) -> str:
    key = key.replace("FastModel.from", "FastLanguageModel.from").replace("FastVisionModel.", "FastLanguageModel.")
    if key == f"{LOAD}0":
        return f"{LOAD}model_name"
    if key.endswith("Trainer.model"):
        return "model"
    return key if key.startswith((LOAD, PEFT)) else trl.spelled(key)


UNSLOTH = Stack(
    name="unsloth",
    title="Unsloth",
    kinds=("python",),
    recognises=_recognises,
    spelled=_spelled,
    keys={
        **trl.KEYS,
        f"{LOAD}model_name": "model.source",
        f"{LOAD}max_seq_length": "data.seq_length",
        f"{LOAD}load_in_4bit": "four_bits",
        f"{LOAD}load_in_8bit": "eight_bits",
        f"{LOAD}dtype": "precision",
        f"{LOAD}full_finetuning": ("adapter.kind", lambda value: {"kind": "none"} if is_on(value) else None),
        f"{PEFT}r": ("adapter.rank", lambda value: {"kind": "lora", "adapter.rank": value}),
        f"{PEFT}lora_alpha": "adapter.alpha",
        f"{PEFT}lora_dropout": "adapter.dropout",
        f"{PEFT}target_modules": "targets",
        f"{PEFT}use_rslora": "adapter.rslora",
        f"{PEFT}use_gradient_checkpointing": "recompute",
        f"{PEFT}random_state": "train.seed",
    },
    left_out={
        **trl.LEFT_OUT,
        "model": "the model of FastLanguageModel",
        "tokenizer": trl.LEFT_OUT["tokenizer_name"],
        f"{LOAD}token": hf.HUB,
        f"{LOAD}fast_inference": hf.SPEED,
        f"{LOAD}gpu_memory_utilization": hf.SPEED,
        f"{PEFT}max_seq_length": "data.seq_length sets the length",
        f"{PEFT}bias": "biases are not trained with LoRA",
    },
    defaults={**trl.DEFAULTS, "four_bits": True, "adapter.alpha": 16, "adapter.dropout": 0.0, "gpus": 1},
    differences=(
        *trl.DIFFERENCES,
        "model.source: a name such as unsloth/NAME-bnb-4bit is already in 4 bits; use the release and model.base",
    ),
)
