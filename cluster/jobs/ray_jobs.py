"""Jobs on a cluster, by Ray's Jobs API: submit them, find them by name, follow them and stop them.

A job keeps its name over all its submissions, each of which has a number. The newest submission represents the job.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.local.address import ClusterAddress, NoCluster, WrongToken, check_reachable
from cluster.workers.environment import put_back
from cluster.workers.ray_internals import UPLOAD_LOGGERS, forget_token, uploaded
from cluster.workers.stop_signals import held_interruptions

READY_TIMEOUT = 60.0
"""Seconds to wait until a new cluster accepts a job, because its agents start after its Jobs API."""
ANSWER_TIMEOUT = 5.0
"""Seconds to wait for an answer of the Jobs API."""
POLL_INTERVAL = 0.5
"""Seconds between two polls of a job."""
STOP_GRACE = 600
"""Seconds that Ray gives a job after SIGTERM, for a last commit, before it kills it."""
API = "RAY_API_SERVER_ADDRESS"
"""Ray's variable for the URL of a Jobs API."""
PENDING = "pending"
RUNNING = "running"
"""States of a submission that has not ended."""
NAME = "orchestrator.name"
RUN_DIR = "orchestrator.run_dir"
PRIORITY = "orchestrator.priority"
"""Keys of a submission's metadata."""
EXCLUDED = (
    ".git", ".venv", "/venv", "__pycache__", "*.pyc", "*.egg-info", ".pytest_cache", ".mypy_cache", ".ruff_cache",
    "/runs", "/mlruns", "/mlflow.db", "*.safetensors",
)  # fmt: skip
"""Files of a working tree that are never uploaded, in addition to those in .gitignore and .rayignore. A leading slash
means the top of the tree only, because a user's package deeper down may have such a name."""
CHATTY = ("ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk", *UPLOAD_LOGGERS)
"""Ray's loggers that report every upload."""


@dataclass(frozen=True)
class Submission:
    """One submission of a job."""

    id: str
    name: str
    """The name of the job."""
    run_dir: str
    priority: int
    state: str
    """Pending, running or how it ended: done, failed, stopped, or the meaning of its exit code."""
    entrypoint: str
    """Its command."""
    started: float | None
    """When it started, unix seconds."""
    ended: float | None
    """When it ended, unix seconds."""
    exit_code: int | None
    """The exit code of its command, None while it runs."""
    message: str

    @property
    def has_ended(self) -> bool:
        """Whether its command has ended."""
        return self.state not in (PENDING, RUNNING)

    def came_after(self, written: float | None) -> bool:
        """Whether it was submitted after something was `written`, in unix seconds. True of a job that has not started.

        The times can be compared, because controllers run on the cluster's head, whose clock also dates submissions.
        """
        return self.started is None or (written or 0.0) < self.started

    def to_json(self) -> dict[str, Any]:
        """Return what `list --json` prints."""
        return {key: value for key, value in vars(self).items() if key != "entrypoint"}


