"""The entry point of ranks some of which use DeepSpeed: importing it takes longer than their steps."""

import os

from any_rank import main

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import deepspeed.runtime.zero.muon.muon_optimizer

__all__ = ["deepspeed", "main"]
