"""The files of a checkpoint of Megatron-LM."""

from __future__ import annotations

import re

LATEST = "latest_checkpointed_iteration.txt"
FILES = ("model_optim_rng.pt", "model_rng.pt")
COMMON, ABOUT = "common.pt", "metadata.json"
"""Files of a distributed Megatron-Core checkpoint: unsharded values with the options, and the format."""
RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?")
"""The ranks of tensor, pipeline and expert parallelism; a degree of 1 of the last two is left out."""
AGAIN = "give the folder that --save named, or one iter_... of it"
