"""Wrong input: exit code 2, one line with the hint, and nothing written."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import job, write_job, write_text


def tree(folder: Path) -> dict[str, tuple[int, bytes | None]]:
    """Everything in a folder: when it was changed, and what it holds."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns,
            path.read_bytes() if path.is_file() else None,
        )
        for path in sorted([folder, *folder.rglob("*")])
    }


def refused(command: Any, folder: Path, words: tuple[object, ...], wanted: list[str]) -> None:
    before = tree(folder)
    ended = command(*words)
    assert [fragment for fragment in wanted if fragment not in ended.err] == []
    assert ended.code == 2, ended.err
    assert ended.err.startswith("orchestrator: ")
    assert ended.err.count("\n") == 1, ended.err
    assert ended.out == ""
    assert tree(folder) == before


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job that would run, and files that would not do."""
    document = job(write_text(tmp_path, 20_000))
    write_job(tmp_path, document)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "book.pdf").write_text("%PDF")
    (tmp_path / "noise").write_bytes(bytes(range(128, 256)) * 9)
    (tmp_path / "lines.jsonl").write_text('{"body": "some text of a line that is long enough"}')
    (tmp_path / "file").write_text("")
    (tmp_path / "list.yaml").write_text("- a\n")
    (tmp_path / "broken.yaml").write_text("name: [a\nseed: 1\n")
    write_job(tmp_path, {**document, "stepz": 5}, "key.yaml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


SOURCE = "data.sources=[{uri: %s}]"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["key.yaml"], ["key.yaml: stepz: unknown key", "known keys: name"]),
        (["nowhere.yaml"], ["nowhere.yaml: there is no such job file", "orchestrator init"]),
        (["list.yaml"], ["list.yaml: must be a mapping"]),
        (["broken.yaml"], ["broken.yaml:2: is not YAML"]),
        (["."], [".: cannot be read"]),
        (["job.yaml", "--set", "train.steps"], ["--set train.steps: is not of the form a.b=c"]),
        (["job.yaml", "--set", "train.stepz=5"], ["train.stepz: unknown key", "did you mean 'steps'?"]),
        (["job.yaml", "--set", "train.steps={"], ["--set train.steps={: the value is not YAML"]),
        (["job.yaml", "--until", "13"], ["--until: step 13 is beyond train.steps 12"]),
        (["job.yaml", "--fault", "melt@1:2"], ["--fault melt@1:2: write KIND@RANK:STEP"]),
        (["job.yaml", "--set", "parallel.tp=3"], ["tp 3 does not divide the model's 4 attention heads", "1, 2, 4"]),
        (["job.yaml", "--set", "parallel.pp=5"], ["pp 5 makes 5 stages"]),
        (["job.yaml", "--set", SOURCE % "nowhere.txt"], ["nowhere.txt: there is no such file"]),
        (["job.yaml", "--set", SOURCE % "'*.csv'"], ["*.csv: there is no such file"]),
        (["job.yaml", "--set", SOURCE % "."], ["is a folder of rows", "and of texts", "name its files"]),
        (["job.yaml", "--set", SOURCE % "book.pdf"], ["book.pdf holds no text that can be read"]),
        (["job.yaml", "--set", SOURCE % "noise"], ["noise: line 1, at byte", "is not UTF-8", "or set data.on_error"]),
        (["job.yaml", "--set", SOURCE % "lines.jsonl"], ["line 1, at byte 0: has no text 'text'"]),
        (["job.yaml", "--set", SOURCE % "nosuch://a/b.txt"], ["nosuch://a/b.txt: cannot be listed"]),
        (["job.yaml", "--set", SOURCE % "empty.txt"], ["data.sources: all files are empty; give files with text"]),
        (["job.yaml", "--set", SOURCE % "short.txt"], ["has 9 bytes, fewer than one sequence of 32 tokens"]),
        (["job.yaml", "--set", "data.sequence_length=1000000"], ["fewer than one sequence of 1000000 tokens"]),
        (["job.yaml", "--set", "data.sequence_length=1024"], ["sequence_length 1024 exceeds", "changes.max_positions"]),
        (["job.yaml", "--set", "data.tokenizer=nowhere.json"], ["there is no tokenizer.json", "or train_bpe: N"]),
        (["job.yaml", "--set", "data.tokenizer=key.yaml"], ["key.yaml: there is no tokenizer.json"]),
        (["job.yaml", "--set", "data.tokenizer=org/gpt2"], ["`hf download org/gpt2 --local-dir org/gpt2`"]),
        (["job.yaml", "--set", "workload.model=hf:gpt2"], ["the Hub; `hf download gpt2 --local-dir gpt2`"]),
        (["job.yaml", "--set", "workload.model=gpt-tinny"], ["unknown model 'gpt-tinny'", "gpt-tiny"]),
        (["job.yaml", "--set", "workload.model=hf:nowhere"], ["nowhere", "config.json"]),
        (["job.yaml", "--set", "workload.changes.hiden=32"], ["unknown model field 'hiden'", "hidden"]),
        (["job.yaml", "--set", "workload.changes.hidden=33"], ["hidden 33 is not a multiple of heads 4"]),
        (["job.yaml", "--set", "workload.mup={layers: 1}"], ["workload: mup.layers is not a width"]),
        (["job.yaml", "--set", "workload.objective=casual_lm"], ["no objective 'casual_lm'", "causal_lm"]),
        (
            ["job.yaml", "--set", "workload.objective=casual_lm", "--set", "data.tokenizer=nowhere.json"],
            ["no objective 'casual_lm'"],
        ),
        (["job.yaml", "--set", "evaluate.tasks=[a.yaml]"], ["evaluate.tasks", "a.yaml: there is no such task file"]),
        (["job.yaml", "--set", "workload.objective=masked_lm"], ["masked_lm does not train gpt-tiny", "causal_lm"]),
        (["job.yaml", "--set", "workload.options.rate=1"], ["causal_lm has no option rate"]),
        (
            ["job.yaml", "--set", "workload={model: t5-tiny, objective: span_corruption}", "--set",
             "data.tokenizer.train_bpe=300"],
            ["300 entries do not hold the 256 bytes", "make it at least"],
        ),
        (["job.yaml", "--run-dir", "file"], ["file: the run directory cannot be written", "--run-dir"]),
        (["job.yaml", "--run-dir", "file/runs/a"], ["the run directory cannot be written", "--run-dir"]),
        (["job.yaml", "--run-dir", "memory://a/b"], ["--run-dir: memory://a/b is the memory of one process", "s3://"]),
        (["job.yaml", "--set", "data.cache=memory://a"], ["data.cache: memory://a is the memory of one process"]),
        (["job.yaml", "--set", "checkpoint.export=hf", "--set", "checkpoint.export_to=memory://a"],
         ["checkpoint.export_to: memory://a is the memory"]),
        (["job.yaml", "--set", SOURCE % "memory://a/b.txt"], ["data.sources.0.uri: memory://a/b.txt is the memory"]),
        (["job.yaml", "--run-dir", "nosuch://a/b"], ["'nosuch://a/b' is not a path or URI (Protocol not known"]),
    ],
)  # fmt: skip
def test_a_job_that_cannot_run(command: Any, folder: Path, words: list[str], wanted: list[str]) -> None:
    refused(command, folder, ("run", *words), wanted)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["nowhere.yaml"], ["nowhere.yaml: there is no such job file"]),
        (["job.yaml", "--set", "parallel.tp=3"], ["tp 3 does not divide the model's 4 attention heads"]),
        (["job.yaml", "--set", "data.tokenizer=org/gpt2"], ["`hf download org/gpt2 --local-dir org/gpt2`"]),
        (
            ["job.yaml", "--set", "workload.model=hf:gpt2"],
            ["the Hub; `hf download gpt2 --local-dir gpt2`"],
        ),
        (["job.yaml", "--set", "workload.model=gpt-tinny"], ["unknown model 'gpt-tinny'"]),
        (["job.yaml", "--set", "workload.changes={hidden: 65536, layers: 2000}"], ["GiB per rank"]),
    ],
)
def test_a_job_that_cannot_be_planned(
    command: Any, folder: Path, words: list[str], wanted: list[str]
) -> None:
    refused(command, folder, ("plan", *words), wanted)


@pytest.mark.parametrize(
    "words",
    [
        ["status"], ["stop"], ["verify-resume"], ["report"], ["checkpoint", "list"],
        ["checkpoint", "verify"], ["checkpoint", "export"], ["checkpoint", "prune"],
    ],
    ids=" ".join,
)  # fmt: skip
@pytest.mark.parametrize("place", ["runs/nowhere", "./file", "file/a"])
def test_a_run_that_is_not_there(command: Any, folder: Path, words: list[str], place: str) -> None:
    wanted = [f"{folder / place}: there is no run here", "give a run directory"]
    refused(command, folder, (*words, place), wanted)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["init", "job.yaml"], ["job.yaml: there is a file already; give another name"]),
        (["init", "a.yaml", "--from-hf", "gpt2"], ["`hf download gpt2 --local-dir gpt2`"]),
        (
            ["init", "a.yaml", "--data", "nosuch://a/b.jsonl"],
            ["nosuch://a/b.jsonl: cannot be listed", "check the add"],
        ),
        (["init", "nowhere/job.yaml"], ["nowhere/job.yaml: cannot be written (No such file or directory)"]),
        (["data", "inspect", "nowhere"], ["nowhere: there is no prepared data"]),
        (["data", "inspect", "file/below"], ["file/below: there is no prepared data"]),
        (["chaos", "job.yaml", "--runs", "file"], ["file: runs of an earlier chaos are here"]),
        (["cluster", "down", "--name", "../../home"], ["'../../home' is not a name"]),
        (["cluster", "show", "--name", ".."], ["'..' is not a name"]),
        (
            ["run", "job.yaml", "--run-dir", "."],
            [": is not a run directory: it holds ", "one that is new or empty"],
        ),
        (["data", "prepare", "nowhere.yaml"], ["there is no such job file"]),
        (["data", "inspect", "nowhere.yaml"], ["nowhere.yaml: there is no such job file"]),
        (["evaluate", "nowhere"], ["nowhere and ", "runs/nowhere: there is no run here"]),
    ],
)
def test_other_commands(command: Any, folder: Path, words: list[str], wanted: list[str]) -> None:
    refused(command, folder, tuple(words), wanted)


# -- with runs that are there


@pytest.fixture
def here(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of runs, which nobody may change."""
    monkeypatch.chdir(runs)
    return runs


