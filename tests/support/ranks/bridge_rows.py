"""Rows as Megatron-Bridge's data sets and transformers' apply_chat_template make them, for tests/trainer/data.

main(run) reads cases.json in run.paths.output, a list of objects with folder, rows and what is said of them below, and
leaves made.json there: rows, for each case those, each with ids and learned of "bridge" and, for chat, of
"transformers"; and skipped, the tokens that Bridge takes out of the loss.
"""

import json
from pathlib import Path

from conf.schema.run import Run


def main(run: Run) -> None:
    from megatron.bridge.data.token_utils import PAD_TOKENS

    folder = Path(run.paths.output)
    cases = json.loads((folder / "cases.json").read_text())
    made = [_case(case, folder / f"{number}.jsonl") for number, case in enumerate(cases)]
    (folder / "made.json").write_text(json.dumps({"rows": made, "skipped": sorted(PAD_TOKENS)}))


def _case(case: dict, file: Path) -> list[dict]:
    from megatron.bridge.data.builders.gpt_sft import build_gpt_sft_split
    from megatron.bridge.training.tokenizers.config import TokenizerConfig
    from megatron.bridge.training.tokenizers.tokenizer import build_tokenizer
    from transformers import AutoTokenizer

    file.write_text("".join(json.dumps(row) + "\n" for row in case["rows"]))
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=case["folder"]))
    data = build_gpt_sft_split(
        file,
        tokenizer=tokenizer,
        seq_length=case.get("length", 1024),
        memmap_workers=1,
        seed=1,
        packed_sequence_size=-1,
        dataset_kwargs=_chat(case) if "loss" in case else _plain(case),
    )
    assert data is not None
    own = AutoTokenizer.from_pretrained(case["folder"])
    return [_row(case, data[i], case["rows"][i], own) for i in range(len(case["rows"]))]


def _chat(case: dict) -> dict:
    return {"chat": True, "use_hf_tokenizer_chat_template": True, "chat_loss_mode": case["loss"]}


def _plain(case: dict) -> dict:
    from megatron.bridge.data.sft_processing import PromptCompletionSFTPreprocessingConfig

    return {
        "prompt_completion_config": PromptCompletionSFTPreprocessingConfig(
            prompt_column="input",
            completion_column="output",
            prompt_template=case["prompt_template"],
            separator=case["separator"],
            loss_mode=case.get("plain_loss", "completion"),
        )
    }


def _row(case: dict, made: dict, row: dict, tokenizer) -> dict:
    found = {"bridge": {"ids": _list(made["input_ids"]), "learned": [bool(one) for one in _list(made["loss_mask"])]}}
    if "loss" in case:
        out = tokenizer.apply_chat_template(
            row["messages"], tools=row.get("tools"), return_dict=True, return_assistant_tokens_mask=True
        )
        found["transformers"] = {"ids": out["input_ids"], "learned": [bool(one) for one in out["assistant_masks"]]}
    return found


def _list(values) -> list:
    return values.tolist() if hasattr(values, "tolist") else list(values)
