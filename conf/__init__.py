"""Configuration of a run: the schema, the arithmetic of its parallel layout, and one YAML file per run.

Imports neither torch nor Megatron, transformers nor Prefect: a wrong configuration is refused in half a second.
"""
