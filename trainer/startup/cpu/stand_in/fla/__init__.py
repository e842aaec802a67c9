"""Stand-in for flash-linear-attention on a CPU: the functions that megatron-core calls for gated delta nets, in torch.

Each computes in fp32 what the kernel computes on a GPU, with gradients. `cu_seqlens` holds the ends of packed rows;
each row is computed alone, so a row's result does not depend on its neighbours.
"""
