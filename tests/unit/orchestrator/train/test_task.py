"""The task's entry points are named by text, which no type checker and no rename follows."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from orchestrator.train.task import PREEMPTION_NOTICES, SNAPSHOT_SERVER, entry_of

ENTRIES = (
    entry_of("torch", "gpt-tiny"),
    entry_of("torch", "hf:folder"),
    entry_of("deepspeed", "gpt-tiny"),
)


@pytest.mark.parametrize("name", [*ENTRIES[:2], SNAPSHOT_SERVER, PREEMPTION_NOTICES])
def test_what_is_named_is_there(name: str) -> None:
    module, _, attribute = name.partition(":")
    assert callable(getattr(importlib.import_module(module), attribute))


IMPORTS = """
import importlib, os, sys
from unittest import mock
import torch
asked = ("is_available", "device_count", "_lazy_init", "current_device", "get_device_properties")
patches = [mock.patch.object(torch.cuda, name, side_effect=AssertionError(name)) for name in asked]
for patch in patches:
    patch.start()
for target in sys.argv[1:]:
    importlib.import_module(target.partition(":")[0])
for thread in os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else ():
    with open(f"/proc/self/task/{thread}/comm") as file:
        assert (name := file.read().strip()).startswith(("python", "jemalloc")), name
assert "transformers.models.auto.tokenization_auto" in sys.modules
"""


def test_what_a_fork_server_imports_asks_for_no_gpu_and_starts_no_thread() -> None:
    """CUDA does not survive a fork, nor do threads, and ranks are forks of what has imported their program."""
    words = [sys.executable, "-c", IMPORTS, *ENTRIES, "cluster.workers.rank_process:run"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
