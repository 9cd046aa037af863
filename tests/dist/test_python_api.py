"""The quality, the text and the weights of a run in Python, as the commands have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import job, write_text
from local_run import drive_here

from orchestrator import Checkpoint, Run, load_checkpoint, load_run
from orchestrator.cli.app import call
from orchestrator.config.errors import InputError


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is done, with commits of two steps."""
    folder = tmp_path_factory.mktemp("done")
    document = job(write_text(folder, 40_000), steps=8)
    document["data"]["validation"] = {"share": 0.2}
    document["checkpoint"] = {"every": 4, "export": None}
    document["resources"] = {"workers": 1}
    drive_here(document, str(folder / "run"), folder / "cache")
    return folder / "run"


@pytest.fixture
def run(place: Path) -> Run:
    return load_run(place)


def told(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        call([*map(str, words), "--json"])
    assert ended.value.code == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_the_metrics_are_those_of_the_command_and_of_the_run(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = run.evaluate(step=4)
    assert metrics == told(capsys, "evaluate", run.uri, "--step", 4)["sets"]
    assert metrics["validation"]["tokens"] > 0
    assert run.state == "done"


def test_what_cannot_be_evaluated_is_told(run: Run) -> None:
    with pytest.raises(InputError, match="there is no such commit"):
        run.evaluate(step=3)
    with pytest.raises(InputError, match=r"nothing.yaml"):
        run.evaluate(tasks=["nothing.yaml"])


def test_the_text_is_that_of_the_command(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["ROMEO: ", "What "]
    options = ["--tokens", 6, "--temperature", 0.8, "--seed", 5]
    shown = told(capsys, "generate", run.uri, *prompts, *options)
    assert run.generate(prompts, 6, temperature=0.8, seed=5) == [each["text"] for each in shown]
    assert run.generate(prompts[0], 6) == run.generate(prompts, 6)[:1]
    assert run.generate([]) == []
    with pytest.raises(InputError):
        run.generate("x" * 5000, step=4)
    with pytest.raises(InputError, match=r"^tokens: must be an integer of at least 1 \(got 0\)"):
        run.generate(prompts, 0)
    with pytest.raises(InputError, match=r"^temperature: must be a finite number of at least 0 \(got -1\)"):
        run.generate(prompts, temperature=-1)


def test_a_checkpoint_has_the_weights_for_an_own_loop(run: Run, place: Path) -> None:
    newest = load_checkpoint(place)
    assert newest == Checkpoint(newest.run, 8)
    earlier = load_checkpoint(place, step=4)
    assert load_checkpoint(f"{place}/checkpoints/step-00000004/").step == earlier.step == 4
    model = newest.model()
    assert model.load_state_dict(earlier.state_dict()).missing_keys == []
    expected = run.model(4).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(InputError, match="there is no such commit"):
        load_checkpoint(place, step=5)
    with pytest.raises(InputError, match="is the checkpoint of another step"):
        load_checkpoint(f"{place}/checkpoints/step-00000004", step=8)
    with pytest.raises(InputError, match="there is no run here"):
        load_checkpoint(place.parent)
