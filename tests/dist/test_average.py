"""Runs with an average of their weights: evaluated and exported in their place, and the training as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import curve, job, rows, weights, write_text
from local_run import LocalGang, drive_here
from transformers import AutoModelForCausalLM

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.identity import check_same_run, read_job
from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.evaluate.of_commit import evaluate_commit
from orchestrator.export.hugging_face import export
from orchestrator.storage.run_directory import RunDir

DECAY, STEPS = 0.8, 12


def averaged(text: str, average: dict[str, Any] | None) -> dict[str, Any]:
    """A job that commits every step."""
    document = job(text)
    document["data"]["validation"] = {"share": 0.34}
    document["evaluate"] = {"every": 4, "at_start": True, "metrics": ["loss"]}
    document["checkpoint"] |= {"every": 1, "keep": STEPS, "average": average}
    return document


def losses(run: Path) -> dict[int, float]:
    return {row["step"]: row["sets"]["validation"]["loss"] for row in rows(run, "evals.jsonl")}


def evaluated(run: Path, step: int, raw: bool = False) -> dict[str, Any]:
    place = RunDir(str(run))
    spec = read_job(place)
    assert spec is not None
    return dict(evaluate_commit(spec, place, Store(place.at("checkpoints")).manifest(step), {}, raw))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"), 20_000)


@pytest.fixture(scope="module")
def runs(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs ema, last and plain, on one worker, undisturbed; and the data cache."""
    folder = tmp_path_factory.mktemp("runs")
    for name, average in (("ema", {"ema": DECAY}), ("last", {"last": 3}), ("plain", None)):
        drive_here(averaged(text, average), str(folder / name), folder / "cache", gang=lambda: LocalGang([1]))
    return folder


@pytest.mark.slow
def test_a_moving_average_is_that_of_a_plain_loop_and_changes_no_bit_of_training(runs: Path) -> None:
    store = Store(str(runs / "ema" / "checkpoints"))
    readers = [store.reader(store.manifest(step)) for step in range(1, STEPS + 1)]
    for name in [n for n in readers[0].manifest.tensors if n.startswith("average.")]:
        weight = name.replace("average.", "model.", 1)
        mean = readers[0].read(weight)
        for update, reader in enumerate(readers[1:], start=2):
            mean.lerp_(reader.read(weight), (1 - DECAY) / (1 - DECAY**update))
            assert reader.read(name).equal(mean), (name, update)
    found, plain = weights(runs / "ema", STEPS), weights(runs / "plain", STEPS)
    assert {name for name in found if not name.startswith("average.")} == plain.keys()
    assert all(found[name] == value for name, value in plain.items())
    assert {name.partition(".")[2] for name in found if name.startswith("average.")} == {
        name.partition(".")[2] for name in plain if name.startswith("model.")
    }
    assert curve(runs / "ema") == curve(runs / "last") == curve(runs / "plain")


@pytest.mark.slow
def test_the_average_is_what_is_evaluated(runs: Path) -> None:
    ema, plain = losses(runs / "ema"), losses(runs / "plain")
    assert ema[0] == plain[0]  # before the first step they are the same
    assert all(ema[step] != plain[step] for step in (4, 8, STEPS))
    assert {row.get("weights") for row in rows(runs / "ema", "evals.jsonl")} == {"averaged"}
    for run in ("last", "plain"):
        assert losses(runs / run) == plain
        assert not any("weights" in row for row in rows(runs / run, "evals.jsonl"))


@pytest.mark.slow
def test_afterwards_too_unless_the_raw_weights_are_asked_for(runs: Path) -> None:
    ema, raw, last = (
        evaluated(runs / name, 8, raw) for name, raw in (("ema", False), ("ema", True), ("last", False))
    )
    of = [row["sets"]["validation"]["loss"] for row in (ema, raw, last)]
    assert of[:2] == [losses(runs / "ema")[8], losses(runs / "plain")[8]]
    assert of[2] not in of[:2]
    assert (ema["weights"], raw.get("weights"), last["weights"]) == ("averaged", None, "averaged")
    assert last["averaged_steps"] == [6, 7, 8]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("ema", False),
        pytest.param("ema", True, marks=pytest.mark.slow),
        pytest.param("last", False, marks=pytest.mark.slow),
    ],
)
def test_the_average_is_what_is_exported(runs: Path, tmp_path: Path, name: str, raw: bool) -> None:
    found = export(str(runs / name), STEPS, str(tmp_path / "export"), raw=raw)
    store = Store(str(runs / name / "checkpoints"))
    readers = [store.reader(store.manifest(step)) for step in range(STEPS - 2, STEPS + 1)]
    wanted = readers[-1].read(("model." if raw or name == "last" else "average.") + "tokens.weight")
    if name == "last":
        wanted = sum(reader.read("model.tokens.weight").double() for reader in readers).div(3).float()  # type: ignore[union-attr]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    torch.testing.assert_close(model.get_input_embeddings().weight.data, wanted, rtol=0, atol=0)
    assert found.get("weights") == (None if raw else "averaged")
    assert found.get("averaged_steps") == ([10, 11, 12] if name == "last" else None)


@pytest.mark.slow
def test_faults_in_an_evaluation_and_another_width_leave_the_average_as_it_is(
    runs: Path, text: str, tmp_path: Path
) -> None:
    """Killed while the average was in place of the weights; and after a commit."""
    killed, faults = tmp_path / "killed", ("kill@0:8e", "kill@0:10/2")
    drive_here(
        averaged(text, {"ema": DECAY}),
        str(killed),
        runs / "cache",
        gang=lambda: LocalGang([1]),
        faults=faults,
    )
    assert losses(killed) == losses(runs / "ema")
    assert curve(killed) == curve(runs / "ema")
    assert weights(killed, STEPS) == weights(runs / "ema", STEPS)
    assert max(row["attempt"] for row in rows(killed)) == 3


@pytest.mark.slow
def test_a_run_that_was_begun_without_it_is_refused(runs: Path, text: str) -> None:
    for name, average in (("plain", {"ema": DECAY}), ("ema", {"ema": 0.9}), ("ema", None)):
        with pytest.raises(InputError, match=r"checkpoint\.average\.ema is .* in this run and"):
            check_same_run(parse(averaged(text, average)).run_identity, RunDir(str(runs / name)))
    for name, average in (("plain", {"last": 2}), ("last", None), ("ema", {"ema": DECAY})):
        check_same_run(parse(averaged(text, average)).run_identity, RunDir(str(runs / name)))
