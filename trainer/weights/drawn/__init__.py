"""Models with random weights for training from scratch: names, shapes, initial values and files."""
