"""The entry point of the rank program for a model in a Hugging Face folder.

Each rank reads the folder through transformers, whose import takes longer than the reading. A gang names this module so
that a process imports it once for all ranks of its node.
"""

from transformers.models.auto import configuration_auto, tokenization_auto

from orchestrator.train.loop import main

__all__ = ["configuration_auto", "main", "tokenization_auto"]
