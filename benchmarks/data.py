"""Speed of preparing data, compared with Megatron-Bridge's preparation, the bare tokenizer and datasets.map.

    python -m benchmarks.data [--mb 160] [--memory-gb 5]          make bench-data; about 35 minutes
    python -m benchmarks.data --short     16 MB, and 0.05 GB for memory: 3 minutes     make bench-data SHORT=1

Each row has a prompt and an answer, 1.2 kB on average, with the word frequencies of a language. A byte-level BPE of
32,000 tokens is trained on the rows. All candidates use the same rows, tokenizer, template, packing length and cores.
This project's preparation is timed as a complete process including its start, the others without their imports. The
output of this project and of Bridge is compared: the rows of training.jsonl, its index, and every row's token ids and
loss mask in the packed sequences.

The bare tokenizer only encodes the texts, with a thread per core, which is a lower bound. Memory is the proportional
set size (PSS) of all processes together, sampled while a file of --memory-gb is prepared.
"""

# pyright: reportArgumentType=false

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil

from benchmarks.workspace import workspace

ROOT = Path(__file__).parents[1]
CORES = len(os.sched_getaffinity(0))
SEQ_LENGTH = 4096
TOKENS = 32_000
WORDS = 60_000
BLOCK = 50_000  # rows made at once
CONF = """
name: bench
model: {source: bench}
data:
  source: %s
  validation: 0
  test: 0
  seq_length: %d
  packed: true
  template: "{input} {output}"
train: {steps: 1, global_batch: 1, precision: fp32}
optimizer: {lr: 1e-4}
checkpoint: {save_every: 1}
paths: {model: %s, data: %s}
"""


