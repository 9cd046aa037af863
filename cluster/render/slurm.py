"""A batch file for Slurm: Ray on the nodes of an allocation, with a token of its own, and the run on it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.render.needs import ClusterNeeds

_SCRIPT = """\
#!/bin/bash
{mark}
{options}
set -u
cd "$SLURM_SUBMIT_DIR"
umask 077
# Seen by all nodes of the allocation, and by nobody else.
folder="$PWD/.orchestrator-$SLURM_JOB_ID"
mkdir -p "$folder"
head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n' > "$folder/token"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$folder/token" RAY_USAGE_STATS_ENABLED=0
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(getent ahostsv4 "$first" | awk '{{print $1; exit}}')
port=$((20000 + SLURM_JOB_ID % 20000))

srun --ntasks-per-node=1 --kill-on-bad-exit=0 \\
  {python} -m cluster.local.allocation "$address" "$port" {cpus} {gpus} &
nodes=$!
for _ in $(seq {patience}); do
  (: < "/dev/tcp/$address/$port") 2> /dev/null && break
  sleep 1
done

# Slurm's signal before the end of the time, or a preemption: commit, end, and go on in the next allocation.
asked=''
run=''
trap 'asked=requeue; [ -n "$run" ] && kill -TERM "$run"' USR1
trap 'asked=stop; [ -n "$run" ] && kill -TERM "$run"' TERM
{command} --address "$address:$port" &
run=$!
[ -n "$asked" ] && kill -TERM "$run"
while kill -0 "$run" 2> /dev/null; do  # a signal interrupts the wait
  wait "$run"
done
wait "$run"  # whose code the shell keeps
code=$?
kill -TERM "$nodes" 2> /dev/null
wait "$nodes"
rm -rf "$folder"
if [ "$asked" = requeue ] && [ "$code" -eq 3 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


@dataclass(frozen=True)
class SlurmOptions:
    """What a site wants of a batch job: empty for its defaults. time as Slurm writes it, notice in seconds before the
    end, in which the run commits."""

    partition: str = ""
    account: str = ""
    time: str = ""
    notice: int = 180
    more: tuple[str, ...] = ()


def batch_file(
    needs: ClusterNeeds, options: SlurmOptions, command: Sequence[str], mark: str, python: str
) -> str:
    """The batch file of a job, as text; `command` drives the run, without its address."""
    least, most = (math.ceil(count / needs.per_node) for count in (needs.min_workers, needs.max_workers))
    cpus, gpus = math.ceil(needs.cpu * needs.per_node), needs.gpu * needs.per_node
    wanted = {
        "job-name": needs.name,
        "nodes": str(most) if least == most else f"{least}-{most}",
        "ntasks-per-node": "1",
        "cpus-per-task": str(cpus),
        "gpus-per-node": str(gpus) if gpus else "",
        "partition": options.partition,
        "account": options.account,
        "time": options.time,
        "signal": f"B:USR1@{options.notice}",
        "open-mode": "append",
        "output": "%x-%j.log",
    }
    lines = [f"#SBATCH --{key}={value}" for key, value in wanted.items() if value]
    lines += ["#SBATCH --requeue", *(f"#SBATCH {each}" for each in options.more)]
    return _SCRIPT.format(
        mark=mark,
        options="\n".join(lines),
        python=shlex.quote(python),
        cpus=cpus,
        gpus=gpus,
        patience=120,
        command=shlex.join(command),
    )
