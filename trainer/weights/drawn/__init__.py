"""Models with drawn weights, as their families begin a training: names, shapes, values and files."""