class Jobs:
    """The Jobs API of a cluster. Methods raise NoCluster if it does not answer or refuses the token.

    A cluster without token authentication is refused, because it would run anyone's code, unless RAY_AUTH_MODE is
    "disabled".
    """

    def __init__(self, address: ClusterAddress, exit_states: Mapping[int, str]) -> None:
        """Connect to a cluster.

        Args:
            address: the cluster.
            exit_states: the state that each exit code of a job's command means; other codes mean "failed".
        """
        self._exit_states = exit_states
        try:
            import ray.dashboard.utils
            from ray.job_submission import JobSubmissionClient

            forget_token()
            if not address.api:
                check_reachable(address.ray)
            url = address.api or ray.dashboard.utils.ray_address_to_api_server_url(address.ray)
            if _is_open(url) and not _accepts_open():
                hint = "RAY_AUTH_MODE=disabled accepts that"
                raise NoCluster(f"{url} asks for no token, so anyone may run code there; {hint}")
            for name in CHATTY:
                logging.getLogger(name).setLevel(logging.ERROR)
            with put_back([API]):
                os.environ[API] = url  # Ray prefers this variable to its argument
                self._client = JobSubmissionClient(url, headers=_own_token(address))
        except NoCluster:
            raise
        except Exception as error:  # Ray raises errors of its own, of gRPC and of requests
            raise _no_cluster(address.given, error) from None

    def all(self) -> list[Submission]:
        """Return all submissions by this program, the oldest first."""
        submissions = [
            self._submission(job) for job in self._client.list_jobs() if NAME in (job.metadata or {})
        ]
        return sorted(submissions, key=lambda job: (job.started or float("inf"), job.id))

    def find(self, name: str) -> Submission | None:
        """Return the newest submission of a job by its name or run directory, or a submission by its id; else None."""
        every = self.all()
        matches = [job for job in every if name in (job.name, job.run_dir)]
        # Names come first, because an id may also be another job's name.
        matches = matches or [job for job in every if name == job.id]
        return matches[-1] if matches else None

    def get(self, submission: str) -> Submission:
        """Return one submission in its present state."""
        return self._submission(self._client.get_job_info(submission))

    def submit(
        self, name: str, run_dir: str, entrypoint: str, runtime_env: dict[str, Any], priority: int = 0
    ) -> str:
        """Submit a job under its next number, and return the submission's id.

        After an interruption `find` says whether the job is submitted.

        Args:
            name: the name of the job.
            run_dir: its run directory.
            entrypoint: its command.
            runtime_env: Ray's runtime environment.
            priority: its priority in the queue; higher ones run first.

        Raises:
            NoCluster: the cluster accepts no jobs.
        """
        variables = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_GRACE)}
        if _accepts_open():
            variables["RAY_AUTH_MODE"] = "disabled"
        metadata = {NAME: name, RUN_DIR: run_dir, PRIORITY: str(priority)}
        deadline = time.monotonic() + READY_TIMEOUT
        while True:
            number = 1 + max((int(j.id.rsplit("-", 1)[1]) for j in self.all() if j.name == name), default=0)
            try:
                environment = uploaded(self._client, {**runtime_env, "env_vars": variables})
                with held_interruptions():  # the cluster would complete an interrupted request
                    return self._client.submit_job(
                        entrypoint=entrypoint,
                        submission_id=f"{name}-{number}",
                        runtime_env=environment,
                        metadata=dict(metadata),
                    )
            except RuntimeError as error:  # no agent yet, or another command took the number
                if time.monotonic() > deadline:
                    raise NoCluster(f"the cluster takes no job: {_one_line(error)}") from None
                time.sleep(POLL_INTERVAL)

    def stop(self, submission: str) -> bool:
        """Ask a submission to commit and end, without waiting for that. Returns False if it has ended already.

        Repeats the request for a new job, because Ray lists a job before it can be stopped.
        """
        deadline = time.monotonic() + READY_TIMEOUT
        while not self._client.stop_job(submission):
            if self.get(submission).has_ended or time.monotonic() > deadline:
                return False
            time.sleep(POLL_INTERVAL)
        return True

    def logs(self, submission: str) -> str:
        """Return everything that the submission has printed."""
        return _printed(self.get(submission), str(self._client.get_job_logs(submission)))

    def follow(self, submission: str) -> Iterator[str]:
        """Yield the submission's output from its first line, until the submission ends."""
        printed = 0
        while True:
            job = self.get(submission)
            if job.state == PENDING:
                time.sleep(POLL_INTERVAL)
                continue
            text = str(self._client.get_job_logs(submission)) if printed == 0 or job.has_ended else ""
            part = text[printed:]
            yield _printed(job, part)
            printed += len(part)
            if job.has_ended:
                return
            for part in _tail(self._client, submission, printed):
                printed += len(part)
                yield part
            time.sleep(POLL_INTERVAL)

    def wait(self, submission: str, timeout: float) -> Submission:
        """Wait up to `timeout` seconds until the submission has ended. Return its last state."""
        deadline = time.monotonic() + timeout
        while not (result := self.get(submission)).has_ended and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL)
        return result

    def _submission(self, job: Any) -> Submission:
        """Convert Ray's description of a job."""
        metadata = job.metadata or {}
        by_ray = {"PENDING": PENDING, "RUNNING": RUNNING, "SUCCEEDED": "done", "STOPPED": "stopped"}
        return Submission(
            id=job.submission_id,
            name=metadata.get(NAME, ""),
            run_dir=metadata.get(RUN_DIR, ""),
            priority=int(metadata.get(PRIORITY, "0")),
            state=by_ray.get(str(job.status)) or self._exit_states.get(job.driver_exit_code, "failed"),
            entrypoint=job.entrypoint,
            started=job.start_time / 1000 if job.start_time else None,
            ended=job.end_time / 1000 if job.end_time else None,
            exit_code=job.driver_exit_code,
            message=_one_line(job.message or ""),
        )


