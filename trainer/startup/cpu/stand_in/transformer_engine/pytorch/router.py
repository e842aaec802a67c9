"""The fused router kernels are missing: Megatron routes with plain PyTorch unless moe_router_fusion is set."""

fused_compute_score_for_moe_aux_loss = None
fused_moe_aux_loss = None
fused_topk_with_score_function = None
