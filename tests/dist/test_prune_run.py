"""Runs that prune weights and heads: killed they go on with the same bits; what continues a pruned run holds its zeros
if asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from base_run import STEPS, document
from jobs import curve, rows, weights, write_text
from local_run import drive_here
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.identity import check_same_run
from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.controller import decide
from orchestrator.data.store.manifest import FORMAT
from orchestrator.export.hugging_face import export
from orchestrator.models.base import named_base
from orchestrator.resolve.commit_model import model_of_run
from orchestrator.resolve.training_inputs import load_workload
from orchestrator.storage.run_directory import RunDir
from workloads.model.head_gates import gates_of

PRUNE = {"sparsity": 0.5, "steps": [2, 4], "choose_every": 1}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"), 20_000)


def pruned(text: str, prune: dict[str, Any] | None, **workload: Any) -> dict[str, Any]:
    return document(text, **workload) | {"prune": prune}


def gated(text: str, prune: dict[str, Any] | None) -> dict[str, Any]:
    """A job that prunes weights, and whose gates of heads are nearly closed in the end."""
    found = pruned(text, prune, head_penalty=2.0)
    found["train"]["optimizer"]["groups"] = [{"match": ["*.gates.*"], "lr_scale": 250}]
    return found


@pytest.fixture(scope="module")
def run(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run on two workers."""
    folder = tmp_path_factory.mktemp("runs") / "pruned"
    drive_here(gated(text, PRUNE), str(folder), Path(text).parent / "cache")
    return folder


def zeros(run: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    """Where the weights of the matrices in question are zero."""
    store = Store(str(run / "checkpoints"))
    reader = store.reader(store.manifest(step))
    names = [
        name for name in reader.manifest.tensors if name.endswith(".weight") and ".layers." in f".{name}"
    ]
    found = {name: reader.read(name) == 0 for name in names if name.startswith("model.")}
    return {name: each for name, each in found.items() if each.dim() == 2}


def notes(run: Path) -> str:
    return " ".join(json.dumps(json.loads(line)) for line in (run / "events.jsonl").read_text().splitlines())


def test_killed_between_and_at_choices_it_goes_on_with_the_same_bits(
    run: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decide, "SETTLE", 0.0)
    drive_here(
        gated(text, PRUNE),
        str(tmp_path / "killed"),
        Path(text).parent / "cache",
        faults=("kill@1:3", "kill@0:5/2"),
    )
    assert curve(tmp_path / "killed") == curve(run)
    assert weights(tmp_path / "killed", STEPS) == weights(run, STEPS)
    for name in ("sparsity", "open_heads", "head_penalty"):
        assert [row[name] for row in rows(run)] == [row[name] for row in rows(tmp_path / "killed")]
    assert rows(run)[0]["open_heads"] == 8
    assert rows(run)[-1]["head_penalty"] < 0.8 * rows(run)[0]["head_penalty"]
    assert [row["sparsity"] for row in rows(run)] == pytest.approx([0, 0, 0, 0.4375, 0.5, 0.5], abs=1e-3)


def test_what_is_exported_has_the_zeros_and_the_gates_in_its_weights(
    run: Path, text: str, tmp_path: Path
) -> None:
    facts = export(str(run), STEPS, str(tmp_path / "export"))
    assert facts["logits_difference"] < 1e-5
    loaded = model_of_run(str(run), STEPS)
    gates = {
        name: gates_of(loaded.read(name)) for name in loaded.workload.shapes if name.endswith("log_alpha")
    }
    assert len(gates) == 2
    assert all(float(each.max()) < 0.5 for each in gates.values())
    plain = parse(pruned(text, None, init_from=str(run)))
    begun = load_workload(
        plain.workload, plain.data, plain.train, 0, loaded.tokens.vocabulary(), FORMAT,
        base=named_base(plain.workload, None),
    )  # fmt: skip
    written = load_file(tmp_path / "export" / "model.safetensors")
    for name, tensor in begun.hf_state(lambda name: begun.initial(name, 0)):
        torch.testing.assert_close(tensor, written[name], rtol=1e-6, atol=0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    inner = [each for name, each in model.named_parameters() if ".h." in name and each.dim() == 2]
    share = sum(int((each == 0).sum()) for each in inner) / sum(each.numel() for each in inner)
    assert share == pytest.approx(0.5, abs=1e-3)
    assert share == pytest.approx(rows(run)[-1]["sparsity"], abs=1e-6)


def test_a_run_that_begins_with_it_trains_the_zeros_with_a_note_or_holds_them(
    run: Path, text: str, tmp_path: Path
) -> None:
    """Asked for in llm-compressor#1028."""
    cache = Path(text).parent / "cache"
    drive_here(pruned(text, None, init_from=str(run)), str(tmp_path / "free"), cache)
    drive_here(pruned(text, {"keep": True}, init_from=str(run)), str(tmp_path / "held"), cache)
    before, free, held = zeros(run), zeros(tmp_path / "free"), zeros(tmp_path / "held")
    assert before.keys() == free.keys() == held.keys()
    assert not any(each.any() for each in free.values())
    assert all(each.equal(before[name]) for name, each in held.items())
    assert any(each.any() for each in held.values())
    assert "is pruned, and its zero weights are trained" in notes(tmp_path / "free")
    assert "are folded into its weights" in notes(tmp_path / "free")
    assert "zero weights are trained" not in notes(tmp_path / "held")


def test_a_run_is_another_one_with_other_pruning(run: Path, text: str) -> None:
    check_same_run(parse(gated(text, PRUNE)).run_identity, RunDir(str(run)))
    for other in (None, {**PRUNE, "sparsity": 0.6}, {**PRUNE, "method": "movement"}):
        with pytest.raises(InputError, match=r"prune.* in this run and"):
            check_same_run(parse(gated(text, other)).run_identity, RunDir(str(run)))
    other = gated(text, PRUNE)
    other["workload"]["head_penalty"] = 3.0
    with pytest.raises(InputError, match=r"head_penalty is 2.0 in this run and"):
        check_same_run(parse(other).run_identity, RunDir(str(run)))


@pytest.mark.slow
def test_a_run_continued_with_its_whole_state_keeps_its_masks(run: Path, text: str, tmp_path: Path) -> None:
    further = gated(text, {**PRUNE, "sparsity": 0.7, "steps": [8, 8]})
    further["train"] |= {"continue_from": str(run), "steps": 10}
    drive_here(further, str(tmp_path / "further"), Path(text).parent / "cache")
    before, after = zeros(run), zeros(tmp_path / "further", 10)
    assert all((after[name] | ~each).all() for name, each in before.items())
    assert rows(tmp_path / "further")[-1]["sparsity"] == pytest.approx(0.7, abs=1e-3)
