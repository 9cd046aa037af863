"""Submit a run as a job of a cluster, and find it again."""

from __future__ import annotations

import base64
import contextlib
import gzip
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from orchestrator.config.errors import Absent, InputError
from orchestrator.config.outcome import ENDED, Outcome
from orchestrator.config.packages import PACKAGES
from orchestrator.config.redact import hidden_at, redact
from orchestrator.storage.run_directory import RunDir

if TYPE_CHECKING:
    from cluster.jobs.ray_jobs import Jobs, Submission

END_OF_JOB = "END-OF-JOB"
"""The line that ends the job file within the submitted shell command."""
READABLE = 2**15
"""A job file with more characters is compressed. Shorter ones stay readable in the list of jobs."""
LONGEST = 2**17 - 1
"""The longest argument of a command on Linux, in bytes."""
PROGRAM = "orchestrator"
ENDING = 150.0
"""Seconds to wait for the job of a run that has ended. It may still wait for a tracking server."""


def jobs_at(address: str | None) -> Jobs:
    """Return the Jobs API at an address, by default the one that Ray's variables or the local cluster name.

    Raises InputError if no cluster is found.
    """
    from cluster.jobs.ray_jobs import Jobs
    from cluster.local.address import NoCluster, resolve_address

    try:
        return Jobs(resolve_address(address), {outcome.exit_code: outcome.value for outcome in Outcome})
    except NoCluster as error:
        raise no_cluster(error, address) from None


@contextlib.contextmanager
def on_cluster(address: str | None, cpus: float = 0.0, gpus: float = 0.0) -> Iterator[None]:
    """Connect this process to Ray for the length of the block, see `connected_ray`.

    Raises InputError if no cluster answers.
    """
    from cluster.local.ray_session import NoCluster, connected_ray

    try:
        with connected_ray(address, cpus, gpus, packages=PACKAGES):
            yield
    except NoCluster as error:
        raise no_cluster(error, address) from None


def no_cluster(error: Exception, address: str | None) -> InputError:
    """Return the error for a cluster that does not answer."""
    from cluster.local.address import Connected, NoAddress, WrongToken

    if isinstance(error, Connected):
        return InputError(str(error), "", "wait for it, call ray.shutdown(), or use another process")
    named = "another --address" if address else "--address"
    hint = f"give {named}, or start a cluster with `orchestrator cluster up --local 2`"
    if isinstance(error, WrongToken):
        hint = "set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH, to the cluster's token"
    kind = Absent if isinstance(error, NoAddress) else InputError
    return kind(str(error), f"--address {address}" if address else "", hint)


def sent_along(folder: Path, exclude: Sequence[str], where: str) -> dict[str, Any]:
    """Return a Ray runtime environment with this folder as its working directory.

    Ray puts the folder first on Python's path, so a file in it could hide this program or another module.

    Args:
        folder: the working directory.
        exclude: patterns of files to leave out.
        where: the option that names the folder, for messages.

    Raises:
        InputError: something in the folder would hide this program, a module of Python, or an installed package.
    """
    from cluster.jobs.ray_jobs import working_tree
    from cluster.workers.program import hidden_modules

    left_out = {pattern.strip("/") for pattern in exclude}
    for path in (folder / PROGRAM / "__init__.py", folder / f"{PROGRAM}.py"):
        name = path.relative_to(folder).parts[0]
        if (
            path.is_file()
            and not (folder / PROGRAM / "launch" / "submission.py").is_file()
            and name not in left_out
        ):
            hint = f"rename it, or leave it out by exclude {name}"
            raise InputError(f"{name} in it would be taken for this program there", f"{where} {folder}", hint)
    for name in hidden_modules(folder):
        if name not in left_out:
            problem = f"{name} in it would be taken for the module {Path(name).stem} of Python, or of a package, there"
            raise InputError(problem, f"{where} {folder}", f"rename it, or leave it out by exclude {name}")
    return working_tree(folder, exclude)


