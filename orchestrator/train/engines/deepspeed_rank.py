"""The rank program where the engine is DeepSpeed, whose import takes longer than the start of everything else.

A gang names this module for its processes to have that behind them before they are needed.
"""

import orchestrator.train.engines.deepspeed_engine  # noqa: F401
from orchestrator.train.loop import main

__all__ = ["main"]
