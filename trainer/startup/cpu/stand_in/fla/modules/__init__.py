"""Stand-in for flash-linear-attention's modules."""
