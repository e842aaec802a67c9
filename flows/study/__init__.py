"""A study of a model's layouts: each is measured for a few steps, and one report compares them."""
