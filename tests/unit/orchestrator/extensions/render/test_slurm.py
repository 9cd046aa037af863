"""The batch file for Slurm as text."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from thin import every

from cluster.local.allocation import spec_of
from cluster.local.ports import free_port
from orchestrator.extensions.render.cluster_needs import ClusterNeeds
from orchestrator.extensions.render.slurm import SlurmOptions, batch_file

SRUN = f"""#!{sys.executable} -S
# A task on a node, as `cluster.local.allocation` is one, which srun signals.
import os, signal, socket, sys
*_, address, port, cpus, gpus, folder = sys.argv
signal.signal(signal.SIGTERM, lambda *_: open(folder + "/preempted", "w").close())
open("srun", "w").write(str(os.getpid()))
listener = socket.create_server((address, int(port)))
while os.read(0, 1):
    pass
open("ended", "w").close()
"""
SCONTROL = """#!/bin/bash
case "$*" in
  "show hostnames"*) echo 127.0.0.1;;
  "show job"*) cat state;;
  *) echo "$*" >> requeued;;
esac
"""
RUN = """
trap 'echo told >> told; sleep 0.3; exit {code}' TERM
touch begun
sleep 20 & wait
"""
"""A run that ends with this code once it is told to."""


def rendered(needs: ClusterNeeds, **options: object) -> str:
    return batch_file(needs, SlurmOptions(**options), ["orchestrator", "run", "a b.yaml"], "# mark", "python")  # type: ignore[arg-type]


def test_it_asks_for_the_nodes_of_the_job() -> None:
    text = rendered(
        ClusterNeeds("gpt", "i", 4, 16, cpu=3.0, gpu=1, per_node=4),
        partition="gpu",
        time="1-00:00:00",
        more=("--qos=high",),
    )
    wanted = {
        "--nodes=1-4", "--cpus-per-task=12", "--gpus-per-node=4", "--partition=gpu", "--time=1-00:00:00", "--requeue",
        "--signal=B:USR1@180", "--qos=high", "--job-name=gpt", "--ntasks-per-node=1",
    }  # fmt: skip
    said = {line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")}
    assert wanted <= said
    assert "--account" not in text
    assert "orchestrator run 'a b.yaml' --address" in text
    assert "srun --ntasks-per-node=1 --cpus-per-task=12 " in text  # which sbatch does not hand on
    assert "python -P -m cluster.local.allocation" in text  # whatever folder `cluster` is beside the job
    assert "--gpus-per-node" not in rendered(ClusterNeeds("gpt", "i", 2, 2))


def test_it_is_a_shell_script(tmp_path: Path) -> None:
    (tmp_path / "a.sbatch").write_text(rendered(ClusterNeeds("gpt", "i", 2, 2)))
    assert subprocess.run(["bash", "-n", tmp_path / "a.sbatch"], check=False).returncode == 0


def test_the_first_task_is_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    head = spec_of("/f", "10.0.0.1", 6000, 8, 2, 0)
    assert (head.ip, head.port, head.head_address, head.cpus, head.gpus) == ("10.0.0.1", 6000, "", 8, 2)
    monkeypatch.setenv("SLURMD_NODENAME", "127.0.0.9")
    worker = spec_of("/f", "10.0.0.1", 6000, 8, 2, 1)
    assert (worker.ip, worker.head_address) == ("127.0.0.9", "10.0.0.1:6000")


@pytest.fixture
def batch(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts the batch file of a run, with Slurm's commands as they are given; at the end nothing of it is left."""
    started: list[subprocess.Popen[bytes]] = []

    def start(run: str, srun: str = SRUN, state: str = "JobState=RUNNING") -> subprocess.Popen[bytes]:
        text = batch_file(
            ClusterNeeds("gpt", "i", 1, 1), SlurmOptions(), ["bash", "-c", run], "# mark", "python"
        )
        for name, what in (("srun", srun), ("scontrol", SCONTROL)):
            (tmp_path / "bin").mkdir(exist_ok=True)
            (tmp_path / "bin" / name).write_text(what)
            (tmp_path / "bin" / name).chmod(0o755)
        (tmp_path / "a.sbatch").write_text(text)
        (tmp_path / "state").write_text(state)
        number = next(
            n for n in range(os.getpid() % 10_000, 20_000) if free_port("127.0.0.1", 20_000 + n) == 20_000 + n
        )
        more = {"SLURM_JOB_ID": str(number), "SLURM_JOB_NODELIST": "one", "SLURM_SUBMIT_DIR": str(tmp_path)}
        environment = os.environ | more | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
        started.append(subprocess.Popen(["bash", "a.sbatch"], cwd=tmp_path, env=environment, process_group=0))
        return started[-1]

    yield start
    for process in started:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        finally:
            process.wait(10)


