"""The rank programs of these tests are modules that spawned processes import by name."""

import sys
from pathlib import Path

import pytest
from lasting_gang import LastingGang, lasting_gang

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def gang() -> LastingGang:
    """What ranks import is imported once; every start has ranks of its own."""
    return lasting_gang()
