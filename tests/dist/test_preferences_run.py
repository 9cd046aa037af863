"""Whole runs on preferences: the reference made before the first step, trained, evaluated; killed ones, also while the
reference is made, have the bits of their quiet twin."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from jobs import curve, job, rows, weights
from letters import letters, write_tokenizer
from local_run import LocalGang, controller_here, drive_here, export_here, with_evaluator

from orchestrator.checkpoint.commit_store import Store
from orchestrator.config.spec import parse
from orchestrator.controller import decide
from orchestrator.evaluate.of_commit import evaluate_commit
from orchestrator.resolve.commit_model import model_of_run
from orchestrator.storage.run_directory import RunDir
from orchestrator.verify.replay import replay

SMALL = {"hidden": 32, "layers": 2, "heads": 4, "intermediate": 64}
STEPS, COUNT = 8, 700
BASE = 4


def said(number: int) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": letters(number)}]


ROWS = [
    {
        "asked": [{"role": "user", "content": letters(n)}], "better": said(n + 1),
        "worse": [{"role": "assistant", "content": letters(n + 1)[::-1]}],
        "talk": [{"role": "user", "content": letters(n)}, *said(n + 1)], "good": n % 3 > 0,
    }
    for n in range(COUNT)
]  # fmt: skip
COLUMNS = {"prompt": "asked", "chosen": "better", "rejected": "worse"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows, a tokenizer with its template, and a run to begin with."""
    folder = tmp_path_factory.mktemp("preferences")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    write_tokenizer(folder)
    found = document(folder, "conversation", {"messages": "talk"})
    found["train"]["steps"] = BASE
    del found["evaluate"], found["workload"]["init_from"]
    drive_here(found, str(folder / "base"), folder / "cache")
    return folder


def document(place: Path, objective: str, columns: dict[str, str] = COLUMNS) -> dict[str, Any]:
    found = job(str(place / "rows.jsonl"), steps=STEPS, optimizer={"lr": 3e-3, "schedule": "constant"})
    changes = {"model": "gpt-tiny", "changes": SMALL, "init_from": str(place / "base")}
    found["workload"] = {**changes, "objective": objective}
    found["data"] = {
        "sources": [{"uri": str(place / "rows.jsonl"), "field": columns}], "tokenizer": str(place),
        "sequence_length": 48, "validation": {"share": 0.05},
    }  # fmt: skip
    found["evaluate"] = {"every": 4, "at_start": True}
    found["checkpoint"] = {"every": 3, "keep": 3, "export": None}
    found["parallel"] = {"micro_batch": 2}
    return found


def parts(cache: Path) -> list[Path]:
    """The files of all references in a cache."""
    return sorted(cache.glob("*/reference/*/*.bin"))


def evaluations(run: Path) -> list[dict[str, Any]]:
    return [{"step": row["step"], **row["sets"]["validation"]} for row in rows(run, "evals.jsonl")]


def same_bits(quiet: Path, other: Path) -> None:
    assert curve(quiet) == curve(other)
    assert weights(quiet, STEPS) == weights(other, STEPS)
    assert evaluations(quiet) == evaluations(other)


@pytest.fixture(scope="module")
def quiet(place: Path) -> Path:
    drive_here(document(place, "dpo"), str(place / "quiet"), place / "quiet_cache")
    return place / "quiet"