def await_file(path: Path) -> str:
    """What is in a file once it is there."""
    deadline = time.monotonic() + 20
    while not path.exists() or (path.name == "srun" and not path.read_text()):
        assert time.monotonic() < deadline, f"{path.name} is missed"
        time.sleep(0.02)
    return path.read_text()


@pytest.mark.parametrize("code", every(3, [3, 0, 137]))
def test_it_waits_for_the_commands_own_end(
    code: int, batch: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """By a signal too, whose code the shell gives for every further wait; and a signal to itself ends no wait. The
    nodes end after it, and what has committed as its time ends is requeued."""
    script = batch(RUN.format(code=code))
    await_file(tmp_path / "begun")
    script.send_signal(signal.SIGUSR1)
    assert script.wait(20) == code
    assert (tmp_path / "ended").exists()
    assert (tmp_path / "requeued").exists() == (code == 3)
    assert list(tmp_path.glob(".orchestrator-*")) == []


PREEMPTED = "JobState=RUNNING Reason=None PreemptTime=2026-11-28T04:48:31"


@pytest.mark.parametrize(
    ("state", "requeued"),
    every(
        3,
        [
            (PREEMPTED, True),
            ("JobState=RUNNING Reason=None PreemptTime=None", False),
            ("JobState=CANCELLED Reason=None PreemptTime=2026-11-28T04:48:31", False),
        ],
        unpack=True,
    ),
    ids=["preempted", "signalled", "cancelled"],
)
def test_a_preemption_that_only_the_nodes_hear_of_is_told_to_the_run(
    state: str, requeued: bool, batch: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """They live on until it has ended."""
    script = batch(RUN.format(code=3), state=state)
    await_file(tmp_path / "begun")
    os.kill(int(await_file(tmp_path / "srun")), signal.SIGTERM)
    await_file(tmp_path / "told")
    assert not (tmp_path / "ended").exists()
    assert script.wait(20) == 3
    assert (tmp_path / "ended").exists()
    assert (tmp_path / "requeued").exists() == requeued


def test_a_run_is_told_once(batch: Callable[..., subprocess.Popen[bytes]], tmp_path: Path) -> None:
    """Told twice, it ends without a commit."""
    script = batch(RUN.format(code=3).replace("sleep 0.3", "sleep 1"), state=PREEMPTED)
    await_file(tmp_path / "begun")
    os.kill(int(await_file(tmp_path / "srun")), signal.SIGTERM)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        script.send_signal(number)
        time.sleep(0.1)
    assert script.wait(20) == 3
    assert (tmp_path / "told").read_text() == "told\n"


def test_nodes_outlive_no_script_that_is_killed(
    batch: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    script = batch(RUN.format(code=3))
    await_file(tmp_path / "begun")
    script.kill()
    await_file(tmp_path / "ended")


def test_nodes_that_end_at_once_are_not_waited_for(
    batch: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    assert batch("exit 2", "#!/bin/bash\nexit 1\n").wait(20) == 2
