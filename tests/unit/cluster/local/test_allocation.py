"""How long the node of a task lives: with its standard input, whatever it is signalled. Ray itself is in tests/ray."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.local.allocation import short_folder

ALONE = """
import sys
from cluster.local import allocation, node

def keep(spec, ended):
    print(spec.folder, spec.port, flush=True)
    assert ended.wait(20)

node.keep = keep
allocation.main()
"""
"""The program without Ray."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_told_and_the_end_of_its_input_ends_it(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", ALONE, "127.0.0.1", "7777", "1", "0", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder, port = process.stdout.readline().split()
        assert port == "7777"
        process.send_signal(number)
        deadline = time.monotonic() + 10
        while not (tmp_path / "preempted").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.communicate(timeout=10)
    assert process.returncode == 0
    assert not Path(folder).exists()


def test_a_node_that_does_not_end_in_order_ends_all_the_same(tmp_path: Path) -> None:
    stuck = ALONE.replace("assert ended.wait(20)", "import time; time.sleep(20)")
    stuck = stuck.replace("node.keep = keep", "allocation.LEAVING, node.keep = 0.1, keep")
    command = [sys.executable, "-c", stuck, "127.0.0.1", "7777", "1", "0", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        (folder, _) = process.stdout.readline().split()
        process.communicate(timeout=10)
    assert process.returncode == 1
    assert not Path(folder).exists()


def test_a_node_that_waits_for_its_head_ends_too(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ALONE, "127.0.0.1", "1", "1", "0", str(tmp_path)]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, timeout=20, env={"SLURM_PROCID": "1"}
    )
    assert (done.returncode, done.stdout) == (0, b"")


def test_a_long_folder_of_temporary_files_is_passed_over() -> None:
    assert short_folder("/tmp/me") == "/tmp/me"
    assert short_folder("/scratch/slurm/job-1234567") == "/tmp"