@pytest.mark.parametrize("name", ["small", "half"])
def test_the_run_directory_of_another_run(command: Any, here: Path, name: str) -> None:
    words = ("run", "job.yaml", "--run-dir", f"runs/{name}", "--set")
    wanted = [f"{here}/runs/{name}: ", "a run stays the same run", "--run-dir"]
    refused(command, here, (*words, "seed=5"), [*wanted, "seed is 3 in this run and 5 in the job file"])
    refused(command, here, (*words, "train.optimizer.lr=1"), [*wanted, "train.optimizer.lr is 0.003"])
    stretched = ["train.steps is 12 in this run and 24", "schedule cosine", "wsd can be extended"]
    refused(command, here, (*words, "train.steps=24"), stretched)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (
            ["verify-resume", "runs/small", "--step", "12"],
            ["no commit at step 12 with steps after it", "4, 8"],
        ),
        (
            ["verify-resume", "runs/small", "--step", "5"],
            ["there is no commit at step 5", "choose from: 4, 8"],
        ),
        (
            ["checkpoint", "verify", "runs/small", "--step", "5"],
            ["step 5: there is no such commit", "[4, 8, 12]"],
        ),
        (
            ["checkpoint", "export", "runs/small", "--step", "5"],
            ["step 5: there is no such commit", "[4, 8, 12]"],
        ),
        (["evaluate", "runs/small"], ["--on: the run has no held-out text; name some"]),
        (["evaluate", "runs/small", "--on", "wiki"], ["--on wiki: is not NAME=FILES; write it as in"]),
        (["evaluate", "runs/small", "--on", "a.b=c.txt"], ["a.b"]),
        (
            ["evaluate", "runs/small", "--tasks", "arc_easy"],
            ["arc_easy: there is no such task file", "a hub"],
        ),
        (["evaluate", "runs/small/checkpoints/step-00000005"], ["step 5: there is no such commit"]),
        (
            ["evaluate", "runs/small/checkpoints/step-00000008", "--step", "4"],
            ["--step 4: step-00000008 is the checkpoint of another step"],
        ),
        (["evaluate", "runs/small", "--set", "seed=9"], ["--set: a run is evaluated by its own job file"]),
        (["generate", "runs/small", "x", "--step", "5"], ["step 5: there is no such commit"]),
    ],
)
def test_a_commit_that_is_not_there(command: Any, here: Path, words: list[str], wanted: list[str]) -> None:
    refused(command, here, tuple(words), wanted)


@pytest.mark.parametrize(
    "words", [["checkpoint", "verify"], ["checkpoint", "export"], ["verify-resume"]], ids=" ".join
)
def test_a_run_without_commits(command: Any, runs: Path, tmp_path: Path, words: list[str]) -> None:
    shutil.copytree(runs / "runs/small", tmp_path / "small", ignore=shutil.ignore_patterns("step-*"))
    refused(command, tmp_path, (*words, tmp_path / "small"), ["small/checkpoints"])


def test_a_job_of_a_run_that_was_damaged(command: Any, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({"name": "a"}))
    refused(command, tmp_path, ("status", tmp_path), ["job.yaml: workload: is missing"])
