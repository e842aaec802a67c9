"""Prints, as JSON, the tokens, labels and loss mask of the first rows as training sees them. For test_masks.py."""

import json

from conf.schema import Run
from trainer import platform
from trainer.recipe import make_dataset


def main(run: Run) -> None:
    platform.start()
    from megatron.bridge.data.builders.gpt_sft import build_gpt_sft_split, normalize_gpt_sft_dataset_kwargs
    from megatron.bridge.training.tokenizers.config import TokenizerConfig
    from megatron.bridge.training.tokenizers.tokenizer import build_tokenizer

    config = make_dataset(run)
    dataset = build_gpt_sft_split(
        f"{run.paths.data}/training.jsonl",
        tokenizer=build_tokenizer(
            TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=run.paths.model)
        ),
        seq_length=run.data.seq_length,
        memmap_workers=1,
        seed=run.data.seed,
        packed_sequence_size=-1,
        dataset_kwargs=normalize_gpt_sft_dataset_kwargs(config),
    )
    for row in range(8):
        batch = dataset.collate_fn([dataset[row]])
        print(json.dumps({key: batch[key][0].tolist() for key in ("tokens", "labels", "loss_mask")}))
