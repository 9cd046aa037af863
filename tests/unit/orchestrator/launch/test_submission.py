"""What is submitted of a run."""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
from pathlib import Path
from typing import Any

import pytest
from jobs import job

from cluster.jobs.ray_jobs import Submission
from orchestrator.config.document import parse_yaml
from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.launch.submission import entrypoint, sent_along, submit
from orchestrator.storage.run_directory import RunDir

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("files", [0, 2500])
def test_the_shell_becomes_the_command_and_hands_it_the_job(tmp_path: Path, files: int) -> None:
    document = job("it's a $HOME of `quotes` 😀.txt")
    document["data"]["sources"] += [{"uri": f"/data/part-{number:05}.jsonl"} for number in range(files)]
    spec = parse({**document, "name": "small"})
    command = entrypoint(spec.name, spec.document(), RunDir(str(tmp_path / "a run")), 7, 3)
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" $$ "$@"\nfor file; do [ -e "$file" ] && cat "$file"; done\n')
    fake.chmod(0o755)
    shell = subprocess.Popen(
        command, shell=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, stdout=subprocess.PIPE, text=True
    )
    pid, *words = shell.communicate(timeout=20)[0].splitlines()
    assert int(pid) == shell.pid
    options = ["--address", "auto", "--run-dir", str(tmp_path / "a run"), "--until", "7", "--priority", "3"]
    said = ["-P", "-m", "orchestrator", "run", "/dev/stdin", *options]
    assert words[: len(said)] == said
    given = parse_yaml("\n".join(words[len(said) :]), "/dev/stdin")
    assert parse(given) == spec
    assert given["train"]["optimizer"]["eps"] == 1e-08  # which YAML would read as a text where JSON wrote it


def test_a_job_that_no_shell_can_be_given_is_refused() -> None:
    document = job("a.txt")
    document["data"]["sources"] += [
        {"uri": f"/{hashlib.sha256(bytes([n % 256, n // 256])).hexdigest()}"} for n in range(2500)
    ]
    with pytest.raises(
        InputError, match=r"small: is too long to be submitted: \d+ KB packed, of 127; name many files"
    ):
        entrypoint("small", parse(document).document(), RunDir("/runs/a"), None, 0)


def test_a_webhook_stays_out_of_a_submitted_job() -> None:
    spec = parse({**job("a.txt"), "name": "small", "notify": {"webhook": "https://hooks.example/T1/secret"}})
    with pytest.raises(InputError, match=r"small: notify\.webhook: .*write \$NAME, and set that variable"):
        entrypoint(spec.name, spec.document(), RunDir("/runs/a"), None, 0)
    named = parse({**job("a.txt"), "notify": {"webhook": "$HOOK"}})
    assert "webhook: $HOOK" in entrypoint(named.name, named.document(), RunDir("/runs/a"), None, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"tracking": {"uri": "https://me:hunter2@tracking.example"}},
        {"data": {"sources": [{"uri": "https://x.example/a.txt?X-Amz-Signature=hunter2"}]}},
        {"checkpoint": {"export": "hf", "export_to": "s3://AKIAABCDEFGHIJKLMNOP@bucket/x"}},
    ],
)
def test_a_credential_is_never_submitted(changes: dict[str, dict[str, object]]) -> None:
    document = job("a.txt")
    for key, value in changes.items():
        document[key] = {**(document[key] or {}), **value}
    with pytest.raises(InputError, match=r"small: .*the job carries a credential") as error:
        entrypoint("small", parse(document).document(), RunDir("/runs/small"), None, 0)
    assert "hunter2" not in str(error.value)
    assert "AKIA" not in str(error.value)