def words(random: np.random.Generator) -> np.ndarray:
    starts, ends = (*"bcdfghklmnprstvwz", "br", "st", "tr", "sh"), (*"aeiou", "ai", "ou")
    syllables = [start + end for start in starts for end in ends]
    made = {"".join(random.choice(syllables, random.integers(1, 5))) for _ in range(2 * WORDS)}
    return np.array(sorted(sorted(made)[:: max(1, len(made) // WORDS)], key=len))  # frequent words are short


def rows(count: int, seed: int):
    """Make pairs whose words follow Zipf's law."""
    random = np.random.Generator(np.random.PCG64(seed))
    known = words(np.random.Generator(np.random.PCG64(0)))
    for start in range(0, count, BLOCK):
        number = min(BLOCK, count - start)
        sizes = np.maximum(4, random.lognormal(4.6, 0.7, number).astype(int))
        ranks = (random.zipf(1.15, int(sizes.sum())) - 1) % len(known)
        text = known[ranks]
        at = 0
        for row, size in enumerate(sizes.tolist()):
            some, at = text[at : at + size].tolist(), at + size
            cut = max(1, size // 3)
            yield {
                "input": f"{start + row}. {' '.join(some[:cut])}?",
                "output": ". ".join(" ".join(some[i : i + 9]) for i in range(cut, size, 9)) + ".",
            }


def generate(file: Path, size: int, seed: int) -> int:
    """Write lines until the file has this size. Return their number."""
    count = 0
    with file.open("w") as out:
        for row in rows(size // 100, seed):
            out.write(json.dumps(row) + "\n")
            count += 1
            if count % 100 == 0 and out.tell() >= size:
                break
    return count


def enlarge(source: Path, file: Path, size: int) -> None:
    """Repeat the rows of a file, each time with another number before their prompts."""
    lines = source.read_bytes().splitlines(keepends=True)
    start = len('{"input": "')
    with file.open("wb") as out:
        while out.tell() < size:
            number = b"%d-" % out.tell()
            out.write(b"".join(line[:start] + number + line[start:] for line in lines))


def make_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f"{row['input']} {row['output']}" for row in rows(15_000, 9)), trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": TOKENS}
    (folder / "config.json").write_text(json.dumps(config))


def ours(folder: Path, source: Path, watched: bool) -> tuple[float, float]:
    """Return the seconds and, if memory is watched, the largest MB of all processes together. Watching takes time."""
    conf = folder / f"{source.stem}.yaml"
    conf.write_text(CONF % (source, SEQ_LENGTH, folder / "tokenizer", folder / f"ours-{source.stem}"))
    start = time.monotonic()
    running = subprocess.Popen([sys.executable, "-m", "trainer.prepare", str(conf)], cwd=ROOT, stdout=sys.stderr)
    peak = 0.0
    while running.poll() is None:
        peak = max(peak, memory(running.pid)) if watched else peak
        time.sleep(0.1)
    assert running.returncode == 0
    return time.monotonic() - start, peak


def memory(pid: int) -> float:
    total = 0
    try:
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            total += process.memory_full_info().pss
    except psutil.Error:
        pass  # a process has ended
    return total / 1e6


def bridge(folder: Path, source: Path, workers: int) -> float:
    """Materialise, index and pack the rows with Megatron-Bridge."""
    from trainer.startup import device

    device.start()
    import datasets
    from megatron.bridge.data.builders import gpt_sft
    from megatron.bridge.data.datasets.utils import build_index_files
    from megatron.bridge.data.packing import PackedSequenceSpecs
    from megatron.bridge.data.sft_processing import PromptCompletionSFTPreprocessingConfig, normalize_sft_examples
    from megatron.bridge.training.tokenizers.config import TokenizerConfig
    from megatron.bridge.training.tokenizers.tokenizer import build_tokenizer

    preprocessing = PromptCompletionSFTPreprocessingConfig(
        prompt_column="input", completion_column="output", separator=" "
    )
    settings = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder / "tokenizer"))
    tokenizer = build_tokenizer(settings, make_vocab_size_divisible_by=128, tensor_model_parallel_size=1)
    root = folder / f"bridge-{workers}"
    specs = PackedSequenceSpecs(
        packed_sequence_size=SEQ_LENGTH,
        tokenizer_model_name="bench",
        pad_seq_to_mult=16,
        num_tokenizer_workers=workers if workers > 1 else -1,
    )
    config = gpt_sft.GPTSFTDatasetConfig(
        seq_length=SEQ_LENGTH,
        dataset_root=root,
        do_validation=False,
        do_test=False,
        preprocessing=preprocessing,
        enable_offline_packing=True,
        offline_packing_specs=specs,
        dataset_kwargs={"pad_to_max_length": True},
    )
    start = time.monotonic()
    table = datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=str(folder / "cache"))
    gpt_sft._write_hf_examples(root, "training", normalize_sft_examples(list(table), preprocessing))
    build_index_files([str(root / "training.jsonl")], 10, workers=CORES)
    gpt_sft.GPTSFTDatasetBuilder(config, tokenizer).prepare_packed_data()
    return time.monotonic() - start


def bare(folder: Path, source: Path) -> float:
    """Run encode_batch on every prompt and every answer, with a thread per core."""
    from tokenizers import Tokenizer

    texts = []
    for line in source.open():
        row = json.loads(line)
        texts += [row["input"], f" {row['output']}"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    start = time.monotonic()
    for at in range(0, len(texts), 1000):
        tokenizer.encode_batch(texts[at : at + 1000], add_special_tokens=False)
    return time.monotonic() - start


def mapped(folder: Path, source: Path) -> float:
    """Run datasets.map in as many processes as there are cores."""
    import datasets
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def encode(batch):
        found = {}
        for name in ("input", "output"):
            found[f"{name}_ids"] = [one.ids for one in tokenizer.encode_batch(batch[name], add_special_tokens=False)]
        return found

    start = time.monotonic()
    table = datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=str(folder / "mapped"))
    table.map(encode, batched=True, num_proc=CORES, remove_columns=["input", "output"])
    return time.monotonic() - start


def compare(folder: Path, source: Path) -> None:
    """Fail if both outputs differ."""
    mine, theirs = folder / f"ours-{source.stem}", folder / "bridge-1"
    for left, right in zip((mine / "training.jsonl").open(), (theirs / "training.jsonl").open(), strict=True):
        assert json.loads(left) == json.loads(right)
    packed = next(theirs.glob("packed/*/training_*.idx.parquet"))
    assert segments(mine / "training.idx.parquet") == segments(packed), "token ids or loss masks differ"


def segments(path: Path) -> list[int]:
    """Numbers that stand for each row's token ids and mask, sorted."""
    import pyarrow.parquet as pq

    found = []
    for batch in pq.ParquetFile(path).iter_batches(100):
        columns = [
            batch.column(name).to_numpy(zero_copy_only=False) for name in ("input_ids", "loss_mask", "seq_start_id")
        ]
        for ids, mask, starts in zip(*columns, strict=True):
            for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
                found.append(
                    hash((ids[start:end].astype(np.int32).tobytes(), mask[start:end].astype(np.int8).tobytes()))
                )
    return sorted(found)


def tokens(path: Path) -> int:
    return json.loads((path / "report.json").read_text())["tokens"]["training"]["tokens"]


def in_process(way: str, *arguments: object) -> float:
    """Run the function of this name in a separate process, which prints its seconds last."""
    code = f"from benchmarks import data; data.call({way!r})"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return float(done.stdout.split()[-1])


def call(way: str) -> None:
    folder, source, *numbers = sys.argv[1:]
    print(globals()[way](Path(folder), Path(source), *map(int, numbers)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data", description="Preparation beside others.")
    parser.add_argument("--mb", type=int, default=160, help="size of the rows that all prepare")
    parser.add_argument(
        "--memory-gb", type=float, default=5, help="size of the file that memory is measured with; 0 = skip"
    )
    parser.add_argument("--short", action="store_true", help="as --mb 16 --memory-gb 0.05; our start weighs more then")
    parser.add_argument("--folder", help="where to write; default: a temporary folder")
    options = parser.parse_args()
    if options.short:
        options.mb, options.memory_gb = 16, 0.05
    with workspace("data", options.folder) as folder:
        make_tokenizer(folder / "tokenizer")
        source = folder / "rows.jsonl"
        count = generate(source, options.mb * 1_000_000, 2)
        mine, _ = ours(folder, source, watched=False)
        total = tokens(folder / "ours-rows")
        print(f"{count:,} rows, {source.stat().st_size / 1e6:.0f} MB, {total:,} tokens, {CORES} cores", flush=True)
        others = {
            "Megatron-Bridge, as it is": ("bridge", 1),
            f"Megatron-Bridge, {CORES} tokenizer workers": ("bridge", CORES),
            "bare encode_batch": ("bare",),
            f"datasets.map, {CORES} processes (tokens only)": ("mapped",),
        }
        width = max(map(len, others))
        print(f"{'':{width}}  seconds  tokens/s  ours is faster by")
        print(f"{'ours, all of it':{width}}  {mine:7.1f}  {total / mine / 1e6:6.2f} M", flush=True)
        for name, (way, *workers) in others.items():
            spent = in_process(way, folder, source, *workers)
            print(f"{name:{width}}  {spent:7.1f}  {total / spent / 1e6:6.2f} M  {spent / mine:17.2f}", flush=True)
            if (way, *workers) == ("bridge", 1):
                compare(folder, source)
                print("its rows, index, token ids and loss masks are the same as ours", flush=True)
        if options.memory_gb:
            large = folder / "large.jsonl"
            enlarge(source, large, int(options.memory_gb * 1e9))
            spent, peak = ours(folder, large, watched=True)
            size = large.stat().st_size / 1e9
            rate = tokens(folder / "ours-large") / spent / 1e6
            share = peak / size / 1e3
            print(f"{size:.1f} GB: {spent:.0f} s, {rate:.2f} M tokens/s, peak memory {peak:.0f} MB, {share:.1%} of it")


if __name__ == "__main__":
    main()
