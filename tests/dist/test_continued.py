"""A run that goes on from another's commit is, with the same schedule, the run that was that long from the start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import curve, job, rows, weights, write_text
from local_chain import drive_chain_here
from local_run import LocalGang, drive_here

from orchestrator.checkpoint.commit_store import Store
from orchestrator.cli.data_samples import Wanted, describe, inputs_of
from orchestrator.config.errors import InputError
from orchestrator.config.outcome import Outcome
from orchestrator.config.spec import load
from orchestrator.controller import decide
from orchestrator.data.samples.receipt import add, roll
from orchestrator.data.store.tokens import Tokens
from orchestrator.resolve.training_inputs import training_inputs

FIRST, ALL = 6, 12


def document(text: str, name: str, steps: int, **train: Any) -> dict[str, Any]:
    found = job(text, steps=steps, optimizer={"lr": 3e-3, "warmup": 2, "schedule": "constant"})
    found["name"] = name
    found["checkpoint"] = {"every": 4, "keep": 2, "export": None}
    found["parallel"] = {"micro_batch": 2}
    found["train"] |= train
    return found


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"), 20_000)


@pytest.fixture(scope="module")
def runs(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of all steps, `whole`, and its first phase as a run, `first`."""
    found = tmp_path_factory.mktemp("runs")
    for name, steps in (("whole", ALL), ("first", FIRST)):
        drive_here(document(text, name, steps), str(found / name), Path(text).parent / "cache")
    return found


def test_two_phases_have_the_bits_of_one_run_though_the_second_is_killed(
    text: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decide, "SETTLE", 0.0)
    second = document(text, "second", ALL, continue_from=f"{runs}/first")
    summary = drive_here(
        second, str(tmp_path / "second"), Path(text).parent / "cache", gang=lambda: LocalGang([2]),
        faults=("kill@1:8", "kill@0:10/2"),
    )  # fmt: skip
    assert (summary["state"], summary["step"], summary["attempts"]) == ("done", ALL, 3)
    assert summary["receipt"] == rows(runs / "whole")[-1]["samples"]
    assert curve(tmp_path / "second") == curve(runs / "whole")[FIRST:]
    assert weights(tmp_path / "second", ALL) == weights(runs / "whole", ALL)
    first, last = (
        Store(str(place / "checkpoints")).latest() for place in (runs / "first", tmp_path / "second")
    )
    assert first is not None
    assert last is not None
    told = {"run": str(runs / "first"), "step": FIRST, "position": first.position, "receipt": first.receipt}
    assert last.meta["continued_from"] == told
    starts = [e["reason"] for e in rows(tmp_path / "second", "events.jsonl") if e["phase"] == "start"]
    assert starts[0] == f"2 workers in fp32 from the commit at step {FIRST} of {runs}/first"


