"""Runs that learn from a teacher, in every step or from its stored logits; killed ones have the bits of their quiet
twin."""

from __future__ import annotations

import json
import shutil
from collections.abc import Set
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import curve, job, rows, weights
from letters import letters, write_tokenizer
from local_chain import drive_chain_here
from local_run import (
    LocalGang,
    RolloutGang,
    controller_here,
    drive_here,
    export_here,
    with_rollout_workers,
)

from cluster.workers.gang import Bundle, Gang
from orchestrator.chain.preflight import check_chain
from orchestrator.chain.stage_run import stage_runs
from orchestrator.checkpoint.commit_store import Store
from orchestrator.config.chain import parse_chain
from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.controller import decide, rollout_workers
from orchestrator.evaluate.of_commit import evaluate_commit
from orchestrator.observe.console import facts
from orchestrator.resolve.commit_model import model_of_run
from orchestrator.storage.run_directory import RunDir
from orchestrator.verify.replay import replay

SMALL = {"hidden": 32, "layers": 2, "heads": 4, "intermediate": 64}
LARGE = {"hidden": 48, "layers": 4, "heads": 4, "intermediate": 96}
STEPS, COUNT, TAUGHT = 8, 200, 40
ROWS = [
    {
        "talk": [{"role": "user", "content": letters(n)}, {"role": "assistant", "content": letters(n + 1)}],
        "text": letters(n),
        "kind": ["even", "odd"][n % 2],
    }
    for n in range(COUNT)
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows, a tokenizer with its template, and a trained teacher."""
    folder = tmp_path_factory.mktemp("distillation")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    write_tokenizer(folder)
    found = document(folder, None)
    found["workload"] |= {"changes": LARGE}
    found["train"]["steps"] = TAUGHT
    drive_here(found, str(folder / "teacher"), folder / "cache")
    return folder


def document(place: Path, distill: dict[str, Any] | None, **logits: Any) -> dict[str, Any]:
    """A job on conversations; `logits` are changes of distill.logits."""
    found = job(str(place / "rows.jsonl"), steps=STEPS, optimizer={"lr": 3e-3, "schedule": "constant"})
    found["workload"] = {"model": "gpt-tiny", "changes": SMALL, "objective": "conversation"}
    found["data"] = {
        "sources": [{"uri": str(place / "rows.jsonl"), "field": {"messages": "talk"}}],
        "tokenizer": str(place), "sequence_length": 32, "validation": {"share": 0.1},
    }  # fmt: skip
    found["evaluate"] = {"every": 4}
    found["checkpoint"] = {"every": 3, "keep": 3, "export": None}
    found["parallel"] = {"micro_batch": 2}
    if distill is not None:
        found["distill"] = {"teacher": str(place / "teacher"), **distill}
    if logits:
        found["distill"]["logits"] = {"weight": 0.5, "temperature": 2.0, **logits}
    return found


def parts(cache: Path) -> list[Path]:
    """The files of stored logits in a cache."""
    return sorted(cache.glob("*/teacher/*/*.bin"))


def evaluations(run: Path) -> list[dict[str, Any]]:
    return [row["sets"]["validation"] for row in rows(run, "evals.jsonl")]


def same_bits(quiet: Path, other: Path) -> None:
    assert curve(quiet) == curve(other)
    assert weights(quiet, STEPS) == weights(other, STEPS)
    assert evaluations(quiet) == evaluations(other)


@pytest.fixture(scope="module")
def quiet(place: Path) -> Path:
    drive_here(document(place, {}), str(place / "quiet"), place / "quiet_cache")
    return place / "quiet"


def test_a_kill_changes_no_bit_and_the_parts_of_the_loss_are_told(
    quiet: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decide, "SETTLE", 0.0)
    drive_here(document(place, {}), str(tmp_path / "run"), place / "quiet_cache", faults=("kill@1:5/2",))
    same_bits(quiet, tmp_path / "run")
    for row in rows(quiet):
        assert row["loss"] == pytest.approx(0.5 * row["label_loss"] + 0.5 * row["logit_loss"], rel=1e-6)
    found = evaluations(quiet)
    assert found[-1]["logit_loss"] < found[0]["logit_loss"]
    store = Store(str(quiet / "checkpoints"))
    assert store.manifest(STEPS).meta["teacher"]["step"] == TAUGHT
    assert not list((place / "teacher").glob("checkpoints/*/held-*"))
    summary = json.loads((quiet / "summary.json").read_text())
    last = rows(quiet)[-1]
    told = f"label {last['label_loss']:.4f}, logit {last['logit_loss']:.4f}"
    assert told in dict(facts(summary))["loss"]


def test_a_run_goes_on_with_the_commit_of_its_teacher_that_it_began_with(
    quiet: Path, place: Path, tmp_path: Path
) -> None:
    """Meanwhile the teacher trains on, and would remove that commit."""
    teacher, run = tmp_path / "teacher", tmp_path / "run"
    shutil.copytree(place / "teacher", teacher)
    student = document(place, {"teacher": str(teacher)})
    controller_here(student, str(run), place / "quiet_cache", until=3).drive()
    longer = document(place, None)
    longer["workload"] |= {"changes": LARGE}
    longer["train"]["steps"] = TAUGHT + 2
    longer["checkpoint"] |= {"every": 1, "keep": 1}
    drive_here(longer, str(teacher), place / "cache")
    assert Store(str(teacher / "checkpoints")).steps() == [TAUGHT, TAUGHT + 2]
    drive_here(student, str(run), place / "quiet_cache")
    same_bits(quiet, run)
    assert Store(str(run / "checkpoints")).manifest(STEPS).meta["teacher"]["step"] == TAUGHT
    assert not list(teacher.glob("checkpoints/*/held-*"))


@pytest.mark.slow
def test_a_replay_learns_from_the_teacher_too(quiet: Path, place: Path) -> None:
    found = replay(parse(document(place, {})), RunDir(str(quiet)), None, 2)
    assert found.same
    assert len(found.rows) == 2


def test_stored_logits_are_those_of_every_step_and_a_kill_changes_no_bit(
    quiet: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the vocabulary is kept. Rank 1 is killed after the first part, which the next attempt does not compute
    again, and later in a step; one worker stores the same bits as two."""
    from orchestrator.data.samples import teacher_table

    monkeypatch.setattr(decide, "SETTLE", 0.0)
    assert teacher_table.MOST > 100
    stored = document(place, {}, source="stored", k=1000)
    for name, workers, faults in (("two", 2, ()), ("one", 1, ()), ("killed", 2, ("kill@1:0e", "kill@1:5/2"))):
        run, cache = tmp_path / name, tmp_path / f"cache_{name}"
        drive_here(stored, str(run), cache, faults=faults, gang=lambda n=workers: LocalGang([n]))
    same_bits(tmp_path / "two", tmp_path / "killed")
    found = [parts(tmp_path / f"cache_{name}") for name in ("two", "one", "killed")]
    assert len(found[0]) == 1
    assert len({tuple(path.read_bytes() for path in each) for each in found}) == 1
    manifest = json.loads((found[0][0].parent / "manifest.json").read_text())
    assert manifest["k"] == 25
    assert manifest["mass"] == pytest.approx(1.0, abs=1e-5)
    for mine, theirs in zip(rows(tmp_path / "two"), rows(quiet), strict=True):
        assert mine["samples"] == theirs["samples"]
        for name in ("loss", "label_loss", "logit_loss", "grad_norm"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5), name
    ours, theirs = (weights(run, STEPS) for run in (tmp_path / "two", quiet))
    for name, data in ours.items():
        if name.startswith("model."):
            one, other = (np.frombuffer(each, np.float32) for each in (data, theirs[name]))
            # A stored row is computed whole, one of a running teacher is cut. Adam divides by the size of a gradient,
            # so that the rounding of one near zero moves its weight by a part of the rate, 3e-3.
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def taught(place: Path) -> Path:
    """A cache with the stored logits that teacher workers compute too: by passes of eight samples, of one process."""
    found = document(place, {}, source="stored", k=10)
    found["parallel"] = {"micro_batch": 8}
    drive_here(found, str(place / "taught"), place / "taught_cache", gang=lambda: LocalGang([1]))
    return place / "taught_cache"


def stored_twin(place: Path, taught: Path, run: Path, parallel: dict[str, int]) -> Path:
    """A run that reads these stored logits under a layout."""
    found = document(place, {}, source="stored", k=10)
    found["parallel"] = parallel
    drive_here(found, str(run), taught)
    return run


def by_workers(place: Path, parallel: dict[str, int], least: int, most: int) -> dict[str, Any]:
    """The job of such a run whose logits teacher workers compute."""
    found = document(place, {"workers": {"min": least, "max": most}}, source="workers", k=10)
    found["parallel"] = parallel
    return found


def reasons(run: Path) -> list[str]:
    return [event["reason"] for event in rows(run, "events.jsonl")]


def test_teacher_workers_that_come_and_die_give_the_bits_of_stored_logits(
    place: Path, taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first teacher worker dies within its second part, and a rank at step 5. Without any the ranks do the work."""
    monkeypatch.setattr(decide, "SETTLE", 0.0)
    two = {"micro_batch": 2}
    twin = stored_twin(place, taught, tmp_path / "twin", two)
    found = by_workers(place, two, least=1, most=1)
    gang = with_rollout_workers([3], faults=("kill@0:2",))
    drive_here(found, str(tmp_path / "run"), tmp_path / "cache", gang=gang, faults=("kill@1:5",))
    same_bits(twin, tmp_path / "run")
    told = [text for text in reasons(tmp_path / "run") if "teacher worker 1" in text]
    assert len(told) == 1, told
    assert told[0].endswith("its logits are computed again")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert 0 < summary["rollout_worker_hours"] < summary["worker_hours"]
    assert "teacher workers" in dict(facts(summary))
    manifest = json.loads(next(iter((tmp_path / "cache").glob("*/teacher/*/manifest.json"))).read_text())
    assert manifest["k"] == 10

    found = by_workers(place, two, least=0, most=2)
    drive_here(found, str(tmp_path / "alone"), tmp_path / "cache_alone", faults=("kill@1:0e",))
    same_bits(twin, tmp_path / "alone")
    assert any("no room for a teacher worker" in text for text in reasons(tmp_path / "alone"))
    # The same samples are in the same files, whoever has computed them.
    made = [
        {path.name: path.read_bytes() for path in parts(tmp_path / name)} for name in ("cache", "cache_alone")
    ]
    assert made[0] == made[1]
    assert len(made[0]) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("axis", ["tp", "pp", "cp"])
def test_any_number_of_teacher_workers_gives_the_bits_of_stored_logits_under_every_layout(
    axis: str, workers: int, place: Path, taught: Path, tmp_path: Path
) -> None:
    parallel = {"micro_batch": 2, axis: 2}
    twin = stored_twin(place, taught, tmp_path / "twin", parallel)
    gang = with_rollout_workers([2 + workers]) if workers else None
    found = by_workers(place, parallel, least=0, most=2)
    drive_here(found, str(tmp_path / "run"), tmp_path / "cache", gang=gang)
    same_bits(twin, tmp_path / "run")
    changes = [event.get("rollout_workers", ()) for event in rows(tmp_path / "run", "events.jsonl")]
    counts = [change["workers"] for several in changes for change in several]
    assert (max(counts), counts[-1]) == (workers, 0) if workers else counts == []


@pytest.mark.slow
def test_a_frozen_teacher_worker_is_replaced_and_changes_no_bit(
    place: Path, taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_workers, "LONGEST_STEP", 0.0)
    twin = stored_twin(place, taught, tmp_path / "twin", {"micro_batch": 2})
    gang = with_rollout_workers([3], faults=("stop@0:4",))
    found = by_workers(place, {"micro_batch": 2}, least=1, most=1)
    drive_here(found, str(tmp_path / "run"), tmp_path / "cache", gang=gang)
    same_bits(twin, tmp_path / "run")
    assert any("no sign of life" in text for text in reasons(tmp_path / "run"))


@pytest.mark.slow
def test_a_teacher_worker_that_is_lost_with_its_room_leaves_its_work_to_the_ranks(
    place: Path, taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stop as for a resize, so that no step is repeated and no failure is counted."""
    monkeypatch.setattr(decide, "ROLLOUT_STOP", 1.0)
    monkeypatch.setattr(decide, "SETTLE", 0.0)

    class Shrinking(LocalGang):
        def capacity(self, bundle: Bundle, avoid: Set[str] = frozenset()) -> int:
            return 3 if len(made) <= 2 else 2

    class Unplaced(RolloutGang):
        """The room is counted every few seconds. Until then a worker waits for a place that is gone."""

        def ready(self) -> int:
            return 0

    def gang() -> Gang:
        kinds = (lambda: Shrinking([3]), lambda: RolloutGang(("kill@0:3",)))
        made.append(kinds[len(made)]() if len(made) < len(kinds) else Unplaced(()))
        return made[-1]

    made: list[Gang] = []
    twin = stored_twin(place, taught, tmp_path / "twin", {"micro_batch": 2})
    found = by_workers(place, {"micro_batch": 2}, least=0, most=1)
    summary = drive_here(found, str(tmp_path / "run"), tmp_path / "cache", gang=gang)
    same_bits(twin, tmp_path / "run")
    assert any("so the training workers run the teacher" in text for text in reasons(tmp_path / "run"))
    assert summary["attempts"] == 2
    assert not any(event.get("first_fault") for event in rows(tmp_path / "run", "events.jsonl"))


@pytest.mark.slow
def test_a_run_with_two_teacher_workers_then_one_then_none_at_other_widths_has_the_same_bits(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With equal bits at every width, also those of stored logits that two ranks have computed."""
    monkeypatch.setattr(decide, "SETTLE", 0.0)

    def bitwise(found: dict[str, Any]) -> dict[str, Any]:
        found["train"] |= {"determinism": "bitwise", "virtual_shards": 4}
        return found

    twin = bitwise(document(place, {}, source="stored", k=10))
    drive_here(twin, str(tmp_path / "twin"), tmp_path / "cache_twin")
    found = bitwise(by_workers(place, {"micro_batch": 2}, least=0, most=2))
    for until, ranks, workers in ((3, 2, 2), (5, 1, 1), (None, 2, 0)):
        gang = with_rollout_workers([ranks + workers], faults=("kill@0:2",) if workers else ())
        found["resources"] = {"workers": ranks}
        shutil.rmtree(tmp_path / "cache", ignore_errors=until == 3)  # the parts are computed again
        controller_here(found, str(tmp_path / "run"), tmp_path / "cache", gang=gang, until=until).drive()
    same_bits(tmp_path / "twin", tmp_path / "run")


@pytest.mark.slow
def test_a_teacher_worker_that_always_fails_ends_the_run(place: Path, tmp_path: Path) -> None:
    def gang() -> Gang:
        made.append(RolloutGang(("raise@0:1/*",)) if made else LocalGang([3]))
        return made[-1]

    made: list[Gang] = []
    found = by_workers(place, {"micro_batch": 2}, least=1, most=1)
    found["limits"] = {"restarts": 0}
    summary = drive_here(found, str(tmp_path / "run"), tmp_path / "cache", gang=gang)
    assert summary["state"] == "failed"
    assert "teacher worker" in reasons(tmp_path / "run")[-1]
    assert "InjectedFault" in reasons(tmp_path / "run")[-1]


@pytest.mark.slow
def test_logits_are_stored_under_every_layout(place: Path, tmp_path: Path) -> None:
    """The ten largest of a vocabulary that is cut over ranks, of positions that are, and of a last stage.

    Asked for in OpenRLHF#1146.
    """
    found = document(place, {}, source="stored", k=10)
    drive_here(found, str(tmp_path / "dp"), tmp_path / "cache_dp")
    wanted = rows(tmp_path / "dp")
    for axis in ("tp", "cp", "pp"):
        found["parallel"] = {"micro_batch": 2, axis: 2}
        drive_here(found, str(tmp_path / axis), tmp_path / f"cache_{axis}")
        for mine, theirs in zip(rows(tmp_path / axis), wanted, strict=True):
            for name in ("loss", "label_loss", "logit_loss", "grad_norm"):
                assert mine[name] == pytest.approx(theirs[name], rel=1e-5), (axis, name)


@pytest.mark.slow
def test_few_stored_logits_are_read_again_and_a_damaged_one_is_told(place: Path, tmp_path: Path) -> None:
    """A second run computes nothing. A damaged record ends the run by one line. Requests: trl#3055, trl#2255."""
    few = document(place, {}, source="stored", k=3)
    teacher = tmp_path / "teacher"
    shutil.copytree(place / "teacher", teacher)
    few["distill"]["teacher"] = str(teacher)
    drive_here(few, str(tmp_path / "one"), tmp_path / "cache")
    (part,) = parts(tmp_path / "cache")
    manifest = json.loads((part.parent / "manifest.json").read_text())
    assert 3 / 25 < manifest["mass"] < 1.0
    before = part.stat().st_mtime_ns
    drive_here(few | {"name": "again"}, str(tmp_path / "two"), tmp_path / "cache")
    assert part.stat().st_mtime_ns == before
    assert curve(tmp_path / "one") == curve(tmp_path / "two")
    data = bytearray(part.read_bytes())
    for at in range(1000, len(data), 400):
        data[at] ^= 1
    part.write_bytes(bytes(data))
    drive_here(few | {"name": "third"}, str(tmp_path / "three"), tmp_path / "cache")
    last = rows(tmp_path / "three", "events.jsonl")[-1]
    assert last["phase"] == "failed"
    assert "the stored logits of a teacher are damaged; remove the file" in last["reason"]


@pytest.mark.slow
def test_learned_maps_are_committed_by_name_and_left_out_of_exports(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is resized from two workers under ZeRO 3 to one has the curve of one worker."""
    monkeypatch.setattr(decide, "SETTLE", 0.0)
    inner = document(place, {"hidden": {"weight": 0.5}, "relations": {"of": ["attention", "values"]}})
    inner["parallel"] = {"micro_batch": 2, "zero": 3}
    drive_here(inner, str(tmp_path / "one"), tmp_path / "cache", gang=lambda: LocalGang([1]))
    gang = lambda: LocalGang([2, 1])  # noqa: E731
    drive_here(inner, str(tmp_path / "run"), tmp_path / "cache", gang=gang, faults=("kill@1:5/2",))
    for mine, theirs in zip(rows(tmp_path / "run"), rows(tmp_path / "one"), strict=True):
        for name in ("loss", "hidden_loss", "relation_loss", "logit_loss"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4), name
        loss = (
            0.5 * mine["label_loss"]
            + 0.5 * mine["logit_loss"]
            + 0.5 * mine["hidden_loss"]
            + mine["relation_loss"]
        )
        assert mine["loss"] == pytest.approx(loss, rel=1e-6)
    store = Store(str(tmp_path / "run/checkpoints"))
    names = store.manifest(STEPS).tensors.keys()
    assert {"distill.hidden.1.weight", "distill.hidden.2.weight"} <= names
    assert not any(name.startswith("model.distill") for name in names)
    made = model_of_run(str(tmp_path / "run"), STEPS)
    assert export_here(made, tmp_path / "export") < 1e-4
    row = evaluate_commit(parse(inner), RunDir(str(tmp_path / "run")), store.manifest(STEPS), {})
    assert row["sets"]["validation"]["loss"] == pytest.approx(
        evaluations(tmp_path / "run")[-1]["loss"], rel=1e-5
    )
    after = document(place, None)
    after["workload"]["init_from"] = str(tmp_path / "run")
    after["train"]["steps"] = 2
    drive_here(after, str(tmp_path / "after"), tmp_path / "cache")
    assert rows(tmp_path / "after")[0]["loss"] < rows(tmp_path / "one")[0]["label_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("source", ["online", "stored"])
def test_a_classifier_learns_from_an_export_with_another_order_of_labels(
    source: str, place: Path, tmp_path: Path
) -> None:
    """Under bf16, with dropout and an adapter's kin aside; an export of a run is the teacher."""
    found = document(place, None)
    found["workload"] = {"model": "bert-tiny", "changes": LARGE, "objective": "sequence_classification"}
    columns = {"text": "text", "label": "kind"}
    found["data"] |= {
        "sources": [{"uri": str(place / "rows.jsonl"), "field": columns}],
        "labels": ["even", "odd"],
    }
    drive_here(found, str(tmp_path / "teacher"), tmp_path / "cache")
    made = model_of_run(str(tmp_path / "teacher"), STEPS)
    export_here(made, tmp_path / "export")
    found["workload"] |= {"changes": SMALL, "dropout": 0.1}
    found["train"]["precision"] = "bf16"
    losses = []
    for labels in (["even", "odd"], ["odd", "even"]):
        found["data"]["labels"] = labels
        logits = {"source": source, **({"k": 8} if source == "stored" else {})}
        found["distill"] = {"teacher": str(tmp_path / "export"), "labels": 0.0, "logits": logits}
        run = tmp_path / "-".join(labels)
        drive_here(found | {"name": labels[0]}, str(run), tmp_path / "cache")
        losses.append(rows(run)[-1]["logit_loss"])
        assert losses[-1] < rows(run)[0]["logit_loss"] + 0.05
    # the student's head is drawn by rows, so that another order is another student
    assert losses[0] != losses[1]


@pytest.mark.slow
def test_an_adapter_learns_from_a_teacher(quiet: Path, place: Path, tmp_path: Path) -> None:
    found = document(place, {})
    found["workload"] |= {"init_from": str(quiet), "adapter": {"kind": "lora", "rank": 4}}
    for name, parallel in (("two", {"zero": 2}), ("tp", {"tp": 2})):
        found["parallel"] = {"micro_batch": 2, **parallel}
        drive_here(found, str(tmp_path / name), tmp_path / "cache")
    for mine, theirs in zip(rows(tmp_path / "two"), rows(tmp_path / "tp"), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


@pytest.mark.slow
def test_another_teacher_is_refused_when_a_run_goes_on(place: Path, tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    shutil.copytree(place / "teacher", teacher)
    found = document(place, {"teacher": f"{teacher}@last"})
    found["train"]["steps"] = 4
    found["train"]["optimizer"] |= {"schedule": "wsd", "decay": 1}
    drive_here(found, str(tmp_path / "run"), tmp_path / "cache")
    shutil.rmtree(teacher)
    other = document(place, None)
    other["workload"] |= {"changes": LARGE}
    other["train"]["steps"] = TAUGHT
    other["seed"] = 7
    drive_here(other, str(teacher), tmp_path / "cache")
    found["train"]["steps"] = STEPS
    with pytest.raises(InputError, match="are not those that the run has learnt from so far"):
        drive_here(found, str(tmp_path / "run"), tmp_path / "cache")


@pytest.mark.slow
def test_a_stage_of_a_chain_teaches_another(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A teacher that was trained again has other weights."""
    common = document(place, None)
    del common["name"]
    large = {"workload": {"changes": LARGE}, "train": {"steps": 4}}
    small = {"train": {"steps": 4}, "distill": {"teacher": "stage:large"}}
    chain = {**common, "name": "chain", "stages": [{"name": "small", **small}, {"name": "large", **large}]}
    parsed = parse_chain(chain)
    assert [stage.name for stage in parsed.stages] == ["large", "small"]
    assert parsed["small"].needs == ("large",)
    root = RunDir(str(tmp_path / "runs"))
    ended = drive_chain_here(chain, tmp_path / "runs", tmp_path / "cache", monkeypatch)
    assert ended.line == ""
    stages = stage_runs(parse_chain(chain), root)
    assert check_chain(parsed, stages, root, None) == {"large", "small"}
    assert "logit_loss" in rows(tmp_path / "runs/small")[-1]
    shutil.rmtree(tmp_path / "runs/large")
    again = stages["large"].job.model_dump(mode="json")
    drive_here(again, str(tmp_path / "runs/large"), tmp_path / "cache")
    with pytest.raises(InputError, match="it was distilled from large, but that checkpoint has changed"):
        check_chain(parsed, stages, root, None)
