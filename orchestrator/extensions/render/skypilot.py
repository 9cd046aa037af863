"""Make a task file for SkyPilot: a managed job that starts Ray on its nodes, with a token, and survives preemptions."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from orchestrator.extensions.render.cluster_needs import ClusterNeeds

TOKEN = "ORCHESTRATOR_TOKEN"
"""The secret of the task with Ray's token, by which the nodes and the run authenticate."""
PREEMPTED = 75
"""The exit code of a run that committed before a preemption. SkyPilot restarts it (EX_TEMPFAIL of sysexits.h)."""
PORT = 26380
"""The port of the head. SkyPilot's own Ray uses 6380."""
_SCRIPT = """\
set -u
umask 077
: "${{{token}:?is not set: give --secret {token}=... to sky jobs launch}}"
folder=$(mktemp -d)
printf %s "${token}" > "$folder/token"
# SkyPilot runs a Ray of its own on these machines: nothing of it is to be taken for ours.
unset {token} ${{!RAY_@}}
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$folder/token" RAY_USAGE_STATS_ENABLED=0
address=$(printf '%s\\n' "$SKYPILOT_NODE_IPS" | head -n 1)
up() {{ (: < "/dev/tcp/$address/{port}") 2> /dev/null; }}
asked=''
run=''
trap 'asked=1; [ -n "$run" ] && kill -TERM "$run"' TERM INT
# The node lives as long as this script holds its standard input, however it ends.
exec 9> >(exec {python} -P -m cluster.local.allocation "$address" {port} {cpus} {gpus} "$folder")
node=$!
for _ in $(seq {patience}); do
  up && break
  kill -0 "$node" 2> /dev/null || break
  sleep 1
done

if [ "$SKYPILOT_NODE_RANK" != 0 ]; then  # a node lives as long as the head does
  missed=0
  while [ "$missed" -lt 3 ] && kill -0 "$node" 2> /dev/null; do
    sleep 2 &
    wait "$!"
    if up; then missed=0; else missed=$((missed + 1)); fi
  done
  exec 9>&-
  wait "$node"
  code=$?
  rm -rf "$folder"
  if [ -n "$asked" ] || [ "$missed" -gt 0 ]; then exit 0; fi
  exit "$code"
fi

mkdir -p ~/.orchestrator
echo "$$" > {pid}
if [ -z "$asked" ]; then
  {command} --address "$address:{port}" 9>&- &
  run=$!
  [ -n "$asked" ] && kill -TERM "$run"
  while kill -0 "$run" 2> /dev/null; do  # a signal interrupts the wait
    wait "$run"
  done
  wait "$run"  # whose code the shell keeps
  code=$?
else
  code=3
fi
exec 9>&-
wait "$node"
rm -rf "$folder" {pid}
if [ -n "$asked" ] && [ "$code" -eq 3 ]; then
  exit {preempted}
fi
exit "$code"
"""
_HOOK = """\
# Before the machine goes: the run commits and ends.
if [ -f {pid} ]; then kill -TERM "$(cat {pid})"; fi
while [ -f {pid} ]; do sleep 1; done
"""


@dataclass(frozen=True)
class SkyPilotOptions:
    """Options of the task: where it runs and what its machines need.

    `infra` is a place as SkyPilot writes it (aws/us-east-1), empty for any. `image` is a container image, empty for a
    machine on which `setup` runs. `notice` are the seconds in which the run commits before a preemption.
    """

    workdir: str
    infra: str = ""
    image: str = ""
    setup: str = ""
    notice: int = 100


def task(
    needs: ClusterNeeds, options: SkyPilotOptions, command: Sequence[str], python: str
) -> dict[str, Any]:
    """Return the task of a job.

    It has the nodes for the largest number of workers, because SkyPilot starts and ends all nodes together.

    Args:
        needs: what the job needs.
        command: the command that drives the run, without its address, in the folder `options.workdir`.
        options: where the task runs.
        python: the Python interpreter of the nodes.
    """
    cpus, gpus = math.ceil(needs.cpu * needs.per_node), needs.gpu * needs.per_node
    pid = f"~/.orchestrator/{needs.name}.pid"
    resources: dict[str, Any] = {
        "cpus": f"{cpus}+",
        "memory": f"{math.ceil(needs.memory_gib * needs.per_node)}+",
        "use_spot": needs.spot,
        "job_recovery": {"recover_on_exit_codes": [PREEMPTED]},
    }
    if gpus:
        resources["accelerators"] = dict.fromkeys(needs.accelerators, gpus)
    if options.infra:
        resources["infra"] = options.infra
    if options.image:
        resources["image_id"] = f"docker:{options.image}"
    script = _SCRIPT.format(
        token=TOKEN,
        port=PORT,
        python=python,
        cpus=cpus,
        gpus=gpus,
        patience=120,
        pid=pid,
        command=shlex.join(command),
        preempted=PREEMPTED,
    )
    return {
        "name": needs.name,
        "num_nodes": math.ceil(needs.max_workers / needs.per_node),
        "workdir": options.workdir,
        "resources": resources,
        "secrets": {TOKEN: None},
        **({"setup": options.setup} if options.setup else {}),
        "run": script,
        "config": {
            "hooks": [{"events": ["preemption"], "timeout": options.notice, "run": _HOOK.format(pid=pid)}]
        },
    }


def task_text(document: Mapping[str, Any]) -> str:
    """Return a task as YAML."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=1000)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as literal blocks."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)
