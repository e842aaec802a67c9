"""Fetching released models, with huggingface_hub itself over HTTP against tests/support/stand_in_hub.py."""

import hashlib
import json
import logging
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from boto3.s3.transfer import TransferConfig
from huggingface_hub import constants, hf_hub_download, snapshot_download
from huggingface_hub.utils import disable_progress_bars
from safetensors.numpy import load_file, save_file

from contract.faults import Fault
from tasks.sources import hub
from tasks.sources.hub import api, digests, file_choice
from tests.support import s3_server, stand_in_hub

ROOT = Path(__file__).parents[3]
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
TOKEN = "hf_markerOfASecret"


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    """No token, endpoint or offline switch of whoever runs the tests; short waits between attempts."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    (tmp_path / "agents").write_text('{"harnesses": {}}')  # else huggingface_hub asks huggingface.co for it
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(tmp_path / "agents"))
    monkeypatch.setattr(api, "WAITS", (0.01,) * 6)
    monkeypatch.setattr(hub, "LINK_FROM", 1000)
    disable_progress_bars()


@pytest.fixture
def served(tmp_path, monkeypatch):
    with stand_in_hub.serve(tmp_path / "hub") as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def model(tmp_path) -> Path:
    return make_model(tmp_path / "made")


def make_model(folder: Path, elements: int = 50_000) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(0)
    for shard, name in zip(SHARDS, "ab", strict=True):
        save_file({name: rng.random(elements, dtype=np.float32)}, folder / shard)
    index = {"weight_map": dict(zip("ab", SHARDS, strict=True))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "toy"}')
    (folder / "README.md").write_text("# toy\n")
    return folder


def fetch(source: str, folder: Path, revision: str = "main", unsafe=False, trust=False, progress=None) -> dict:
    return hub.fetch(hub.resolve(source, revision), folder, unsafe, trust, progress)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(source: str, *, revision: str = "main", **how) -> str:
    with pytest.raises(Fault) as caught:
        fetch(source, how.pop("folder", Path("never")), revision, **how)
    text = str(caught.value)
    assert "\n" not in text and TOKEN not in text and caught.value.__cause__ is None
    assert not Path("never").exists()
    return text


# The Hub


def test_a_branch_is_pinned_once(served, model, tmp_path):
    first = served.publish("models/org/toy", model)
    resolved = hub.resolve("org/toy", "main")
    before = contents(model)
    (model / "config.json").write_text('{"model_type": "changed"}')
    second = served.publish("models/org/toy", model)

    result = hub.fetch(resolved, tmp_path / "out", False, False, None)

    assert (resolved.kind, resolved.commit, first != second) == ("hub", first, True)
    assert contents(tmp_path / "out") == before
    assert (result["files"], result["bytes"], result["left_out"]) == (5, sum(map(len, before.values())), {})
    assert hub.resolve("org/toy", "main").commit == second
    assert hub.resolve("org/toy", first) == resolved


def test_a_tiny_model_arrives_loadable(served, tmp_path):
    command = [sys.executable, "-m", "trainer.tiny", "llama", str(tmp_path / "tiny"), "--dtype", "float32"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    served.publish("models/org/tiny", tmp_path / "tiny")

    result = fetch("org/tiny", tmp_path / "out")

    assert contents(tmp_path / "out") == contents(tmp_path / "tiny")
    assert all(load_file(shard) for shard in (tmp_path / "out").glob("*.safetensors"))
    assert result["left_out"] == {}


def test_one_copy_of_the_weights_is_fetched_and_no_code(served, model, tmp_path):
    extra = ["pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack", "toy.Q4.gguf"]
    extra += ["onnx/model.onnx", "onnx/config.json", "original/consolidated.00.pth", "original/params.json"]
    extra += ["consolidated.safetensors", "consolidated.safetensors.index.json", "model.fp16.safetensors"]
    extra += ["training_args.bin", "modeling_toy.py", ".gitattributes"]
    for name in extra:
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text("{}")
    served.publish("models/org/toy", model)

    result = fetch("org/toy", tmp_path / "out", unsafe=True)

    assert sorted(result["left_out"]) == sorted(extra)
    assert sorted(contents(tmp_path / "out")) == sorted({*contents(model)} - {*extra})
    assert not {*served.sent} & {*extra}


def test_pickles_only_where_allowed(served, model, tmp_path):
    for shard in SHARDS:
        (model / shard).rename(model / f"pytorch_{shard.removesuffix('.safetensors')}.bin")
    (model / "model.safetensors.index.json").unlink()
    (model / "optimizer.pt").write_text("state")
    served.publish("models/org/toy", model)

    text = refused("org/toy")
    fetch("org/toy", tmp_path / "out", unsafe=True)

    assert ".bin" in text and "model.unsafe_weights=true" in text
    assert sorted(contents(tmp_path / "out")) == sorted({*contents(model)} - {"optimizer.pt"})


@pytest.mark.parametrize("config", ["config.json", "tokenizer_config.json"])
def test_code_of_a_repository_needs_trust(served, model, tmp_path, config):
    (model / config).write_text('{"auto_map": {"AutoModel": "modeling_toy.Toy"}}')
    (model / "modeling_toy.py").write_text("raise SystemExit\n")
    served.publish("models/org/toy", model)

    text = refused("org/toy", folder=tmp_path / "out")
    assert config in text and "model.trust_remote_code=true" in text
    assert not {*served.sent} & {*SHARDS}, "the weights were fetched before"

    fetch("org/toy", tmp_path / "out", trust=True)
    assert (tmp_path / "out/modeling_toy.py").exists()


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda model: (model / SHARDS[1]).unlink(), f"lists {SHARDS[1]}"),
        (lambda model: [(model / shard).unlink() for shard in SHARDS], "no file of weights"),
        (lambda model: [(model / shard).rename(model / f"{shard}.gguf") for shard in SHARDS], "only .gguf"),
        (lambda model: (model / "config.json").write_text("<html>"), "config.json: not readable as JSON"),
    ],
)
def test_incomplete_models_are_refused(served, model, tmp_path, spoil, words):
    spoil(model)
    served.publish("models/org/toy", model)
    assert words in refused("org/toy", folder=tmp_path / "out")
    assert not {*served.sent} & {*SHARDS}


@pytest.mark.parametrize(
    "name, remedy",
    [
        ("iter_0000010/mp_rank_00_001/model_optim_rng.pt", "--ckpt-format torch_dist"),
        ("weights/decoder.final_layernorm.weight/.zarray", "--ckpt-format torch_dist"),
        ("checkpoint-5/global_step5/mp_rank_00_model_states.pt", "zero_to_fp32"),
    ],
)
def test_layouts_that_are_not_read_are_refused_with_the_remedy(name, remedy):
    chosen, left_out = file_choice.choose([name, "config.json"], True, False)
    assert remedy in left_out[name]
    with pytest.raises(Fault, match=f"^org/toy: its weights have .*{remedy}"):
        file_choice.require_weights("org/toy", chosen, [name, "config.json"], True)


@pytest.mark.parametrize("name", ["../../escaped", "/etc/escaped", "a/../../b", "a\\b", "a//b", ""])
def test_names_that_lead_out_of_the_folder(served, model, name):
    commit = served.publish("models/org/toy", model)
    files = served.repos["models/org/toy"].commits[commit]
    files[name] = files["README.md"]
    assert "do not use this repository" in refused("org/toy")


# Interruptions


def test_killed_fetch_goes_on_where_it_was(served, tmp_path):
    model = make_model(tmp_path / "made", 500_000)  # 2 MB each
    served.publish("models/org/toy", model)
    served.inject(f"cdn/{blob(served, SHARDS[1])}", rate=2e6)
    code = (
        "import sys; from pathlib import Path; from tasks.sources import hub\n"
        "hub.fetch(hub.resolve('org/toy', 'main'), Path(sys.argv[1]), False, False)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, tmp_path / "out"], cwd=ROOT, start_new_session=True)
    whole, half = (model / SHARDS[0]).stat().st_size, (model / SHARDS[1]).stat().st_size
    until(lambda: (tmp_path / "out" / SHARDS[0]).exists() and served.sent[SHARDS[1]] > half / 3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    parts = list((tmp_path / "out/.partial").iterdir())
    kept = sum(part.stat().st_size for part in parts)
    until(lambda: steady(served.sent))
    served.sent.clear()

    result = fetch("org/toy", tmp_path / "out")

    assert (len(parts), 0 < kept < half) == (1, True)
    assert served.sent == {SHARDS[1]: half - kept}
    assert (result["sent"], whole) == (half - kept, result["bytes"] - half - small(model))
    assert contents(tmp_path / "out") == contents(model)


def test_dropped_connections_and_busy_servers_are_waited_for(served, model, tmp_path):
    served.publish("models/org/toy", model)
    for _ in range(3):
        served.inject(f"cdn/{blob(served, SHARDS[0])}", drop_after=40_000)
    served.inject("revision/main", status=503, times=2)
    served.inject("config.json", status=502, times=3)
    served.inject(f"resolve/{served.repos['models/org/toy'].refs['main']}/{SHARDS[1]}", drop_after=0)

    result = fetch("org/toy", tmp_path / "out")

    assert contents(tmp_path / "out") == contents(model)
    assert result["sent"] == served.sent.total() == result["bytes"], "something was sent twice"


def test_retry_after_is_waited(served, model, tmp_path):
    served.publish("models/org/toy", model)
    served.inject("README.md", status=429, headers={"Retry-After": "1"})
    began = time.monotonic()
    fetch("org/toy", tmp_path / "out")
    assert 1 <= time.monotonic() - began < 3


def test_server_that_does_not_continue_sends_all_again(served, model, tmp_path):
    served.publish("models/org/toy", model)
    served.inject(f"cdn/{blob(served, SHARDS[0])}", drop_after=40_000)
    served.inject(f"cdn/{blob(served, SHARDS[0])}", ignore_range=True)
    told = []
    fetch("org/toy", tmp_path / "out", progress=lambda *bytes: told.append(bytes))
    assert contents(tmp_path / "out") == contents(model)
    assert told[-1][0] == told[-1][1]


def test_damaged_content_is_fetched_again_and_refused_at_last(served, model, tmp_path):
    served.publish("models/org/toy", model)
    at = f"cdn/{blob(served, SHARDS[0])}"
    served.inject(at, flip=True)
    fetch("org/toy", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(model)

    served.inject(at, flip=True, times=2)
    assert "twice" in refused("org/toy", folder=tmp_path / "other")
    assert not (tmp_path / "other" / SHARDS[0]).exists()


def test_what_is_damaged_on_disk_is_fetched_again(served, model, tmp_path):
    served.publish("models/org/toy", model)
    fetch("org/toy", tmp_path / "out")
    with (tmp_path / "out" / SHARDS[0]).open("r+b") as file:
        file.write(b"\xff")
    (tmp_path / "out/config.json").write_text("{}")
    served.sent.clear()

    result = fetch("org/toy", tmp_path / "out")

    assert contents(tmp_path / "out") == contents(model)
    assert {*served.sent} == {SHARDS[0], "config.json"} and result["sent"] == served.sent.total()


def test_progress_comes_within_a_file_and_not_too_often(served, tmp_path):
    model = make_model(tmp_path / "made", 750_000)  # 3 MB each
    served.publish("models/org/toy", model)
    served.inject("cdn", rate=2e6, times=2)
    told = []
    fetch("org/toy", tmp_path / "out", progress=lambda *bytes: told.append((*bytes, time.monotonic())))

    done, totals, times = zip(*told, strict=True)
    assert {*totals} == {sum(map(len, contents(model).values()))}
    assert list(done) == sorted(done) and done[-1] == totals[0] and len(done) >= 3
    assert all(after - before >= 0.5 for before, after in pairwise(times[:-1]))


# Refusals


def test_gated_model_says_where_to_ask(served, model, monkeypatch):
    served.publish("models/org/toy", model, gated=True)
    served.tokens = {TOKEN: set()}
    assert f"request access at {served.url}/org/toy" in refused("org/toy")
    assert "hf auth login" in refused("org/toy")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "the token in HF_TOKEN" in refused("org/toy")
    served.tokens[TOKEN].add("models/org/toy")
    assert hub.resolve("org/toy", "main").files


def test_tokens_and_private_models(served, model, monkeypatch, tmp_path):
    served.publish("models/org/toy", model, private=True)
    served.tokens = {TOKEN: {"models/org/toy"}, "hf_other": set()}
    assert "hf auth login" in refused("org/toy")
    assert "no such model" in refused("org/tou")
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    assert "may not read" in refused("org/toy")
    monkeypatch.setenv("HF_TOKEN", TOKEN + "x")
    assert f"refuses the token in HF_TOKEN; create one at {served.url}/settings/tokens" in refused("org/toy")
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}\x07")
    assert "characters" in refused("org/toy")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    fetch("org/toy", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(model)
    assert served.leaked == []


def test_no_log_holds_a_token_or_a_signed_address(served, model, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    for name in ("httpx", "httpcore"):
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    served.tokens = {TOKEN: set()}
    served.publish("models/org/toy", model)
    served.inject("cdn", drop_after=1000)
    fetch("org/toy", tmp_path / "out")
    assert any("sig=secret" in request for request in served.requests)
    assert "sig=secret" not in caplog.text and TOKEN not in caplog.text


def test_faults_of_the_caller_s_own_code_are_not_the_hub_s(served, model, tmp_path):
    served.publish("models/org/toy", model)

    def broken(*_):
        raise TypeError("in progress")

    with pytest.raises(TypeError, match="in progress"):
        fetch("org/toy", tmp_path / "out", progress=broken)


def test_access_that_ends_midway(served, model, tmp_path):
    """As gated between the questions: the fault comes out of a thread that fetches."""
    served.publish("models/org/toy", model)
    resolved = hub.resolve("org/toy", "main")
    served.repos["models/org/toy"].gated = True
    with pytest.raises(Fault, match="request access"):
        hub.fetch(resolved, tmp_path / "out", False, False, None)


def test_unknown_revision_names_the_near_ones(served, model):
    served.publish("models/org/toy", model)
    served.publish("models/org/toy", model, branch="v1.0")
    assert "no revision 'mian'" in (text := refused("org/toy", revision="mian")) and "main" in text
    assert "v1.0" in refused("org/toy", revision="v1.1")
    assert "no revision" in refused("org/toy", revision="0" * 40)


def test_endpoints_that_are_none(served, model, monkeypatch):
    served.publish("models/org/toy", model)
    served.inject("/api/models", status=500, times=99)
    assert "answers 500" in refused("org/toy")
    monkeypatch.setenv("HF_ENDPOINT", "http://user:password@127.0.0.1:9")
    assert "127.0.0.1:9 cannot be reached" in (text := refused("org/toy")) and "password" not in text
    monkeypatch.setenv("HF_ENDPOINT", "huggingface.co")
    assert "not a URL" in refused("org/toy")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set" in refused("org/toy")


def test_endpoint_that_is_no_hub(served, model):
    served.publish("models/org/toy", model)
    served.inject("/api/models", status=200)
    assert "does not answer as the Hub does" in refused("org/toy")


def test_full_disk_is_seen_before_a_byte_is_sent(served, model, tmp_path, monkeypatch):
    served.publish("models/org/toy", model)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 10**5, 10**5))
    found = refused("org/toy", folder=tmp_path / "out")
    assert re.search(r"needs \d+\.\d MB more and the disk has 100\.0 KB free", found)
    assert served.sent == {} and not (tmp_path / "out").exists()


def test_disk_that_fills_up_meanwhile(served, model, tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    served.publish("models/org/toy", model)
    monkeypatch.setattr(api.os, "fsync", full)
    assert "disk is full" in refused("org/toy", folder=tmp_path / "out")


# Folders


def test_a_folder_is_linked_through_the_hubs_cache(served, model, tmp_path):
    commit = served.publish("models/org/toy", model)
    cached = snapshot_download("org/toy", endpoint=served.url, cache_dir=tmp_path / "cache")
    resolved = hub.resolve(cached, "main")
    hub.fetch(resolved, tmp_path / "out", False, False, None)

    assert Path(cached, "config.json").is_symlink() and commit in cached
    assert contents(tmp_path / "out") == contents(model)
    assert (tmp_path / "out" / SHARDS[0]).samefile(Path(cached, SHARDS[0]))
    assert not (tmp_path / "out/config.json").samefile(Path(cached, "config.json")), "small ones are edited in place"
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert resolved.commit == hub.resolve(str(model), "main").commit, "it depends on the content alone"


def test_folder_that_changes_is_noticed(model, tmp_path):
    resolved = hub.resolve(str(model), "main")
    (model / "config.json").write_text('{"model_type": "ypt"}')
    with pytest.raises(Fault, match="changed since"):
        hub.fetch(resolved, tmp_path / "out", False, False, None)
    assert hub.resolve(str(model), "main").commit != resolved.commit


def test_folder_on_another_disk_is_copied(model, tmp_path, monkeypatch):
    def link(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(hub.os, "link", link)
    fetch(str(model), tmp_path / "out")
    fetch(str(model), tmp_path / "out")
    assert contents(tmp_path / "out") == contents(model)
    assert not (tmp_path / "out" / SHARDS[0]).samefile(model / SHARDS[0])


def test_rules_hold_for_folders_too(model, tmp_path):
    (model / "config.json").write_text('{"auto_map": {}}')
    assert "auto_map" in refused(str(model), folder=tmp_path / "out")
    (model / "config.json").unlink()
    (model / "config.json").symlink_to("gone")
    assert "config.json: a link to gone" in refused(str(model))


def test_which_kind_a_source_is(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, tmp_path / "org/toy")
    assert [hub.kind(source) for source in ("org/toy", "org/other", "gpt2", "s3://b/p", "tiny://dense", ".")] == [
        *("folder", "hub", "hub", "s3", "tiny", "folder")
    ]
    for source in ("./org/toi", "/nowhere/at/all", "~/no such folder", "a/b/c", "", "https://huggingface.co/org/toy"):
        assert source in refused(source)
    assert "did you mean org/toy?" in refused("./org/toi")
    assert "a file" in refused("org/toy/config.json")


def test_misspelled_folder_that_looks_like_the_hubs(served, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, tmp_path / "runs/model")
    assert "did you mean runs/model?" in refused("runs/modell")
    assert "org/name" in refused("not a name")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json"])
def test_a_model_without_a_tokenizer_is_refused_before_its_weights_are_fetched(name):
    file_choice.require_tokenizer("org/toy", [*SHARDS, name])
    with pytest.raises(Fault, match=r"^model.source: org/toy: no tokenizer \(tokenizer.json\); tokenizer.save_pretr"):
        file_choice.require_tokenizer("org/toy", SHARDS)


# S3


@pytest.fixture
def bucket(s3_url, monkeypatch):
    client, name = s3_server.bucket_of_test(s3_url, monkeypatch, "models")
    return SimpleNamespace(client=client, name=name, uri=f"s3://{name}/some/model")


def upload(bucket, folder: Path, part: int = 8 * 2**20) -> None:
    """As any tool does; `part` as aws s3 cp has it, so that what is larger gets an ETag that is no MD5."""
    config = TransferConfig(multipart_threshold=part, multipart_chunksize=part)
    for path in folder.iterdir():
        bucket.client.upload_file(str(path), bucket.name, f"some/model/{path.name}", Config=config)


def test_a_model_from_s3_is_pinned_and_verified(bucket, tmp_path):
    model = make_model(tmp_path / "made", 3_000_000)  # 12 MB each: 3 parts of 5 MiB
    (model / "pytorch_model.bin").write_text("pickle")
    upload(bucket, model, 5 * 2**20)
    resolved = hub.resolve(bucket.uri, "main")

    result = hub.fetch(resolved, tmp_path / "out", False, False)
    again = hub.fetch(resolved, tmp_path / "out", False, False)

    (model / "pytorch_model.bin").unlink()
    assert contents(tmp_path / "out") == contents(model)
    assert (result["sent"], again["sent"], [*result["left_out"]]) == (result["bytes"], 0, ["pytorch_model.bin"])
    assert hub.resolve(bucket.uri + "/", "main").commit == resolved.commit
    bucket.client.put_object(Bucket=bucket.name, Key="some/model/config.json", Body=b'{"model_type": "ypt"}')
    assert hub.resolve(bucket.uri, "main").commit != resolved.commit
    with pytest.raises(Fault, match="changed since it was listed"):
        hub.fetch(resolved, tmp_path / "other", False, False)


def test_a_half_file_from_s3_is_continued_and_a_damaged_one_replaced(bucket, model, tmp_path):
    upload(bucket, model)
    resolved = hub.resolve(bucket.uri, "main")
    parts = {
        shard: tmp_path / "out" / hub.PARTIAL / hub.partial_name(shard, resolved.digests[shard]) for shard in SHARDS
    }
    for shard, part in parts.items():
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes((model / shard).read_bytes()[:100_000])
    parts[SHARDS[1]].write_bytes(b"x" * 100_000)

    result = hub.fetch(resolved, tmp_path / "out", False, False)

    assert contents(tmp_path / "out") == contents(model)
    assert result["sent"] == result["bytes"] - 2 * 100_000 + (model / SHARDS[1]).stat().st_size


def test_nothing_in_s3(bucket):
    assert "contains no objects" in refused(bucket.uri)
    assert "no such bucket" in refused(f"{bucket.uri.replace('models-', 'models-x-')}")


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 16, 17])
def test_digest_of_parts_is_s3s(size):
    data = bytes(range(size))
    ends = [hashlib.md5(data[at : at + 8]).digest() for at in range(0, size, 8)]
    digest = f"parts-8:{hashlib.md5(b''.join(ends)).hexdigest()}-{len(ends)}"
    for step in (1, 3, 8, 20):
        check = digests.Check(digest, size)
        for at in range(0, size, step):
            check.update(data[at : at + step])
        assert check.right()
    check.update(b"?")
    assert not check.right()


# The rest


def test_very_large_files_go_through_huggingface_hub(served, model, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "HTTP_LIMIT", 1000)
    served.publish("models/org/toy", model)
    fetch("org/toy", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(model)


def test_importing_costs_nothing_heavy():
    code = (
        "import sys, tasks.sources.hub; early = {'huggingface_hub', 'httpx', 'boto3'} & set(sys.modules)\n"
        "import huggingface_hub, huggingface_hub.hf_api, huggingface_hub.file_download\n"
        "print(early, {'torch', 'transformers', 'tensorflow', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "set() set()"


def test_stand_in_serves_data_sets_too(served, tmp_path):
    (tmp_path / "data/train").mkdir(parents=True)
    (tmp_path / "data/train/rows.jsonl").write_text('{"a": 1}\n')
    served.publish("datasets/org/rows", tmp_path / "data")
    path = hf_hub_download(
        "org/rows", "train/rows.jsonl", repo_type="dataset", endpoint=served.url, cache_dir=tmp_path / "cache"
    )
    assert Path(path).read_text() == '{"a": 1}\n'


def test_choice_of_files_by_name_alone():
    chosen, left_out = file_choice.choose(
        ["consolidated.safetensors", "consolidated.safetensors.index.json"], False, False
    )
    assert (len(chosen), left_out) == (2, {}), "the only weights there are"


def blob(served: stand_in_hub.Hub, name: str) -> str:
    repo = served.repos["models/org/toy"]
    return repo.commits[repo.refs["main"]][name].blob


def small(model: Path) -> int:
    return sum(path.stat().st_size for path in model.iterdir() if path.suffix != ".safetensors")


def steady(counter) -> bool:
    before = counter.copy()
    time.sleep(0.2)
    return before == counter


def until(condition, seconds: float = 8) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