def test_another_layout_batch_and_schedule_read_on_where_the_first_phase_ended(
    text: str, runs: Path, tmp_path: Path
) -> None:
    optimizer = {"lr": 1e-3, "schedule": "linear", "final_lr": 0.0, "warmup": 2}
    before = {"run": f"{runs}/first@last", "schedule": "restart"}
    train = {"continue_from": before, "global_batch": 4, "optimizer": optimizer}
    second = document(text, "second", ALL, **train) | {"parallel": {"tp": 2, "micro_batch": 2}}
    drive_here(second, str(tmp_path / "second"), Path(text).parent / "cache")
    found = rows(tmp_path / "second")
    assert found[-1]["samples"] == receipt_of(tmp_path / "second", first_of(runs).receipt, FIRST * 8)
    assert [round(row["lr"] * 1e3, 9) for row in found] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    last = Store(str(tmp_path / "second" / "checkpoints")).latest()
    assert last is not None
    assert last.position == FIRST * 8 + (ALL - FIRST) * 4
    assert [row["tokens"] // 32 for row in found] == list(range(FIRST * 8 + 4, last.position + 1, 4))
    told = inputs_of(str(tmp_path / "second"))
    assert told is not None
    shown = describe(*told, Wanted(FIRST * 8 - 1, None, 0, 6))["samples"]
    assert [sample["step"] for sample in shown] == [None, *[FIRST + 1] * 4, FIRST + 2]


@pytest.mark.slow
def test_under_another_layout_the_losses_are_those_of_one_run(text: str, runs: Path, tmp_path: Path) -> None:
    second = document(text, "second", ALL, continue_from=f"{runs}/first")
    second["parallel"] = {"pp": 2, "micro_batch": 2}
    drive_here(second, str(tmp_path / "second"), Path(text).parent / "cache")
    theirs = rows(runs / "whole")[FIRST:]
    for row, other in zip(rows(tmp_path / "second"), theirs, strict=True):
        assert (row["step"], row["samples"]) == (other["step"], other["samples"])
        assert row["loss"] == pytest.approx(other["loss"], abs=1e-5)


def test_other_data_are_read_from_their_beginning_and_the_receipt_covers_both(
    text: str, runs: Path, tmp_path: Path
) -> None:
    Path(tmp_path / "other.txt").write_text(Path(text).read_text()[5_000:15_000])
    before = {"run": str(runs / "first"), "position": "restart"}
    second = document(str(tmp_path / "other.txt"), "second", ALL, continue_from=before)
    second["data"] |= {"tokenizer": str(runs / "first" / "excerpt"), "sequence_length": 16}
    drive_here(second, str(tmp_path / "second"), tmp_path / "cache")
    assert rows(tmp_path / "second")[-1]["samples"] == receipt_of(
        tmp_path / "second", first_of(runs).receipt, 0
    )
    assert rows(tmp_path / "second")[0]["loss"] < rows(runs / "first")[0]["loss"] - 0.1

    # The same text again would be another turn of it; what is not asked for is not done.
    second["train"]["continue_from"] = str(runs / "first")
    with pytest.raises(InputError, match=r"data\.sequence_length is 32 in .*first@6 and 16 in the job file"):
        drive_here(second, str(tmp_path / "third"), tmp_path / "cache")
    assert not (tmp_path / "third" / "job.yaml").exists()


@pytest.mark.slow
def test_phases_may_be_stages_of_a_chain(
    text: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decide, "SETTLE", 0.0)
    second = {"name": "second", "train": {"steps": ALL, "continue_from": "stage:first"}}
    stages = [second, {"name": "first", "train": {"steps": FIRST}}]
    chain = document(text, "chain", ALL) | {"stages": stages}
    cache = Path(text).parent / "cache"
    ended = drive_chain_here(chain, tmp_path / "chain", cache, monkeypatch, {"second": ("kill@0:9",)})
    assert (ended.outcome, ended.line) == (Outcome.DONE, "")
    assert curve(tmp_path / "chain" / "second") == curve(runs / "whole")[FIRST:]
    found = json.loads((tmp_path / "chain" / "chain.json").read_text())["stages"][1]
    assert found["begins_with"] == {"stage": "first", "tag": "last", "step": FIRST}
    assert found["receipt"] == rows(runs / "whole")[-1]["samples"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deepspeed", "base", "lora"])
def test_phases_of_every_kind_have_the_bits_of_one_run(
    kind: str, text: str, runs: Path, tmp_path: Path
) -> None:
    """Of DeepSpeed, of one that began with other weights, and of one that keeps needing them, for an adapter."""
    cache = Path(text).parent / "cache"
    whole, first = (document(text, name, steps) for name, steps in (("whole", 8), ("first", 4)))
    for phase in (whole, first):
        if kind == "deepspeed":
            phase["parallel"] = {"engine": "deepspeed", "zero": 2, "micro_batch": 2}
        else:
            phase["workload"]["init_from"] = str(runs / "first")
        if kind == "lora":
            phase["workload"]["adapter"] = {"kind": "lora", "rank": 4}
        drive_here(phase, str(tmp_path / phase["name"]), cache)
    second = {**whole, "name": "second", "train": {**whole["train"], "continue_from": f"{tmp_path}/first"}}
    if kind == "base":  # which brings its weights, and needs no others
        second["workload"] = {k: v for k, v in whole["workload"].items() if k != "init_from"}
    drive_here(second, str(tmp_path / "second"), cache)
    assert rows(tmp_path / "second")[-1]["samples"] == rows(tmp_path / "whole")[-1]["samples"]
    assert curve(tmp_path / "second") == curve(tmp_path / "whole")[4:]
    assert weights(tmp_path / "second", 8) == weights(tmp_path / "whole", 8)


def first_of(runs: Path) -> Any:
    """The last commit of the first phase."""
    return Store(str(runs / "first" / "checkpoints")).manifest(FIRST)


def receipt_of(run: Path, receipt: str, position: int) -> str:
    """The receipt of a run that goes on from another with that receipt, of the samples from that position on."""
    spec = load(run / "job.yaml")
    commit = Store(str(run / "checkpoints")).latest()
    assert commit is not None
    batches = training_inputs(spec, Tokens.open(commit.meta["data"])).batches
    size = spec.train.global_batch
    for _ in range(FIRST, spec.train.steps):
        receipt = roll(receipt, add(batches.batch(position + at, 1)[1] for at in range(size)))
        position += size
    return receipt
