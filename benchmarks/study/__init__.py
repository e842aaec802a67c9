"""Study of a model's layouts: each layout is measured for a few steps, and one report compares all."""