def working_tree(folder: Path, exclude: Sequence[str] = ()) -> dict[str, Any]:
    """Return a Ray runtime environment with this folder as its working directory, without EXCLUDED and `exclude`."""
    return {"working_dir": str(folder), "excludes": [*EXCLUDED, *exclude]}


def own_packages(packages: Sequence[str]) -> dict[str, Any]:
    """Return a Ray runtime environment with these packages of this program."""
    root = Path(__file__).parents[2]
    return {"py_modules": [str(root / name) for name in packages], "excludes": list(EXCLUDED)}


def _printed(job: Submission, text: str) -> str:
    """The text of a job's log without its command, which Ray writes first and which contains the job file."""
    return text.replace(f"Running entrypoint for job {job.id}: {job.entrypoint}\n", "", 1)


def _tail(client: Any, submission: str, printed: int) -> Iterator[str]:
    """Yield what a submission prints after its first `printed` characters, until it or the connection ends."""
    import aiohttp

    parts = client.tail_job_logs(submission)

    async def next_part() -> str:
        return str(await anext(parts))

    received = 0
    try:
        with asyncio.Runner() as runner:  # it also ends pending requests when this generator is closed
            while True:
                part = runner.run(next_part())
                received += len(part)
                if received > printed:  # Ray sends the whole log again
                    yield part[max(len(part) - (received - printed), 0) :]
    except (StopAsyncIteration, RuntimeError, OSError, aiohttp.ClientError):
        return


def _own_token(address: ClusterAddress) -> dict[str, str]:
    """The header with a cluster's own token. Ray itself would use this process's environment."""
    if not address.token_path:
        return {}
    return {"Authorization": f"Bearer {Path(address.token_path).read_text().strip()}"}


def _is_open(url: str) -> bool:
    """Whether the Jobs API answers a request without a token. Raises NoCluster if it does not answer at all."""
    try:
        urllib.request.urlopen(f"{url}/api/jobs/", timeout=ANSWER_TIMEOUT).close()
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            return False
        raise NoCluster(f"{url} answers, but not as a Ray cluster does ({error.code})") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise NoCluster(f"nobody answers at {url} ({getattr(reason, 'strerror', None) or reason})") from None
    return True


def _accepts_open() -> bool:
    """Whether the user has turned token authentication off by Ray's variable."""
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "disabled"


def _no_cluster(address: str, error: Exception) -> NoCluster:
    text = _one_line(error)
    if "uthenticat" in text or "oken" in text or "nauthorized" in text:
        return WrongToken(f"the cluster at {address} refuses this token")
    return NoCluster(f"no Ray cluster answers at {address}: {text}")


def _one_line(text: object) -> str:
    """At most 300 characters of a text. A longer one keeps mostly its end, where a trace names the error."""
    line = " ".join(str(text).split())
    return line if len(line) <= 300 else f"{line[:60]} ... {line[-235:]}"
