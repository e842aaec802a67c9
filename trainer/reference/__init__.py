"""Scores of a training's rows by its reference model: python -m trainer.reference."""
