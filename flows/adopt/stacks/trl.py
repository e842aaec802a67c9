"""Keys of TRL: its commands and scripts for SFT and DPO, their YAML files, and Python scripts with its trainers."""

import re
from typing import Any

from flows.adopt.concepts import is_on
from flows.adopt.stack import HELD_OUT, Source, Stack, marks, refuse
from flows.adopt.stacks import launchers, load_dataset
from flows.adopt.stacks import transformers as hf

CONFIGS = re.compile(r"(?:SFTConfig|DPOConfig|TrainingArguments|UnslothTrainingArguments)\.")
TRAINERS = re.compile(r"(?:SFTTrainer|DPOTrainer|UnslothTrainer)\.")
# Names in Python with the option of the command that means the same.
CALLS = {
    "LoraConfig.r": "lora_r",
    "LoraConfig.lora_alpha": "lora_alpha",
    "LoraConfig.lora_dropout": "lora_dropout",
    "LoraConfig.target_modules": "lora_target_modules",
    "LoraConfig.use_rslora": "use_rslora",
    "LoraConfig.use_dora": "use_dora",
    "LoraConfig.modules_to_save": "lora_modules_to_save",
    "LoraConfig.bias": "lora_bias",
    "LoraConfig.task_type": "lora_task_type",
    "LoraConfig.init_lora_weights": "lora_init",
    "AutoModelForCausalLM.from_pretrained.0": "model_name_or_path",
    "AutoModelForCausalLM.from_pretrained.attn_implementation": "attn_implementation",
    "AutoModelForCausalLM.from_pretrained.torch_dtype": "torch_dtype",
    "AutoModelForCausalLM.from_pretrained.dtype": "dtype",
    "AutoModelForCausalLM.from_pretrained.trust_remote_code": "trust_remote_code",
    "AutoModelForCausalLM.from_pretrained.use_cache": "use_cache",
    "AutoTokenizer.from_pretrained.0": "tokenizer_name",
    "AutoModelForCausalLM.from_pretrained.load_in_4bit": "load_in_4bit",
    "AutoModelForCausalLM.from_pretrained.load_in_8bit": "load_in_8bit",
    "BitsAndBytesConfig.load_in_4bit": "load_in_4bit",
    "BitsAndBytesConfig.load_in_8bit": "load_in_8bit",
    "load_dataset.0": "dataset_name",
    "load_dataset.1": "dataset_config",
    "load_dataset.name": "dataset_config",
    "load_dataset.split": "dataset_train_split",
    "load_dataset.path": "dataset_name",
    "SFTTrainer.model": "model_name_or_path",
    "DPOTrainer.model": "model_name_or_path",
}


def spelled(key: str) -> str:
    """Return the option for a key of a command, a YAML file or a Python call."""
    key = re.sub(r"^AutoModelFor\w+\.", "AutoModelForCausalLM.", key)
    if key in CALLS:
        return CALLS[key]
    return TRAINERS.sub("", CONFIGS.sub("", key)).replace("-", "_")


def _recognises(source: Source) -> int:
    text = " ".join(source.words)
    if source.kind == "python":
        if any(name.split(".")[0] == "unsloth" for name in source.words):
            return 0
        calls = sum(bool(CONFIGS.match(key)) for key in source.keys)
        return 10 + calls if calls > 1 and any(name.split(".")[0] == "trl" for name in source.words) else 0
    if source.kind == "command":
        return 20 if re.search(r"\btrl (?:sft|dpo)\b|(?:^|/| )(?:sft|dpo)\w*\.py\b", text) and _named(source) else 0
    known = marks(source, "model_name_or_path", "dataset_name", "learning_rate", "lora_r", "use_peft", "max_length")
    known += marks(source, "dataset_mixer", "per_device_train_batch_size", "lora_target_modules", "trainer_type")
    return 2 * known if known > 2 and not marks(source, "stage", "base_model", "finetuning_type") else 0


def _named(source: Source) -> bool:
    return bool(marks(source, "model_name_or_path", "model_name", "dataset_name", "config"))


def _split(value: Any) -> Any:
    return str(value) if re.fullmatch(r"\w+", str(value)) else refuse("a part of a split: data.rows limits rows")(0)


KEYS = {
    **hf.KEYS,
    **launchers.KEYS,
    "model_name_or_path": "model.source",
    "model_revision": "model.revision",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "precision",
    "torch_dtype": "precision",
    "dataset_name": load_dataset.NAME,
    "load_dataset.data_files": load_dataset.FILES,
    "dataset_config": "data.config",
    "dataset_train_split": ("data.split", _split),
    "dataset_text_field": "data.text",
    "max_length": "data.seq_length",
    "max_seq_length": "data.seq_length",
    "packing": "data.packed",
    "assistant_only_loss": "answers_only",
    "completion_only_loss": "answers_only",
    "use_peft": ("adapter.kind", lambda value: {"kind": "lora" if is_on(value) else "none"}),
    "lora_r": ("adapter.rank", lambda value: {"kind": "lora", "adapter.rank": value}),
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "lora_target_modules": "targets",
    "use_rslora": "adapter.rslora",
    "use_dora": "dora",
    "load_in_4bit": "four_bits",
    "load_in_8bit": "eight_bits",
    "beta": ("train.dpo_beta", lambda value: {"method": "dpo", "train.dpo_beta": value}),
    "label_smoothing": "train.dpo_label_smoothing",
}
LEFT_OUT = {
    **hf.LEFT_OUT,
    **launchers.LEFT_OUT,
    "lora_task_type": "the models here are causal language models",
    "tokenizer_name": "the tokenizer is the model's",
    "dataset_test_split": "data.validation holds out rows of data.source",
    "dataset_num_proc": hf.DATA,
    "dataset_kwargs*": hf.DATA,
    "padding_free": "data.packed avoids padding",
    "model_init_kwargs*": hf.SPEED,
    "no_remove_unused_columns": hf.DATA,
    "max_prompt_length": "data.seq_length limits prompt and answer together",
    "precompute_ref_log_probs": "the reference is always computed once, before the training",
    "generate_during_eval": hf.LOGS,
    "use_flash_attention_2": hf.SPEED,
}
DEFAULTS = {
    **hf.DEFAULTS,
    "kind": "none",
    "optimizer.lr": 2e-5,
    "adapter.rank": 16,
    "adapter.alpha": 32,
    "adapter.dropout": 0.05,
    "adapter.init": "kaiming",
    "data.seq_length": 1024,
    "data.validation": 0.0,
}
DIFFERENCES = (
    "data.loss_on: TRL counts all tokens of a conversation unless assistant_only_loss is set; only answers count here",
    HELD_OUT,
)
TRL = Stack(
    name="trl",
    title="TRL",
    kinds=("command", "yaml", "python"),
    recognises=_recognises,
    spelled=spelled,
    keys=KEYS,
    left_out=LEFT_OUT,
    defaults=DEFAULTS,
    differences=DIFFERENCES,
)
