"""The guide to Python: its code is run as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import write_text

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "python.md"


@pytest.mark.slow
def test_the_code_of_the_guide(tmp_path: Path) -> None:
    write_text(tmp_path / "corpus")
    blocks = re.findall(r'```python title="(\w+)"\n(.*?)```', GUIDE.read_text(), re.DOTALL)
    assert [title for title, _ in blocks] == ["job", "plan", "run", "look", "weights"]
    code = "from orchestrator import Job, load_checkpoint, load_run, plan, run, submit\n" + "\n".join(
        code for _, code in blocks
    )
    code += (
        "\nassert done.state == 'done' and len(metrics) == 12 and list(found.commits().index) == [6, 12]\n"
    )
    code += "assert type(model).__name__ == 'GPT2LMHeadModel' and found.job == job, type(model)\nprint('all of it')\n"
    (tmp_path / "guide.py").write_text(code)
    command = [sys.executable, "guide.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("all of it")
