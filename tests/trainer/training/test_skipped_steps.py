"""Steps that fp16 skips, as their gradients overflow, and which kernels fp16 is given on a GPU."""

from types import SimpleNamespace
from unittest import mock

import pytest

from trainer.startup import device


def test_a_step_that_is_skipped_after_the_learning_check_is_over_ends_nothing(configure, ranks):
    done = ranks("skipped_step", configure("llama"))
    assert done.code == 0, done.output


@pytest.mark.parametrize(("fp16", "kernel"), [(False, "te"), (True, "native")])
def test_transformer_engine_s_loss_is_given_what_it_takes(fp16, kernel):
    provider = SimpleNamespace(
        add_bias_linear=False,
        num_moe_experts=None,
        activation_func=None,
        hidden_dropout=0,
        bias_activation_fusion=True,
        position_embedding_type="rope",
        multi_latent_attention=False,
        apply_rope_fusion=False,
    )
    with mock.patch.object(device, "has_gpu", return_value=True):
        device.choose_kernels(provider, fp16=fp16)
    assert provider.cross_entropy_fusion_impl == kernel and provider.apply_rope_fusion
