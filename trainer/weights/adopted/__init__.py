"""Released models from checkpoints of other stacks, and from a release with an adapter merged into it."""
