"""Keys of LLaMA-Factory: YAML and JSON files, and llamafactory-cli commands."""

from flows.adopt.concepts import is_on, words
from flows.adopt.stack import HELD_OUT, Source, Stack, marks, refuse, underscored
from flows.adopt.stacks import launchers
from flows.adopt.stacks import transformers as hf

NAMES = ("model_name_or_path", "stage", "finetuning_type", "cutoff_len", "dataset", "lora_target", "template")


def _recognises(source: Source) -> int:
    text = " ".join(source.words)
    if source.kind == "command" and not any(name in text for name in ("llamafactory", "llama_factory", "train_bash")):
        return 15 if marks(source, "stage", "finetuning_type", "model_name_or_path") == 3 else 0
    known = marks(source, *NAMES)
    return 3 * known if known > 3 or (known == 3 and "stage" in source.keys) else 0


LLAMA_FACTORY = Stack(
    name="llama-factory",
    title="LLaMA-Factory",
    kinds=("yaml", "command"),
    recognises=_recognises,
    spelled=underscored,
    keys={
        **hf.KEYS,
        **launchers.KEYS,
        "model_name_or_path": "model.source",
        "model_revision": "model.revision",
        "adapter_name_or_path": "model.adapter",
        "trust_remote_code": "model.trust_remote_code",
        "stage": "method",
        "finetuning_type": "kind",
        "use_dora": "dora",
        "lora_rank": "adapter.rank",
        "lora_alpha": "adapter.alpha",
        "lora_dropout": "adapter.dropout",
        "lora_target": "targets",
        "use_rslora": "adapter.rslora",
        "loraplus_lr_ratio": "adapter.b_lr_ratio",
        "quantization_bit": "bits",
        "dataset": ("data.source, data.mixture", lambda value: {"datasets": words(value)}),
        "cutoff_len": "data.seq_length",
        "max_samples": "data.rows",
        "val_size": "validation",
        "packing": "data.packed",
        "neat_packing": ("data.packed", lambda value: True if is_on(value) else None),
        "train_on_prompt": "prompts_in_loss",
        "mask_history": ("data.loss_on", lambda value: "answer" if is_on(value) else None),
        "pref_beta": "train.dpo_beta",
        "dpo_label_smoothing": "train.dpo_label_smoothing",
        "pref_loss": (
            "train.objective",
            lambda value: None if value == "sigmoid" else refuse("the loss of dpo here is sigmoid")(0),
        ),
        "pure_bf16": "bf16",
        "use_muon": ("optimizer.kind", lambda value: "muon" if is_on(value) else None),
    },
    left_out={
        **hf.LEFT_OUT,
        **launchers.LEFT_OUT,
        "do_train": "the command trains",
        "do_eval": "train.validate_every sets the validation",
        "do_predict": "the flow evaluates",
        "template": "data.template: auto uses the tokenizer's chat template",
        "dataset_dir": "data.source is a file, a folder or a Hub id",
        "eval_dataset": "data.validation holds out rows of data.source",
        "tokenized_path": hf.DATA,
        "streaming": hf.DATA,
        "flash_attn": hf.SPEED,
        "enable_liger_kernel": hf.SPEED,
        "use_unsloth*": hf.SPEED,
        "upcast_layernorm": hf.SPEED,
        "low_cpu_mem_usage": hf.SPEED,
        "quantization_method": "model.base names the format",
        "double_quantization": "model.base names the format",
        "quantization_type": "model.base names the format",
        "ray_*": "gang.engine starts the processes",
        "resources_per_worker*": "gang.engine starts the processes",
        "placement_strategy": "gang.engine starts the processes",
        "use_kt": hf.SPEED,
        "kt_*": hf.SPEED,
        "disable_gradient_checkpointing": hf.SPEED,
        "use_fast_tokenizer": hf.DATA,
    },
    defaults={
        **hf.DEFAULTS,
        "kind": "lora",
        "adapter.rank": 8,
        "adapter.alpha": 16,
        "adapter.init": "kaiming",
        "targets": "all-linear",
        "data.seq_length": 2048,
        "data.validation": 0.0,
        "recompute": True,
    },
    differences=(
        "data.source: a name in dataset_info.json there; a file or a Hub id here",
        "data.template: the tokenizer's chat template here, a named one there. Compare the first prepared rows",
        HELD_OUT,
    ),
)
