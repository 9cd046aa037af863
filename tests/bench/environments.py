"""Environments of their own for other releases of libraries."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path


def made_by_uv(path: Path, *installs: list[str]) -> str:
    """Return the Python of an environment. If it is not there, make it by one `uv pip install` after another.

    Args:
        path: its folder.
        installs: the arguments of each installation.
    """
    python = path / "bin" / "python"
    if not (path / "made").exists():
        shutil.rmtree(path, ignore_errors=True)
        uv = [str(Path(sys.executable).with_name("uv"))]
        subprocess.run(
            [*uv, "venv", "--quiet", "--python", sys.executable, str(path)], check=True, timeout=120
        )
        for arguments in installs:
            command = [*uv, "pip", "install", "--quiet", "--python", str(python), *arguments]
            subprocess.run(command, check=True, timeout=1800)
        (path / "made").touch()
    return str(python)