def entrypoint(name: str, document: Mapping[str, Any], run: RunDir, until: int | None, priority: int) -> str:
    """Return the shell command that drives the run on the cluster. It contains the job file.

    Args:
        name: the name of the job or the chain.
        document: its job file, as plain data.
        run: the run directory.
        until: a step to stop at, None for none.
        priority: the priority in the cluster's queue; higher ones run first.

    Raises:
        InputError: the job or the run directory's address carries a credential, which everyone who lists jobs could
            read; or the job is too long for a command.
    """
    hint = "take it out, and set it in the environment of the cluster's nodes"
    if where := hidden_at(document):
        if "notify" in where.split("."):
            hint = "write $NAME, and set that variable in the environment of the cluster's nodes"
        problem = (
            "the job carries a credential, or what looks like one, and a submitted job can be read by many"
        )
        raise InputError(problem, f"{name}: {where}", hint)
    if (shown := redact(run.uri)) != run.uri:
        raise InputError("carries a credential, but a submitted job can be read by many", shown, hint)
    words = ["python", "-P", "-m", "orchestrator", "run", "/dev/stdin"]
    words += ["--address", "auto", "--run-dir", run.uri]
    words += ["--until", str(until)] if until is not None else []
    words += ["--priority", str(priority)] if priority else []
    # YAML, not JSON: YAML would read JSON's 1e-06 as text.
    text = yaml.safe_dump(dict(document), sort_keys=False).rstrip("\n")
    end = f"'{END_OF_JOB}'"  # quoted, so that the shell expands nothing in the job
    if len(text) > READABLE:
        packed = base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
        text = f"$(echo {packed} | base64 -d | gzip -d)"
        end = END_OF_JOB  # unquoted, so that the shell unpacks the job
    # `exec`, so that the command itself gets the signal when the job is stopped.
    command = f"exec {shlex.join(words)} <<{end}\n{text}\n{END_OF_JOB}"
    if len(command.encode()) > LONGEST:
        problem = (
            f"is too long to be submitted: {len(command.encode()) // 1024} KB packed, of {LONGEST // 1024}"
        )
        raise InputError(problem, name, "name many files by one pattern, such as data/*.jsonl")
    return command


def submit(
    jobs: Jobs,
    name: str,
    command: str,
    run: RunDir,
    priority: int,
    runtime_env: dict[str, Any],
) -> tuple[Submission, bool]:
    """Submit a job, or find its submission if it is running already.

    A job whose run has ended gets time to end first.

    Args:
        jobs: the jobs of the cluster.
        name: the name of the job.
        command: the shell command that drives its run, see `entrypoint`.
        run: the run directory.
        priority: the priority in the cluster's queue; higher ones run first.
        runtime_env: Ray's runtime environment.

    Returns:
        The submission, and whether it is new.

    Raises:
        InputError: the job is running with another job file.
        KeyboardInterrupt: with a message, if the job was submitted before the interruption.
    """
    from cluster.local.address import NoCluster

    before = jobs.find(name)
    if before is not None and _is_ending(before, run):
        before = jobs.wait(before.id, ENDING)
    if before is not None and not before.has_ended:
        if before.entrypoint != command:
            hint = "stop it first, or submit under another name"
            raise InputError("this job is active with another job file or run directory", before.id, hint)
        return before, False
    try:
        return jobs.get(jobs.submit(name, run.uri, command, runtime_env, priority)), True
    except KeyboardInterrupt:
        submitted = jobs.find(name)
        if submitted is None or (before is not None and submitted.id == before.id):
            raise
        message = f"{submitted.id} is submitted; `orchestrator stop {submitted.name}` ends it"
        raise KeyboardInterrupt(message) from None
    except NoCluster as error:
        raise no_cluster(error, None) from None
    except (RuntimeError, ValueError) as error:
        raise InputError(
            " ".join(str(error).split())[:300], "the runtime environment", "see --exclude"
        ) from None


def _is_ending(job: Submission, run: RunDir) -> bool:
    """Whether the run of a job has ended, so that the job itself is about to end."""
    if job.has_ended or job.run_dir != run.uri:
        return False
    status = run.read_json_or_empty("status.json")
    return status.get("phase") in ENDED and not job.came_after(status.get("time"))


def existing(jobs: Jobs, name: str) -> Submission:
    """Return the newest submission of a job by its name, number or run directory.

    Raises:
        InputError: it does not exist. Absent, a subclass, if `name` cannot be the name of a job.
    """
    job = jobs.find(name) or jobs.find(str(Path(name).absolute()))
    if job is None:
        names = sorted({job.name for job in jobs.all()})
        hint = f"choose from: {', '.join(names)}" if names else "none has been submitted there"
        kind = Absent if "/" in name else InputError
        raise kind("there is no such job on the cluster", name, hint)
    return job
