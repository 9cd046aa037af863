"""The rank programs of these tests are modules that spawned processes import by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
