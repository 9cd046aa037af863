"""checkpoint list, verify, prune."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jobs import curve, rows
from scripted import drive

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.manifest import parse_manifest
from orchestrator.checkpoint.pins import hold
from orchestrator.config.spec import load
from orchestrator.export import hugging_face
from orchestrator.launch import rollback
from orchestrator.storage.process_identity import lineage
from orchestrator.storage.row_line import encode
from orchestrator.storage.run_directory import RunDir


@pytest.fixture
def run(runs: Path, tmp_path: Path) -> Path:
    """A finished run with commits at steps 4, 8 and 12, to do with as one likes."""
    return Path(shutil.copytree(runs / "runs" / "small", tmp_path / "small"))


def flip(run: Path, step: int, pattern: str) -> None:
    """Change one bit of a commit's file."""
    (path,) = (run / "checkpoints" / f"step-{step:08d}").glob(pattern)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_commits_are_listed(command: Any, run: Path) -> None:
    said = command("checkpoint", "list", run, "--json")
    assert (said.code, said.err) == (0, "")
    found = json.loads(said.out)
    assert [(row["step"], row["position"], row["state"]) for row in found] == [
        (4, 32, "committed"), (8, 64, "committed"), (12, 96, "committed"),
    ]  # fmt: skip
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["receipt"] for row in found] == [rows[3]["samples"], rows[7]["samples"], rows[11]["samples"]]
    assert all(row["layout"] == "dp2" for row in found)
    shown = command("checkpoint", "list", run)
    assert shown.code == 0
    assert "committed" in shown.out


def test_who_holds_a_commit_is_listed(command: Any, run: Path) -> None:
    hold(Store(str(run / "checkpoints")), 8, "the run adapter")
    said = command("checkpoint", "list", run, "--json")
    assert [row["state"] for row in json.loads(said.out)] == [
        "committed", "committed; held by the run adapter", "committed",
    ]  # fmt: skip


def test_a_damaged_manifest_is_listed_as_such(command: Any, run: Path) -> None:
    flip(run, 8, "manifest.json")
    said = command("checkpoint", "list", run, "--json")
    assert said.code == 0
    assert [row["state"][:7] for row in json.loads(said.out)] == ["committ", "damaged", "committ"]


def test_sound_commits_are_verified(command: Any, run: Path) -> None:
    said = command("checkpoint", "verify", run)
    assert (said.code, said.out) == (0, "step 4: sound\nstep 8: sound\nstep 12: sound\n")
    assert command("checkpoint", "verify", run, "--step", 8).out == "step 8: sound\n"
    assert json.loads(command("checkpoint", "verify", run, "--json").out) == {"4": [], "8": [], "12": []}


@pytest.mark.parametrize("pattern", ["*.safetensors", "manifest.json"])
def test_a_flipped_bit_is_found(command: Any, run: Path, pattern: str) -> None:
    flip(run, 8, pattern)
    said = command("checkpoint", "verify", run)
    assert said.code == 1
    lines = said.out.splitlines()
    assert (lines[0], lines[2]) == ("step 4: sound", "step 12: sound")
    assert lines[1].startswith("step 8: ")
    assert "damaged" in lines[1]
    assert command("checkpoint", "verify", run, "--step", 4).code == 0
    listed = json.loads(command("checkpoint", "verify", run, "--json").out)
    assert [bool(problems) for problems in listed.values()] == [False, True, False]


def test_a_missing_shard_is_found(command: Any, run: Path) -> None:
    (path,) = (run / "checkpoints" / "step-00000012").glob("*.safetensors")
    path.unlink()
    said = command("checkpoint", "verify", run, "--step", 12)
    assert (said.code, said.out) == (1, f"step 12: {path.name} is missing\n")


def at_work(
    run: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, steps: tuple[int, ...]
) -> None:
    """A run that removes the commits of these steps as soon as the function reads them; its second argument is the
    step."""
    read = getattr(owner, name)

    def late(store: Any, step: int, *more: Any, **options: Any) -> Any:
        if step in steps:
            shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
        return read(store, step, *more, **options)

    monkeypatch.setattr(owner, name, late)


