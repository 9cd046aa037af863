"""The batch file for Slurm as text."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cluster.local.allocation import spec_of
from cluster.render.needs import ClusterNeeds
from cluster.render.slurm import SlurmOptions, batch_file


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


@pytest.mark.parametrize("code", [0, 3, 137])
def test_it_waits_for_the_commands_own_end(code: int, tmp_path: Path) -> None:
    """By a signal too, whose code the shell gives for every further wait; and a signal to itself ends no wait."""
    whole = rendered(ClusterNeeds("gpt", "i", 2, 2))
    command = "orchestrator run 'a b.yaml' --address \"$address:$port\" &"
    part = whole[whole.index("asked=''") : whole.index('kill -TERM "$nodes"')]
    assert command in part
    part = part.replace(command, f"bash -c 'trap \"sleep 0.2; exit {code}\" TERM; sleep 0.6 & wait; wait' &")
    part = part.replace("run=$!", "run=$!; (sleep 0.2; kill -USR1 $$) &", 1)
    (tmp_path / "part.sh").write_text(f'{part}exit "$code"\n')
    assert subprocess.run(["bash", tmp_path / "part.sh"], check=False, timeout=20).returncode == code
