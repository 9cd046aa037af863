from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.cli.data_samples import fully_prepared
from orchestrator.config.errors import InputError


def test_data_that_is_still_prepared_is_told_and_not_waited_for() -> None:
    tokens: Any = SimpleNamespace(sections=None, folder=SimpleNamespace(uri="runs/_data/1"))
    assert fully_prepared(tokens) is tokens
    tokens.sections = 1
    with pytest.raises(InputError, match="runs/_data/1: is not all prepared"):
        fully_prepared(tokens)
