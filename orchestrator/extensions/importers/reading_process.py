"""A separate process that reads pickles of other projects, with an empty environment. It answers in JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from orchestrator.config.errors import InputError


def ask(module: str, request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of that module's process about `request["folder"]`; it writes to the folder
    `request["target"]`.

    Raises InputError if it refuses, or ends without an answer.
    """
    folder, out = request["folder"], request["target"]
    environment = {
        "PATH": os.defpath,
        "HOME": out,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run(
        [sys.executable, "-m", module],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env=environment,
        cwd=out,
        check=False,
    )
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        answer = None
    if done.returncode or not isinstance(answer, dict):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise InputError(
            f"the process that reads it ended: {last}", folder, "see whether its files are complete"
        )
    if "refused" in answer:
        raise InputError(answer["refused"], folder, "")
    return answer
