"""Import of configurations of other stacks: a table of keys for each stack (stacks/), and readers of their formats."""