@pytest.mark.slow
def test_dpo_learns_what_is_preferred(quiet: Path, place: Path) -> None:
    """Before the first step both models are one; then the chosen answers' rewards rise above those of the rejected."""
    found = evaluations(quiet)
    assert [row["step"] for row in found] == [0, 4, 8]
    assert found[0]["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert found[0]["reward_margin"] == pytest.approx(0.0, abs=1e-6)
    assert found[-1]["loss"] < 0.69
    assert found[-1]["reward_margin"] > 0.01
    assert found[-1]["accuracy"] > 0.6
    assert found[-1]["chosen_log_probability"] > found[-1]["rejected_log_probability"]
    assert rows(quiet)[-1]["reward_margin"] > 0
    assert len(parts(place / "quiet_cache")) == 3  # two of training, one of what is held out


def test_a_kill_changes_no_bit_also_while_the_reference_is_made(
    quiet: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is killed after the first part, which the next attempt does not compute again, and later in a step."""
    monkeypatch.setattr(decide, "SETTLE", 0.0)
    run, cache = tmp_path / "run", tmp_path / "cache"
    drive_here(document(place, "dpo"), str(run), cache, faults=("kill@1:0e", "kill@1:5/2"))
    same_bits(quiet, run)
    written = [path.stat().st_mtime for path in parts(cache)]
    assert len(written) == 3
    assert [path.read_bytes() for path in parts(cache)] == [
        path.read_bytes() for path in parts(place / "quiet_cache")
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "parallel"),
    [("dpo", {}), ("dpo", {"zero": 3}), ("dpo", {"tp": 2}), ("dpo", {"pp": 2}), ("kto", {"pp": 2})],
)
def test_a_reference_that_is_held_gives_the_same_losses_and_survives_a_kill(
    objective: str, parallel: dict[str, Any], place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decide, "SETTLE", 0.0)
    columns = {"prompt": "asked", "completion": "better", "label": "good"} if objective == "kto" else COLUMNS
    kept = document(place, objective, columns)
    kept["parallel"] |= parallel
    held = {**kept, "train": {**kept["train"], "reference": "held"}}
    drive_here(kept, str(tmp_path / "kept"), tmp_path / "cache")
    shutil.rmtree(tmp_path / "cache")
    drive_here(held, str(tmp_path / "held"), tmp_path / "cache")
    assert parts(tmp_path / "cache") == []
    for one, other in zip(curve(tmp_path / "held"), curve(tmp_path / "kept"), strict=True):
        assert (one[0], one[3]) == (other[0], other[3])
        assert one[1:3] == pytest.approx(other[1:3], rel=1e-5, abs=1e-6)
    for mine, theirs in zip(evaluations(tmp_path / "held"), evaluations(tmp_path / "kept"), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    drive_here(held, str(tmp_path / "killed"), tmp_path / "cache", faults=("kill@1:5/2",))
    same_bits(tmp_path / "held", tmp_path / "killed")


@pytest.mark.slow
def test_a_reference_is_made_once_and_again_where_it_is_lost(
    quiet: Path, place: Path, tmp_path: Path
) -> None:
    """Another beta takes what is there. A run that has a commit makes again what was damaged, with the weights that it
    began with; and where these are gone as well, it says so."""
    cache = place / "quiet_cache"
    before = {path: path.stat().st_mtime_ns for path in parts(cache)}
    other = document(place, "dpo") | {"name": "other"}
    other["workload"]["options"] = {"beta": 0.5}
    drive_here(other, str(tmp_path / "other"), cache)
    assert {path: path.stat().st_mtime_ns for path in parts(cache)} == before
    whole, damaged = tmp_path / "run", parts(cache)[0]
    shutil.copytree(quiet, whole)
    store = Store(str(whole / "checkpoints"))
    data = damaged.read_bytes()
    damaged.write_bytes(data[:20] + bytes([data[20] ^ 1]) + data[21:])
    for step in [step for step in store.steps() if step > 6]:
        shutil.rmtree(whole / f"checkpoints/{step:08d}", ignore_errors=True)
    drive_here(document(place, "dpo"), str(whole), cache)
    assert damaged.read_bytes() == data
    assert weights(whole, STEPS) == weights(quiet, STEPS)


@pytest.mark.slow
def test_a_commit_is_evaluated_by_the_reference_of_its_run(quiet: Path, place: Path) -> None:
    run, store = RunDir(str(quiet)), Store(str(quiet / "checkpoints"))
    spec = parse(document(place, "dpo"))
    row = evaluate_commit(spec, run, store.manifest(STEPS), {})
    found = {name: value for name, value in evaluations(quiet)[-1].items() if name != "step"}
    assert row["sets"]["validation"] == pytest.approx(found, rel=1e-6)
    result = replay(spec, run, None, 2)
    assert result.same, result.line


@pytest.mark.slow
def test_bitwise_runs_have_the_same_bits_on_one_worker_and_on_two(place: Path, tmp_path: Path) -> None:
    for workers in (1, 2):
        found = document(place, "kto", {"prompt": "asked", "completion": "better", "label": "good"})
        found["train"]["determinism"] = "bitwise"
        del found["parallel"]
        run, cache = str(tmp_path / f"{workers}"), tmp_path / f"cache{workers}"
        drive_here(found, run, cache, gang=lambda workers=workers: LocalGang([workers]))
    assert weights(tmp_path / "1", STEPS) == weights(tmp_path / "2", STEPS)
    assert evaluations(tmp_path / "1") == evaluations(tmp_path / "2")


@pytest.mark.slow
def test_an_evaluation_beside_the_run_has_the_same_numbers(quiet: Path, place: Path, tmp_path: Path) -> None:
    found = document(place, "dpo")
    found["evaluate"] = {"every": 4, "at_start": True, "where": "beside"}
    drive_here(found, str(tmp_path / "run"), tmp_path / "cache", gang=with_evaluator([2]))
    beside = sorted(evaluations(tmp_path / "run"), key=lambda row: row["step"])
    for ours, theirs in zip(beside, evaluations(quiet), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)


@pytest.mark.slow
def test_a_reference_that_is_lost_with_its_base_ends_the_run(
    quiet: Path, place: Path, tmp_path: Path
) -> None:
    base, cache = tmp_path / "base", tmp_path / "cache"
    shutil.copytree(place / "base", base)
    found = document(place, "dpo")
    found["workload"]["init_from"] = str(base)
    controller_here(found, str(tmp_path / "run"), cache, until=4).drive()
    shutil.rmtree(base)
    found["train"]["steps"] = STEPS
    for path in parts(cache)[:1]:
        path.unlink()
    drive_here(found, str(tmp_path / "run"), cache)
    last = rows(tmp_path / "run", "events.jsonl")[-1]
    assert last["phase"] == "failed"
    assert last["attempt"] == 2  # it is not tried again
    assert "the weights that the run began with are gone" in last["reason"]


@pytest.mark.slow
def test_a_stop_while_the_reference_is_made_loses_nothing(quiet: Path, place: Path, tmp_path: Path) -> None:
    run, cache = tmp_path / "run", tmp_path / "cache"
    first = controller_here(document(place, "dpo"), str(run), cache)
    first.request_stop("now")
    first.drive()
    drive_here(document(place, "dpo"), str(run), cache)
    assert weights(run, STEPS) == weights(quiet, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["ipo", "kto", "orpo", "reward"])
def test_every_objective_survives_kills(
    objective: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decide, "SETTLE", 0.0)
    for name, faults in (("quiet", ()), ("killed", ("kill@1:0e", "kill@0:5/2", "kill@1:7/3"))):
        columns = {"prompt": "asked", "completion": "better", "label": "good"}
        found = document(place, objective, columns if objective == "kto" else COLUMNS)
        drive_here(found, str(tmp_path / name), tmp_path / f"{name}_cache", faults=faults)
    same_bits(tmp_path / "quiet", tmp_path / "killed")
    last = evaluations(tmp_path / "quiet")[-1]
    assert last["accuracy"] > 0.6 or objective in ("kto", "reward")
    assert bool(parts(tmp_path / "quiet_cache")) == (objective in ("ipo", "kto"))
    made = model_of_run(str(tmp_path / "quiet"), STEPS)
    assert export_here(made, tmp_path / "export") < 1e-4
    config = json.loads((tmp_path / "export/config.json").read_text())
    kind = "GPT2ForSequenceClassification" if objective == "reward" else "GPT2LMHeadModel"
    assert config["architectures"] == [kind]
    assert objective != "reward" or len(config["id2label"]) == 1


@pytest.mark.slow
def test_an_adapter_is_compared_with_its_base(
    quiet: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decide, "SETTLE", 0.0)
    for name, faults in (("quiet", ()), ("killed", ("kill@1:0e", "kill@0:5/2"))):
        found = document(place, "dpo")
        found["workload"]["adapter"] = {"kind": "lora", "rank": 4, "targets": ["*.attention.*"]}
        drive_here(found, str(tmp_path / name), tmp_path / f"{name}_cache", faults=faults)
    same_bits(tmp_path / "quiet", tmp_path / "killed")
    evaluated = evaluations(tmp_path / "quiet")
    assert evaluated[0]["chosen_log_probability"] == pytest.approx(
        evaluations(quiet)[0]["chosen_log_probability"], rel=1e-5
    )
    assert evaluated[0]["reward_margin"] == pytest.approx(0, abs=1e-6)
    assert evaluated[-1]["reward_margin"] > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [
        {"tp": 2},
        {"cp": 2},
        {"pp": 2},
        {"zero": 3, "micro_batch": 2},
        {"engine": "deepspeed", "zero": 2, "micro_batch": 2},
    ],
    ids=str,
)
def test_every_layout_has_the_curve_of_one_process(
    parallel: dict[str, Any], place: Path, tmp_path: Path
) -> None:
    """The reference is made under it, too."""
    found = document(place, "dpo")
    found["parallel"] = {"micro_batch": 2}
    drive_here(found, str(tmp_path / "alone"), tmp_path / "a", gang=lambda: LocalGang([1]))
    drive_here(
        found | {"parallel": parallel}, str(tmp_path / "run"), tmp_path / "b", gang=lambda: LocalGang([2])
    )
    for ours, theirs in zip(rows(tmp_path / "run"), rows(tmp_path / "alone"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    for ours, theirs in zip(evaluations(tmp_path / "run"), evaluations(tmp_path / "alone"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [None, {"kind": "lora", "rank": 4}], ids=["whole", "adapter"])
def test_a_phase_compares_with_the_reference_of_the_one_before(
    adapter: dict[str, Any] | None, place: Path, tmp_path: Path
) -> None:
    whole, first = document(place, "dpo"), document(place, "dpo")
    for phase in (whole, first):
        phase["workload"] |= {"adapter": adapter} if adapter else {}
    first["train"]["steps"] = BASE
    drive_here(whole, str(tmp_path / "whole"), tmp_path / "cache")
    drive_here(first, str(tmp_path / "first"), tmp_path / "cache")
    second = {**whole, "train": {**whole["train"], "continue_from": str(tmp_path / "first")}}
    drive_here(second, str(tmp_path / "second"), tmp_path / "cache")
    assert curve(tmp_path / "second") == curve(tmp_path / "whole")[BASE:]
    assert weights(tmp_path / "second", STEPS) == weights(tmp_path / "whole", STEPS)
