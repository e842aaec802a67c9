"""The reference of a training, asked of its rows: python -m trainer.reference."""