def test_what_a_run_at_work_removes_is_not_verified(
    command: Any, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_work(run, monkeypatch, Store, "verify", (4,))
    said = command("checkpoint", "verify", run)
    assert (said.code, said.out) == (0, "step 8: sound\nstep 12: sound\n")


def test_a_named_commit_that_a_run_at_work_removes_is_told(
    command: Any, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_work(run, monkeypatch, Store, "verify", (4,))
    said = command("checkpoint", "verify", run, "--step", 4)
    assert (said.code, said.out) == (2, "")
    assert said.err.count("\n") == 1
    assert (
        "a running job removed the checkpoint at step 4 while it was read; let the run keep more by checkpoint.keep"
        in said.err
    )


def test_the_newest_is_exported_again_if_a_run_at_work_removes_it(
    command: Any, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(uri: str, step: int, target: str, **_: Any) -> dict[str, Any]:
        return {"step": Store(f"{uri}/checkpoints").manifest(step).step, "logits_difference": None}

    monkeypatch.setattr(hugging_face, "export", export)
    at_work(run, monkeypatch, hugging_face, "export", (12,))
    said = command("checkpoint", "export", run, "--to", run / "model")
    assert (said.code, said.out) == (0, f"{run}/model: step 8\n")


def test_pruning_keeps_the_newest_whose_every_byte_is_right(command: Any, run: Path) -> None:
    flip(run, 12, "*.safetensors")
    assert command("checkpoint", "prune", run).out == "removed steps 4\n"
    assert command("checkpoint", "verify", run, "--step", 8).code == 0
    flip(run, 8, "*.safetensors")
    said = command("checkpoint", "prune", run)
    assert said.code == 2
    assert "no checkpoint is whole, so nothing is removed" in said.err
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*")) == [
        "step-00000008",
        "step-00000012",
    ]


def test_the_data_of_a_run_that_was_moved_is_verified_where_it_is(
    command: Any, runs: Path, tmp_path: Path
) -> None:
    there = Path(shutil.copytree(runs / "runs", tmp_path / "elsewhere"))
    (shard, *_) = sorted(there.glob("_data/*/shards/*.bin"))
    shard.write_bytes(bytes(shard.stat().st_size))
    assert command("checkpoint", "verify", runs / "runs" / "small").code == 0
    for path in (runs / "runs" / "_data").iterdir():
        path.rename(path.with_name(path.name + "-away"))
    try:
        said = command("checkpoint", "verify", there / "small")
    finally:
        for path in (runs / "runs" / "_data").iterdir():
            path.rename(path.with_name(path.name.removesuffix("-away")))
    assert said.code == 1
    assert f"data {there}" in said.out


def test_a_damaged_commit_is_not_exported(command: Any, run: Path) -> None:
    flip(run, 12, "manifest.json")
    said = command("checkpoint", "export", run, "--step", 12)
    assert said.code == 1
    assert said.err.count("\n") == 1
    assert "step-00000012: the manifest is damaged" in said.err
    assert not (run / "export").exists()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--names", "olmo"), "--names: olmo is for --form dcp"),
        (("--form", "gguf", "--names", "torchtitan"), "--names: torchtitan is for --form dcp"),
        (("--form", "dcp", "--numbers", "q8_0"), "--numbers: q8_0 is for --form gguf"),
    ],
)
def test_options_of_another_form_are_refused(
    command: Any, run: Path, options: tuple[str, ...], what: str
) -> None:
    said = command("checkpoint", "export", run, *options)
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert what in said.err
    assert not (run / "export").exists()


