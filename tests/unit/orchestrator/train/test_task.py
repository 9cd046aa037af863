"""The task's entry points are named by text, which no type checker and no rename follows."""

from __future__ import annotations

import importlib

import pytest

from orchestrator.train.task import ENTRY_OF, PREEMPTION_NOTICES, SNAPSHOT_SERVER


@pytest.mark.parametrize("name", [ENTRY_OF["torch"], SNAPSHOT_SERVER, PREEMPTION_NOTICES])
def test_what_is_named_is_there(name: str) -> None:
    module, _, attribute = name.partition(":")
    assert callable(getattr(importlib.import_module(module), attribute))
