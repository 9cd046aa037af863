"""A run that trains a part of its model: it survives, its commits are small, and all that reads one has all weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from base_run import STEPS, document, run_base
from jobs import curve, weights, write_text
from local_run import drive_here

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.manifest import CorruptCommit
from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.controller import decide
from orchestrator.resolve.commit_model import model_of_run
from orchestrator.storage.run_directory import RunDir

FROZEN = ["tokens.*", "layers.0.*"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"), 20_000)


@pytest.fixture(scope="module")
def base(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_base(text, tmp_path_factory.mktemp("runs"))


@pytest.mark.slow
def test_a_kill_changes_no_bit_and_the_base_is_read_again(
    text: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decide, "SETTLE", 0.0)
    cache, mine = Path(text).parent / "cache", tmp_path / "mine"
    shutil.copytree(base, mine)
    tuned = document(text, init_from=f"{mine}@last")
    tuned["train"]["freeze"] = FROZEN
    drive_here(tuned, str(tmp_path / "quiet"), cache)
    drive_here(tuned, str(tmp_path / "killed"), cache, faults=("kill@0:5",))
    assert curve(tmp_path / "quiet") == curve(tmp_path / "killed")
    kept = weights(tmp_path / "quiet", STEPS)
    assert kept == weights(tmp_path / "killed", STEPS)
    assert not [name for name in kept if ".layers.0." in name or ".tokens." in name]
    shutil.move(tmp_path / "quiet", tmp_path / "moved")
    RunDir(str(tmp_path / "moved")).write_text("job.yaml", (tmp_path / "killed" / "job.yaml").read_text())
    model, before = model_of_run(str(tmp_path / "moved"), STEPS), model_of_run(str(mine), STEPS)
    for name in model.workload.shapes:
        same = torch.equal(model.read(name), before.read(name))
        assert same == (".layers.0." in f".{name}" or name.startswith("tokens.")), name
    second = document(text, init_from=str(tmp_path / "moved")) | {"name": "second"}
    drive_here(second, str(tmp_path / "second"), cache)
    shutil.rmtree(mine)
    with pytest.raises(InputError, match="are gone"):
        model_of_run(str(tmp_path / "moved"), STEPS)
    with pytest.raises(InputError, match="are gone"):
        drive_here(tuned, str(tmp_path / "killed"), cache)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"zero": 1}, {"zero": 3}], ids=str)
def test_what_thaws_is_trained_from_its_step_on_whenever_it_is_killed(
    layout: dict[str, Any], text: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decide, "SETTLE", 0.0)
    cache = Path(text).parent / "cache"
    tuned = document(text, init_from=f"{base}@last")
    tuned["train"] |= {"freeze": FROZEN, "thaw": {2: ["layers.0.*"], 4: ["tokens.*"]}}
    tuned["parallel"] |= layout
    tuned["checkpoint"] |= {"keep": 9, "average": {"ema": 0.5}}
    drive_here(tuned, str(tmp_path / "quiet"), cache)
    # Beside the first thaw, and in the steps behind it.
    drive_here(tuned, str(tmp_path / "killed"), cache, faults=("kill@1:3", "kill@0:4/2", "kill@1:6/3"))
    assert curve(tmp_path / "quiet") == curve(tmp_path / "killed")
    assert weights(tmp_path / "quiet", STEPS) == weights(tmp_path / "killed", STEPS)
    store = Store(str(tmp_path / "quiet" / "checkpoints"))
    assert store.steps() == [2, 3, 4, 6]
    for name, at in (("layers.0.attention.query.weight", 3), ("tokens.weight", 6)):
        there = [step for step in store.steps() if f"model.{name}" in store.manifest(step).tensors]
        assert there == [step for step in store.steps() if step >= at]
        before, after = (model_of_run(str(run), STEPS) for run in (base, tmp_path / "quiet"))
        assert torch.equal(before.read(name), model_of_run(str(tmp_path / "quiet"), 2).read(name))
        assert not torch.equal(before.read(name), after.read(name))
    # Adam's first update is as large as the learning rate, if its moments and their correction begin with the thaw.
    name = "layers.0.attention.query.weight"
    first = store.reader(store.manifest(3)).read(f"model.{name}") - model_of_run(str(base), STEPS).read(name)
    assert float(first.abs().max()) == pytest.approx(3e-3, rel=0.1)


@pytest.mark.slow
def test_a_base_that_is_damaged_is_not_read(text: str, base: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(base, mine)
    tuned = document(text, init_from=f"{mine}@last")
    tuned["train"] |= {"freeze": FROZEN, "steps": 3}
    drive_here(tuned, str(tmp_path / "run"), Path(text).parent / "cache")
    tensors = Store(str(mine / "checkpoints")).manifest(6).tensors
    chunk = next(iter(tensors["model.layers.0.attention.query.weight"].chunks))
    shard = mine / "checkpoints" / "step-00000006" / chunk.file
    data = bytearray(shard.read_bytes())
    data[chunk.offset] ^= 1
    shard.write_bytes(data)
    found = model_of_run(str(tmp_path / "run"), 3)
    with pytest.raises(CorruptCommit, match="damaged"):
        found.read("layers.0.attention.query.weight")


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_names(text: str) -> None:
    from orchestrator.launch.job_checks import check_job

    wrong = document(text)
    wrong["train"]["freeze"] = ["layer.0.*"]
    with pytest.raises(InputError, match=r"matches no parameter; the nearest are layers\.0") as error:
        check_job(parse(wrong))
    assert error.value.where == "train.freeze"
    wrong["train"]["freeze"] = ["*"]
    with pytest.raises(InputError, match="freeze all parameters"):
        check_job(parse(wrong))
    wrong["train"] |= {"freeze": ["layers.0.*"], "thaw": {2: ["layers.1.*"]}}
    with pytest.raises(InputError, match=r"matches no frozen parameter; the nearest are layers\.0"):
        check_job(parse(wrong))
    wrong["train"] |= {"freeze": []}
    with pytest.raises(InputError, match="thaw thaws frozen parameters, but this job freezes none"):
        parse(wrong)