@pytest.mark.parametrize("form", ["gguf", "onnx"])
def test_a_form_whose_package_is_not_there_says_which(
    command: Any, run: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.export.converted.find_spec", lambda name: None)
    said = command("checkpoint", "export", run, "--form", form)
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert f"pip install -e '.[{form}]' in the checkout" in said.err


def test_pruning_keeps_what_the_job_wants_kept(command: Any, run: Path) -> None:
    text = (run / "job.yaml").read_text()
    (run / "job.yaml").write_text(text.replace("keep_every: null", "keep_every: 8"))
    assert command("checkpoint", "prune", run).out == "removed steps 4\n"
    (run / "job.yaml").write_text(text.replace("keep_best: false", "keep_best: true"))
    for step, loss in ((8, 1.0), (12, 2.0)):
        path = run / f"checkpoints/step-{step:08d}/manifest.json"
        manifest = parse_manifest(path.read_bytes(), "")
        path.write_bytes(replace(manifest, meta=manifest.meta | {"loss": loss}).to_bytes())
    assert command("checkpoint", "prune", run).out == "removed steps none\n"
    (run / "job.yaml").write_text(text)
    assert command("checkpoint", "prune", run).out == "removed steps 8\n"


def test_pruning_keeps_the_newest(command: Any, run: Path) -> None:
    said = command("checkpoint", "prune", run, "--keep", 2)
    assert (said.code, said.out) == (0, "removed steps 4\n")
    assert command("checkpoint", "prune", run, "--keep", 2).out == "removed steps none\n"
    assert command("checkpoint", "prune", run).out == "removed steps 8\n"
    assert [row["step"] for row in json.loads(command("checkpoint", "list", run, "--json").out)] == [12]


def test_a_run_goes_back_on_record_and_trains_on_as_before(command: Any, run: Path) -> None:
    spec, before = load(run / "job.yaml"), curve(run)
    said = command("checkpoint", "rollback", run, "--step", "4", "--json")
    assert (said.code, said.err) == (0, "")
    told = {"run_dir": str(run), "before": 12, "step": 4, "removed": [8, 12], "lost_steps": 8}
    assert json.loads(said.out) == told
    assert Store(str(run / "checkpoints")).steps() == [4]
    assert [row["step"] for row in rows(run)] == [1, 2, 3, 4]
    event = rows(run, "events.jsonl")[-1]
    assert event["reason"] == "rolled back from step 12 to the commit at step 4 by the user"
    assert (event["phase"], event["step"], event["lost_steps"]) == ("stopped", 4, 8)
    assert event["rolled_back"]["removed"] == [8, 12]
    shown = json.loads(command("status", run, "--json").out)
    assert (shown["state"], shown["step"], shown["controller"]) == ("stopped", 4, "ended")
    assert shown["note"].endswith("; the same command continues from there")

    summary = drive(spec, str(run))
    assert (summary["state"], summary["step"], summary["commit"]) == ("done", 12, 12)
    assert curve(run) == before
    assert Store(str(run / "checkpoints")).steps() == [4, 8, 12]
    assert summary["ledger"]["lost_steps"] == 8
    assert summary["ledger"]["stopped_seconds"] > 0
    # No rank of the attempt before may commit any more.
    assert [e["attempt"] for e in rows(run, "events.jsonl") if e["phase"] == "start"] == [1, 3]


def test_a_rollback_says_what_it_did(command: Any, run: Path) -> None:
    said = command("checkpoint", "rollback", run, "--step", "8")
    assert (said.code, said.out) == (
        0,
        f"{run} is back at step 8, from step 12, and the commit of step 12 is removed; the same command continues from "
        "there\n",
    )


@pytest.mark.parametrize(
    ("step", "change", "says"),
    [
        ("5", lambda run: None, "there is no such commit; steps: [4, 8, 12]"),
        ("12", lambda run: None, "the run is at this step already"),
        ("4", lambda run: flip(run, 4, "*.safetensors"), "is damaged: "),
        (
            "4",
            lambda run: hold(Store(str(run / "checkpoints")), 12, "the run b"),
            "step 12 is held by the run b",
        ),
        ("4", lambda run: now_trains(run), "a controller drives this run; `orchestrator stop` ends it"),
    ],
)
def test_no_run_goes_back_where_it_cannot(
    command: Any, run: Path, step: str, change: Callable[[Path], Any], says: str
) -> None:
    change(run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    said = command("checkpoint", "rollback", run, "--step", step)
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert says in said.err
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert {path: text for path, text in after.items() if path.name != ".lock"} == before


def now_trains(run: Path) -> None:
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(
        json.dumps(status | {"phase": "train", "time": time.time(), "processes": lineage()})
    )


def test_a_rollback_that_was_interrupted_is_repeated(
    command: Any, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(store: Store, step: int) -> list[int]:
        real(store, 8)
        raise KeyboardInterrupt

    real = rollback.rewind
    monkeypatch.setattr(rollback, "rewind", killed)
    with pytest.raises(KeyboardInterrupt):
        rollback.roll_back(RunDir(str(run)), 4)
    monkeypatch.undo()
    assert Store(str(run / "checkpoints")).steps() == [4, 8]
    assert json.loads(command("checkpoint", "rollback", run, "--step", "4", "--json").out)["removed"] == [8]
    assert drive(load(run / "job.yaml"), str(run))["step"] == 12


def test_the_time_after_a_controller_was_killed_is_no_time_of_the_run(command: Any, run: Path) -> None:
    events = rows(run, "events.jsonl")
    end = next(i for i, event in enumerate(events) if event["phase"] == "train")
    (run / "events.jsonl").write_bytes(b"".join(map(encode, events[: end + 1])))
    status = json.loads((run / "status.json").read_text())
    ended = {**lineage()[0], "born": "1"}
    (run / "status.json").write_text(
        json.dumps(status | {"phase": "train", "time": events[end]["time"] + 0.001, "processes": [ended]})
    )
    assert command("checkpoint", "rollback", run, "--step", "8").code == 0
    last = rows(run, "events.jsonl")[-1]
    assert last["time"] == pytest.approx(events[end]["time"] + 0.001, abs=1e-6)
    assert last["rolled_back"]["at"] > last["time"]


def test_a_trial_of_a_search_does_not_go_back(command: Any, run: Path) -> None:
    (run.parent / "trials.jsonl").write_text("")
    said = command("checkpoint", "rollback", run, "--step", "4")
    assert said.code == 2
    assert (
        f"is a trial of the search in {run.parent}, which would go on as if it had not gone back" in said.err
    )
    assert f"train.continue_from: {{run: {run}@4}}" in said.err
