"""Memory, layout and time of vLLM, which serves a model during evaluation and reinforcement learning."""
