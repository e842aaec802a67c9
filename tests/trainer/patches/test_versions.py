"""A patch is refused for a version that it is not written for, in one line, before it changes anything."""

import importlib.metadata
import re
from importlib import import_module
from pathlib import Path

import pytest

from contract.faults import Fault
from trainer.patches import versions

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/extending/patches.md"
FOLDER = ROOT / "trainer/patches"
NAMES = {path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("[a-z]*.py")}
PATCHES = sorted(NAMES - {"versions"})
LIGHT = {
    "batch_ramp": "install",
    "checkpoints/background": "install",
    "checkpoints/base_loading": "build_without_memory",
    "checkpoints/files": "pass_results_here",
    "families/clamped_experts": "install",
    "families/delta_kernels": "choose_configurations",
    "families/head_models": "install",
    "families/kimi_k2": "install",
    "families/latent_norms": "keep_epsilon",
    "families/minimax_m2": "install",
    "families/nemotron_h": "install",
    "families/router_biases": "install",
    "families/row_ends": "install",
    "families/scaled_positions": "install",
    "gradients/accumulation": "install",
    "gradients/chunked_losses": "install",
    "gradients/repeated_passes": "install",
    "gradients/split": "install",
    "gradients/token_count": "install",
    "import_fixes": "install",
    "joined_packs": "install",
    "lazy_bridge": "install",
    "null_tokenizer": "install",
    "offloading": "keep_counting",
    "store_address": "install",
    "forked_ranks": "install",
    "transformers_imports": "import_transformers",
    "vllm_cpu": "ask_in_process",
}
NEED_ARGUMENT = ("batch_ramp", "checkpoints/background", "families/latent_norms", "import_fixes")
NEED_ARGUMENT += ("gradients/repeated_passes", "joined_packs")
# They import Megatron when they are imported.
HEAVY = {
    "checkpoints/divided_states": ["install"],
    "dora": ["install", "mark_magnitudes"],
    "expert_adapters": ["install", "install_shared", "count_once"],
    "families/delta_nets": ["use_kernels"],
    "families/mamba": ["install"],
    "families/norms_over_heads": ["install"],
    "families/stacked_experts": ["install"],
    "gradients/local_norms": ["install"],
    "gradients/mtp_loss": ["install"],
    "kept_routes": ["install"],
    "packed_positions": ["install"],
    "wide_heads": ["install"],
    "recompute": ["start_from_the_embedding"],
    "resharding": ["install"],
    "sequence_parallel": ["give_every_adapter_all_tokens"],
}


@pytest.fixture
def other_version(monkeypatch):
    """A version of every package that nothing is written for."""
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "99.1+cpu")
    return "99.1"


def test_every_patch_is_tried_here():
    assert sorted([*LIGHT, *HEAVY]) == PATCHES == sorted(versions.WRITTEN_FOR)


@pytest.mark.parametrize("patch, function", LIGHT.items())
def test_another_version_is_one_line(patch, function, other_version):
    arguments = [None] if patch in NEED_ARGUMENT else []
    with pytest.raises(Fault) as refused:
        getattr(import_module(f"trainer.patches.{patch.replace('/', '.')}"), function)(*arguments)
    (package, known), *_ = versions.WRITTEN_FOR[patch].items()
    assert str(refused.value) == (
        f"{package} 99.1: trainer/patches/{patch}.py is written for {known[0]}; install that (make setup), "
        "or change the patch (docs/extending/patches.md)"
    )


def test_another_version_is_one_line_where_megatron_is_there(unpatched):
    found = unpatched("refused", functions=HEAVY)
    assert found.keys() == {f"{patch}.{function}" for patch, functions in HEAVY.items() for function in functions}
    for name, line in found.items():
        assert re.fullmatch(
            r"megatron-\w+ 99\.1: trainer/patches/[\w/]+\.py is written for .*; install that .*", line
        ), name


def test_a_package_that_is_not_there_is_said_to_be_missing():
    with pytest.raises(Fault, match=r"^no-such is not installed: trainer/patches/x\.py is written for 1\.0 and 1\.1;"):
        versions.check("trainer.patches.x", {"no-such": ("1.0", "1.1")})


@pytest.mark.parametrize("patch", PATCHES)
def test_it_is_written_for_what_is_installed_and_the_page_says_so(patch):
    (row,) = (line for line in PAGE.read_text().splitlines() if line.startswith(f"| `{patch}`"))
    for package, known in versions.WRITTEN_FOR[patch].items():
        assert versions.installed(package) in (*known, None)  # None: vLLM's CPU build, on a GPU
        assert f"{package} {known[-1]}" in row
