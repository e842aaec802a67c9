"""Configuration of a run: the schema, the arithmetic of its parallel layout, and one YAML file per run.

It does not import torch, Megatron, transformers or Prefect, so a wrong configuration is refused in half a second.
"""