@pytest.mark.parametrize("file", ["orchestrator/__init__.py", "orchestrator.py"])
def test_what_would_be_taken_for_this_program_is_not_sent_along(file: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    name = file.partition("/")[0]
    with pytest.raises(InputError, match=f"{name} in it would be taken for this program there; rename it"):
        sent_along(tmp_path, [], "--working-dir")
    assert name in sent_along(tmp_path, [f"{name}"], "--working-dir")["excludes"]


@pytest.mark.parametrize("name", ["random.py", "torch.py"])
def test_what_would_be_taken_for_a_module_of_python_is_not_sent_along(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(InputError, match=f"{name} in it would be taken for the module .*exclude {name}"):
        sent_along(tmp_path, [], "--working-dir")
    assert name in sent_along(tmp_path, [name], "--working-dir")["excludes"]


def test_other_folders_and_this_program_itself_are_sent_along(tmp_path: Path) -> None:
    for name in ("cluster", "workloads", "orchestrator"):
        (tmp_path / name).mkdir()
    (tmp_path / "cluster" / "__init__.py").touch()
    (tmp_path / "orchestrator" / "notes.txt").touch()  # no package: this program's own comes before it
    assert sent_along(tmp_path, [], "--working-dir")["working_dir"] == str(tmp_path)
    assert sent_along(ROOT, [], "--working-dir")["working_dir"] == str(ROOT)


def test_a_credential_of_the_run_directory_is_none_of_others(tmp_path: Path) -> None:
    run = RunDir("memory://x?password=hunter2")
    with pytest.raises(InputError, match="carries a credential, but a submitted job can be read") as error:
        entrypoint("small", parse(job("a.txt")).document(), run, None, 0)
    assert "hunter2" not in str(error.value)


class OneJob:
    """A cluster with one job, which ends when it is waited for."""

    def __init__(self, command: str, run: RunDir) -> None:
        self.jobs = [Submission("small-1", "small", run.uri, 0, "running", command, 100.0, None, None, "")]

    def find(self, _: str) -> Submission:
        return self.jobs[-1]

    def get(self, number: str) -> Submission:
        return next(job for job in self.jobs if job.id == number)

    def wait(self, number: str, _: float) -> Submission:
        self.jobs = [dataclasses.replace(self.get(number), state="done")]
        return self.jobs[0]

    def submit(self, name: str, run_dir: str, command: str, *_: Any) -> str:
        self.jobs.append(Submission(f"{name}-2", name, run_dir, 0, "pending", command, 200.0, None, None, ""))
        return self.jobs[-1].id


@pytest.mark.parametrize(
    ("phase", "time", "number"),
    [("done", 160.0, "small-2"), ("train", 160.0, "small-1"), ("done", 60.0, "small-1")],
    ids=["has ended", "trains", "had ended before"],
)
def test_a_job_whose_run_has_ended_is_not_taken_for_one_at_work(
    tmp_path: Path, phase: str, time: float, number: str
) -> None:
    spec, run = parse({**job("a.txt"), "name": "small"}), RunDir(str(tmp_path))
    run.write_json("status.json", {"phase": phase, "time": time})
    jobs: Any = OneJob(entrypoint(spec.name, spec.document(), run, None, 0), run)
    found, new = submit(jobs, spec.name, entrypoint(spec.name, spec.document(), run, None, 0), run, 0, {})
    assert (found.id, new) == (number, number == "small-2")


def test_a_job_whose_run_has_ended_may_go_on_with_another_file(tmp_path: Path) -> None:
    spec, run = parse({**job("a.txt"), "name": "small"}), RunDir(str(tmp_path))
    longer = parse({**job("a.txt", steps=99), "name": "small"})
    jobs: Any = OneJob(entrypoint(spec.name, spec.document(), run, None, 0), run)
    command = entrypoint(longer.name, longer.document(), run, None, 0)
    with pytest.raises(InputError, match="active with another job file"):
        submit(jobs, longer.name, command, run, 0, {})
    run.write_json("status.json", {"phase": "done", "time": 160.0})
    assert submit(jobs, longer.name, command, run, 0, {})[0].id == "small-2"


def test_a_job_that_was_submitted_when_it_was_interrupted_is_named(tmp_path: Path) -> None:
    run, spec = RunDir(str(tmp_path / "small")), parse(job("a.txt"))
    jobs = OneJob("another", run)
    jobs.jobs = [dataclasses.replace(jobs.jobs[0], state="done")]
    with pytest.raises(KeyboardInterrupt) as nothing:
        submit(Interrupted(jobs, False), spec.name, "run", run, 0, {})  # type: ignore[arg-type]
    assert nothing.value.args == ()
    with pytest.raises(KeyboardInterrupt, match="small-2 is submitted; `orchestrator stop small` ends it"):
        submit(Interrupted(jobs, True), spec.name, "run", run, 0, {})  # type: ignore[arg-type]


class Interrupted:
    """A cluster that is interrupted before it has taken a job, or after."""

    def __init__(self, jobs: OneJob, taken: bool) -> None:
        self._jobs, self._taken = jobs, taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jobs, name)

    def submit(self, *given: Any) -> str:
        if self._taken:
            self._jobs.submit(*given)
        raise KeyboardInterrupt
