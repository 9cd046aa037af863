"""Make a batch file for Slurm, which starts Ray with its own token on the allocated nodes, and drives the run."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.local.allocation import PREEMPTED
from orchestrator.extensions.render.cluster_needs import ClusterNeeds

_SCRIPT = """\
#!/bin/bash
{mark}
{options}
set -u
cd "$SLURM_SUBMIT_DIR"
umask 077
# Seen by all nodes of the allocation, and by nobody else. A requeued job has the number that it had.
folder="$PWD/.orchestrator-$SLURM_JOB_ID"
rm -rf "$folder"
mkdir "$folder"
head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n' > "$folder/token"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$folder/token" RAY_USAGE_STATS_ENABLED=0
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(getent ahostsv4 "$first" | awk '{{print $1; exit}}')
port=$((20000 + SLURM_JOB_ID % 20000))

# The nodes live as long as this script holds their standard input, however it ends: no signal of Slurm's ends them.
exec 9> >(exec srun --ntasks-per-node=1 --cpus-per-task={cpus} --kill-on-bad-exit=0 --input=all \\
  {python} -P -m cluster.local.allocation "$address" "$port" {cpus} {gpus} "$folder")
nodes=$!
for _ in $(seq {patience}); do
  (: < "/dev/tcp/$address/$port") 2> /dev/null && break
  kill -0 "$nodes" 2> /dev/null || break
  sleep 1
done

# Slurm's signal before the end of the time, or a preemption: commit, end, and go on in the next allocation. The run is
# told once: a second signal would end it without a commit.
asked=''
run=''
hear() {{
  if [ -z "$asked" ]; then
    asked=$1
    [ -n "$run" ] && kill -TERM "$run"
  fi
}}
trap 'hear time' USR1
trap 'hear preemption' TERM
# Of a preemption Slurm tells the nodes alone, and these tell it in the folder.
while kill -0 $$ 2> /dev/null; do
  [ -e "$folder/{preempted}" ] && kill -TERM $$ && break
  sleep 1
done 9>&- &
{command} --address "$address:$port" 9>&- &
run=$!
[ -n "$asked" ] && kill -TERM "$run"
while kill -0 "$run" 2> /dev/null; do  # a signal interrupts the wait
  wait "$run"
done
wait "$run"  # whose code the shell keeps
code=$?
exec 9>&-
for _ in $(seq {leaving}); do
  kill -0 "$nodes" 2> /dev/null || break
  sleep 1
done
rm -rf "$folder"
# Of the jobs that it preempts Slurm requeues those that it has to kill. One that was cancelled stays so.
preempted() {{
  [ "$asked" = preemption ] &&
    scontrol show job --oneliner "$SLURM_JOB_ID" | grep -q 'JobState=RUNNING .*PreemptTime=[0-9]'
}}
if [ "$code" -eq 3 ] && {{ [ "$asked" = time ] || preempted; }}; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


@dataclass(frozen=True)
class SlurmOptions:
    """Options of the batch job; empty values mean the site's defaults.

    `time` is the limit as Slurm writes it. `notice` are the seconds before the limit in which the run commits.
    """

    partition: str = ""
    account: str = ""
    time: str = ""
    notice: int = 180
    more: tuple[str, ...] = ()


def batch_file(
    needs: ClusterNeeds, options: SlurmOptions, command: Sequence[str], mark: str, python: str
) -> str:
    """Return the batch file of a job. `command` drives the run, without its address."""
    min_nodes, max_nodes = (
        math.ceil(count / needs.per_node) for count in (needs.min_workers, needs.max_workers)
    )
    cpus, gpus = math.ceil(needs.cpu * needs.per_node), needs.gpu * needs.per_node
    wanted = {
        "job-name": needs.name,
        "nodes": str(max_nodes) if min_nodes == max_nodes else f"{min_nodes}-{max_nodes}",
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
        leaving=30,
        preempted=PREEMPTED,
        command=shlex.join(command),
    )
