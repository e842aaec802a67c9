"""Memory, layout and time of vLLM, which serves a model while it is evaluated."""
