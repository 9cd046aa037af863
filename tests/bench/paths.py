"""Imported first by a measurement: from here on it finds the helpers of the tests, as pytest does."""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_TESTS), str(_TESTS / "dist" / "train")]
