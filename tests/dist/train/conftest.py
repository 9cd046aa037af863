"""The rank programs of these tests are modules that spawned processes import by name."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lasting_gang import LastingGang

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def gang() -> Iterator[LastingGang]:
    """One for all modules: what ranks import is imported once, and every start has ranks of its own."""
    found = LastingGang("any_rank_deepspeed:main")
    yield found
    found.end()
