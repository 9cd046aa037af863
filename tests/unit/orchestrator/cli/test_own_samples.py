"""Commands about a job on images, which has no text: what they show, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import write_job
from PIL import Image

from orchestrator.api.measured import CommitOfRun
from orchestrator.checkpoint import resolve_checkpoint
from orchestrator.checkpoint.commit_store import Store
from orchestrator.config.errors import InputError
from orchestrator.config.spec import dump, parse
from orchestrator.data.samples.own_samples import prepare_samples
from orchestrator.data.store.tokens import Tokens
from orchestrator.launch.preflight import preflight
from orchestrator.resolve.training_inputs import training_inputs
from orchestrator.storage.run_directory import RunDir

SIDE = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
MODEL = {
    "text": {**SIDE, "vocab_size": 258, "max_position_embeddings": 8, "eos_token_id": 257},
    "vision": {**SIDE, "image_size": 4, "patch_size": 2, "num_channels": 1},
    "projection_dim": 4,
}


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    """A job on twenty small images of two classes."""
    (tmp_path / "tmp").mkdir(exist_ok=True)
    for number in range(20):
        path = tmp_path / "set" / "ab"[number % 2] / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), number * 10).save(path)
    options = {"uri": str(tmp_path / "set"), "size": 4, "channels": 1, "caption": "{}", "tokens": 8}
    return {
        "name": "images",
        "workload": {"model": "workloads.vision.clip:Clip", "changes": MODEL},
        "data": {
            "samples": {"use": "orchestrator.data.images:Images", "options": options},
            "cache": str(tmp_path / "cache"),
            "validation": {"share": 0.3},
        },
        "train": {"steps": 2, "global_batch": 4, "optimizer": {"lr": 1e-3}},
        "evaluate": {"every": 2},
        "resources": {"workers": {"min": 1, "max": 2}, "per_worker": {"cpu": 1}},
        "checkpoint": {"export": "safetensors"},
    }


@pytest.mark.slow
def test_the_memory_of_a_plan_is_traced_on_a_sample(
    command: Any, tmp_path: Path, document: dict[str, Any]
) -> None:
    path = write_job(tmp_path, document)
    found = json.loads(command("plan", path, "--json").out)
    assert found["memory"]["source"] == "trace"
    assert found["memory"]["ranks"][0]["at_peak"]["activations"] > 0
    said = command("run", "--dry-run", path, "--run-dir", tmp_path / "run")
    assert (said.code, said.err) == (0, "")
    assert "starts from the beginning; nothing was started or written" in said.out


def test_samples_are_prepared_without_training(
    command: Any, tmp_path: Path, document: dict[str, Any]
) -> None:
    path = write_job(tmp_path, document)
    found = json.loads(command("data", "prepare", path, "--json").out)
    held_out = found["held_out"]["validation"]["samples"]
    assert 0 < held_out < 20
    said = command("data", "prepare", path)
    assert said.out.splitlines() == [found["data"], f"held out as validation: {held_out} samples"]


def test_no_sample_is_compared_with_itself(document: dict[str, Any]) -> None:
    document["train"]["global_batch"] = 20
    spec = parse(document)
    uri = prepare_samples(spec.data.samples, 0, str(document["data"]["cache"]))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="20 samples are compared with each other, but there are"):
        training_inputs(spec, Tokens.open(uri))


def test_evaluations_are_of_samples_alone(tmp_path: Path, document: dict[str, Any]) -> None:
    spec = parse(document)
    run = RunDir(str(tmp_path / "run"))
    run.create()
    run.write_text("job.yaml", dump(spec))
    commit: Any = None  # the sets are those of the job
    assert parse(CommitOfRun(run, commit, raw=False).with_sets({})) == spec
    with pytest.raises(InputError, match=r"^--on: the run reads own samples, not text"):
        CommitOfRun(run, commit, raw=False, where="--on").with_sets({"wiki": "wiki.txt"})


def checked(document: dict[str, Any], tmp_path: Path) -> None:
    preflight(parse(document), RunDir(str(tmp_path / "run")), None, None)


def test_a_run_may_be_chosen_by_zero_shot(tmp_path: Path, document: dict[str, Any]) -> None:
    document["checkpoint"] |= {"keep_best": "validation.zero_shot", "export": "hf"}
    checked(document, tmp_path)
    document["data"]["samples"]["options"] |= {"caption": ""}
    for path in (tmp_path / "set").rglob("*.png"):
        path.with_suffix(".txt").write_text("an image")
    with pytest.raises(InputError, match="returns no value named zero_shot"):
        checked(document, tmp_path)


@pytest.mark.parametrize(
    ("place", "changes", "message"),
    [
        ("train", {"global_batch": 1}, "compares the samples of a global batch, but this batch has only one"),
        ("checkpoint", {"export": "gguf"}, "gguf is not for own models"),
        ("data", {"streaming": True}, "streaming is for text"),
        ("data", {"cache": "s3://bucket/cache"}, "data.cache s3://bucket/cache: prepared samples must"),
    ],
)
def test_what_cannot_be_is_refused_before_a_run(
    tmp_path: Path, document: dict[str, Any], place: str, changes: dict[str, Any], message: str
) -> None:
    document[place] |= changes
    with pytest.raises(InputError, match=message):
        checked(document, tmp_path)


def test_no_text_is_continued(
    command: Any, tmp_path: Path, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(str(tmp_path / "run"))
    run.create()
    run.write_text("job.yaml", dump(parse(document)))
    run.append("events.jsonl", [{"number": 1, "time": 1.0, "phase": "done", "attempt": 1}])
    monkeypatch.setattr(resolve_checkpoint, "read_chosen", lambda store, step, read: read(4))
    monkeypatch.setattr(Store, "manifest", lambda store, step: None)
    said = command("generate", run.uri, "Once")
    assert said.code == 2
    assert "a model of own samples cannot continue text" in said.err
