"""The entry point of the rank program with the DeepSpeed engine.

Importing DeepSpeed takes longer than everything else at the start. A gang names this module so that prewarmed processes
have imported it already.
"""

import orchestrator.train.engines.deepspeed_engine  # noqa: F401
from orchestrator.train.loop import main

__all__ = ["main"]
