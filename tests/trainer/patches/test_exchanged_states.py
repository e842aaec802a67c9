"""trainer/patches/checkpoints/exchanged_states.py: the states of an optimizer that a checkpoint gets, bit by bit."""

from tests.trainer.patches.test_upstream import text

ALL = "numel_unpadded param exp_avg exp_avg_sq"


def test_pieces_are_what_megatron_core_exchanges_whole(configure, base, ranks, tmp_path):
    base("qwen3-moe")
    keys = {"adapter.kind": "none", "layout.gpus_per_node": 4, "layout.ep": 2, "paths.output": tmp_path}
    keys |= {"train.global_batch": 8, "train.steps": 2, "checkpoint.save_every": 2, "train.validate_every": 0}
    made = configure("qwen3-moe", *(f"{key}={value}" for key, value in keys.items()))
    result = ranks("train_comparing_states", made)
    assert result.code == 0, result.output
    for rank in range(4):  # of dense weights, and of experts
        assert sorted((tmp_path / f"states-{rank}.txt").read_text().split()) == sorted(2 * ALL.split())


def test_megatron_core_exchanges_a_buffer_in_one_piece():
    source = text("megatron-core", "megatron/core/optimizer/distrib_optimizer.py")
    assert source.count("recv_tensors_concatenated = torch.cat(recv_tensors)") == 1
