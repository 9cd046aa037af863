"""The entry point of ranks in a lasting gang: whatever target is named, after the imports that most of them need.

DeepSpeed and the classes of transformers take longer to import than the steps of a test.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
import transformers.modeling_utils
import transformers.models.auto.modeling_auto  # noqa: F401

import orchestrator.train.loop  # noqa: F401
from cluster.workers.worker_context import WorkerContext


def main(config: dict[str, Any], context: WorkerContext) -> Any:
    """Run `config["target"]` with `config["config"]` in the environment that was there when the gang was started."""
    os.environ.clear()
    os.environ.update(config["environment"])
    module, _, function = config["target"].partition(":")
    return getattr(importlib.import_module(module), function)(config["config"], context)
