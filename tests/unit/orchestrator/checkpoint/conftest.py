from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# the models of storage that several of these tests share
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """A folder that no disk has to follow, where the machine has one: these tests sync a lot."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else tmp_path) as folder:
        yield Path(folder)
