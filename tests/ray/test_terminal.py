"""What a run shows on a terminal of its own until it trains: never nothing."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from jobs import TIMEOUT, command, job, kill_tree, write_job, write_text

CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
PHASES = ("check", "connect", "prepare", "start", "train")


@pytest.mark.slow
def test_from_the_first_second_until_training_there_is_a_phase_in_words(tmp_path: Path) -> None:
    """The first one after a second of the command's own processor time, however busy the machine is."""
    path = write_job(tmp_path, job(write_text(tmp_path / "corpus", 40_000)))
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command("run", path), cwd=tmp_path, stdout=theirs, stderr=theirs)
    os.close(theirs)
    first, frames = None, list[str]()
    deadline = time.monotonic() + TIMEOUT
    try:
        while time.monotonic() < deadline and not any("train" in frame for frame in frames):
            text = CODES.sub("", os.read(ours, 65536).decode(errors="replace"))
            if first is None and any(phase in text for phase in PHASES):
                used = psutil.Process(process.pid).cpu_times()
                first = used.user + used.system
            frames += [line for line in text.split("\n") if line.strip()]
    finally:
        kill_tree(process.pid)
        process.wait(timeout=30)
        os.close(ours)
    assert first is not None
    assert first < 1.0
    shown = [phase for frame in frames for phase in PHASES if f"{phase} " in f"{frame} "]
    order = list(dict.fromkeys(shown))
    assert order == [phase for phase in PHASES if phase in order]
    assert {"check", "connect", "train"} <= set(order)
