"""The job that evaluates a folder in the Hugging Face format: what is known of it, and what is refused."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file, save_file

from orchestrator.config.errors import InputError
from orchestrator.data.encoding.training import train_bytes
from orchestrator.evaluate import of_export
from orchestrator.evaluate.of_export import (
    chat_of_export,
    evaluate_export,
    is_export,
    notes_of_export,
    spec_of_export,
    tokenizer_of_export,
    workload_of_export,
)
from orchestrator.resolve.prepared_data import PreparedData
from workloads.hf.check.parity_table import CASES, random_state
from workloads.transformer_workload import TransformerWorkload
from workloads.workload import Vocabulary

SIZE = 300
FACTS = {"objective": "causal_lm", "options": {"documents": "isolate"}, "sequence_length": 16, "global_batch": 4,
         "micro_batch": 2, "precision": "bf16", "seed": 9}  # fmt: skip


def folder_of(title: str, folder: Path, **facts: Any) -> str:
    """A model with random weights as it is exported, and a tokenizer."""
    case = next(case for case in CASES if case.title == title)
    vocabulary = Vocabulary(SIZE, eos=0, pad=1, bos=2)
    workload = TransformerWorkload(case.model, case.config.changed({"vocab_size": SIZE}), None, vocabulary)
    folder.mkdir()
    workload.to_hf(random_state(workload).__getitem__, str(folder))
    (folder / "tokenizer.json").write_text(train_bytes(["a text of some words"] * 9, SIZE, ["<pad>"]))
    if facts:
        (folder / "export.json").write_text(json.dumps(facts))
    return str(folder)


def test_an_export_is_evaluated_as_its_commit_was_trained(tmp_path: Path) -> None:
    folder = folder_of("GPT-2", tmp_path / "export", step=12, evaluation=FACTS)
    assert is_export(folder)
    assert not is_export(str(tmp_path))
    spec, step = spec_of_export(folder, {"wiki": "/w/*.txt"}, ["train.precision=fp32"])
    assert step == 12
    assert (spec.workload.objective, spec.workload.options) == ("causal_lm", {"documents": "isolate"})
    assert (spec.data.sequence_length, spec.train.global_batch, spec.seed) == (16, 4, 9)
    assert (spec.train.precision, list(spec.set_sources)) == ("fp32", ["wiki"])
    assert workload_of_export(spec).vocabulary.eos == 0


@pytest.mark.parametrize(
    ("evaluation", "says"),
    [
        ({"objective": "conversation", "chat": True, "chat_date": "2026-01-31"}, "31 a!"),
        ({"objective": "conversation"}, f"{date.today():%d} a!"),  # of an earlier version
        ({"objective": "dpo", "chat": False}, None),
        ({"objective": "causal_lm"}, None),
        (None, f"{date.today():%d} a!"),  # another's, who knows no more than that it has a template
    ],
)
def test_an_export_is_asked_as_its_commit_was(
    tmp_path: Path, evaluation: dict[str, Any] | None, says: str | None
) -> None:
    facts = {} if evaluation is None else {"evaluation": {**FACTS, "options": {}, **evaluation}}
    folder = folder_of("GPT-2", tmp_path / "export", **facts)
    Path(folder, "chat_template.jinja").write_text("{{ strftime_now('%d') }} {{ messages[0].content }}!")
    spec, _ = spec_of_export(folder, {})
    tokenizer = tokenizer_of_export(spec.data, spec.workload)
    chat = chat_of_export(spec.data, spec.workload, tokenizer)
    assert (chat and tokenizer.decode(chat.row("a"))) == says
    Path(folder, "chat_template.jinja").unlink()
    assert chat_of_export(spec.data, spec.workload, tokenizer) is None
    other, _ = spec_of_export(folder, {}, ["workload.objective=causal_lm"])
    assert other.data.chat_date is None


def test_an_export_without_its_class_weights_is_evaluated_without_any(tmp_path: Path) -> None:
    """One of an earlier version, whose accuracy does not depend on them."""
    known = {**FACTS, "objective": "sequence_classification", "options": {"class_weights": "balanced"},
             "labels": ["a", "b"], "field": {"text": "t", "label": "l"}}  # fmt: skip
    folder = folder_of("BERT", tmp_path / "export", evaluation=known)
    spec, _ = spec_of_export(folder, {"rows": "/w/*.jsonl"})
    assert spec.workload.options == {}
    (line,) = notes_of_export(folder, spec.workload)
    assert "lacks the class weights of its training (balanced), so losses are not weighted" in line
    spec, _ = spec_of_export(folder, {"rows": "/w/*.jsonl"}, ["workload.options.class_weights=[1, 2]"])
    assert spec.workload.options == {"class_weights": [1, 2]}
    assert notes_of_export(folder, spec.workload) == []


def test_an_export_has_no_reference_to_be_compared_with(tmp_path: Path) -> None:
    """By itself it would be its own, and every margin 0. What needs none, such as tasks, it can be evaluated by."""
    known = {
        **FACTS,
        "objective": "dpo",
        "options": {},
        "field": {"prompt": "p", "chosen": "c", "rejected": "r"},
    }
    folder = folder_of("GPT-2", tmp_path / "export", step=12, evaluation=known)
    with pytest.raises(
        InputError, match="was trained with dpo, whose reference an export lacks; evaluate the"
    ):
        spec_of_export(folder, {"pairs": "/w/*.jsonl"})
    spec, _ = spec_of_export(folder, {})
    assert workload_of_export(spec).objective.name == "dpo"


@pytest.mark.parametrize(
    ("title", "objective"), [("GPT-2", "causal_lm"), ("T5", "seq2seq"), ("BERT", "masked_lm")]
)
def test_of_another_folder_the_class_says_by_what(title: str, objective: str, tmp_path: Path) -> None:
    spec, step = spec_of_export(folder_of(title, tmp_path / "theirs"), {})
    assert (step, spec.workload.objective, spec.data.sequence_length) == (0, objective, 24)
    assert spec.evaluate is None
    assert workload_of_export(spec).objective.name == objective
    if objective == "seq2seq":  # on text it is evaluated as it was pre-trained
        of_text, _ = spec_of_export(str(tmp_path / "theirs"), {"text": "/w/*.txt"})
        assert of_text.workload.objective == "denoising"
        told, _ = spec_of_export(str(tmp_path / "theirs"), {}, ["workload.objective=denoising"])
        assert told.workload.objective == "denoising"


def test_weights_that_are_missing_are_not_drawn_at_random(tmp_path: Path) -> None:
    folder = folder_of("BERT", tmp_path / "theirs")
    weights = Path(folder, "model.safetensors")
    kept = {name: tensor for name, tensor in load_file(weights).items() if not name.startswith("cls.")}
    save_file(kept, weights, {"format": "pt"})
    spec, _ = spec_of_export(folder, {})
    with pytest.raises(InputError, match=r"has no weights for head\..*masked_lm needs it"):
        workload_of_export(spec)
    weights.unlink()
    with pytest.raises(InputError, match="has a configuration but no weights; give a folder with"):
        workload_of_export(spec)


def test_a_mark_that_is_torn_is_told(tmp_path: Path) -> None:
    folder = folder_of("GPT-2", tmp_path / "export")
    Path(folder, "export.json").write_text('{"step": ')
    with pytest.raises(InputError, match=r"export\.json: cannot be read .*; export the commit again"):
        spec_of_export(folder, {})


def test_a_head_that_a_class_run_as_it_is_lacks_is_not_drawn_at_random(tmp_path: Path) -> None:
    from transformers import CamembertConfig, CamembertForMaskedLM

    folder = folder_of("GPT-2", tmp_path / "export")
    sizes = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
        "max_position_embeddings": 34,
    }  # fmt: skip
    CamembertForMaskedLM(CamembertConfig(vocab_size=SIZE, **sizes)).save_pretrained(folder)
    told = ["workload.objective=sequence_classification", 'data.labels=["a", "b"]']
    spec, _ = spec_of_export(folder, {}, told)
    with pytest.raises(InputError, match=r"has no weights for classifier\.dense\.weight"):
        workload_of_export(spec)


@pytest.mark.parametrize(("batch", "size"), [(4, 2), (1, 1)])
def test_a_batch_that_is_lowered_lowers_the_micro_batch(
    batch: int, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does where the memory was too little."""
    folder = folder_of("GPT-2", tmp_path / "export", step=12, evaluation=FACTS)
    spec, _ = spec_of_export(folder, {"wiki": "/w/*.txt"}, [f"train.global_batch={batch}"])
    found: list[int] = []
    monkeypatch.setattr(of_export.Task, "for_evaluation", lambda spec, size, **more: found.append(size))
    monkeypatch.setattr(of_export, "row_of", lambda spec, task: {})
    assert evaluate_export(
        spec.model_dump(mode="json"),
        PreparedData("/data"),
        12,
        model=spec.workload.model,
        global_batch=spec.train.global_batch,
        worker=spec.resources.per_worker,
    ) == {"step": 12}
    assert found == [size]


def test_the_labels_of_a_classifier_are_those_that_its_folder_names(tmp_path: Path) -> None:
    transformers.BertConfig(id2label={0: "bad", 1: "good"}).save_pretrained(tmp_path)
    asked = ["workload.objective=sequence_classification"]
    assert spec_of_export(str(tmp_path), {"set": "/w/*.jsonl"}, asked)[0].data.labels == ["bad", "good"]
    asked.append("data.labels=[good, bad]")
    assert spec_of_export(str(tmp_path), {"set": "/w/*.jsonl"}, asked)[0].data.labels == ["good", "bad"]
