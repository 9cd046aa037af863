"""The rank programs of these tests are modules that spawned processes import by name."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.workers.process_gang import ProcessGang

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def gang() -> Iterator[ProcessGang]:
    """One for all modules: what ranks import is imported once, and every start has ranks of its own."""
    with contextlib.closing(ProcessGang()) as found:
        yield found
