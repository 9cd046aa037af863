"""Which label each row of a pretrained head predicts: by the folder's names, whatever the order of the job's labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from workloads.errors import WorkloadError
from workloads.hf.as_they_are.workload import HuggingFaceWorkload
from workloads.hf.check.behaviour import trained_model
from workloads.hf.files.meaning import folder_meaning
from workloads.load import load
from workloads.transformer_workload import TransformerWorkload
from workloads.workload import Batch, Vocabulary

SIZE, LENGTH = 97, 12
KNOWN = Vocabulary(SIZE, eos=4, pad=1, bos=2, cls=3, sep=5, mask=6)
THEIRS, OURS = ("bad", "fair", "good"), ("good", "bad", "fair")
WIDTHS = {"vocab_size": SIZE, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
          "intermediate_size": 32, "max_position_embeddings": 64, "pad_token_id": 1}  # fmt: skip
PAIR = {"vocab_size": SIZE, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 64,
        "pad_token_id": 1, "eos_token_id": 4, "bos_token_id": 2, "decoder_start_token_id": 4}  # fmt: skip
GROUPED = {**WIDTHS, "num_key_value_heads": 1, "head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": WIDTHS,
    "Roberta": WIDTHS,
    "XLMRoberta": WIDTHS,
    "DistilBert": {"vocab_size": SIZE, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "pad_token_id": 1},
    "Albert": {**WIDTHS, "embedding_size": 8},
    "Electra": {**WIDTHS, "embedding_size": 8},
    "DebertaV2": {**WIDTHS, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8,
                  "share_att_key": True, "norm_rel_ebd": "layer_norm"},
    "MPNet": WIDTHS,
    "Ernie": WIDTHS,
    "GPT2": {"vocab_size": SIZE, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "pad_token_id": 1},
    "Llama": {**WIDTHS, "num_key_value_heads": 1},
    "Mistral": GROUPED,
    "Qwen2": {**WIDTHS, "num_key_value_heads": 1},
    "Qwen3": GROUPED,
    "Gemma3Text": GROUPED,
    "Mixtral": {**GROUPED, "num_local_experts": 2},
    # These are run as they are.
    "Camembert": {**WIDTHS, "max_position_embeddings": 66, "type_vocab_size": 1},
    "Deberta": WIDTHS,
    "ModernBert": {**WIDTHS, "local_attention": 8},
    "XLNet": {"vocab_size": SIZE, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32, "pad_token_id": 1},
    "Bloom": {"vocab_size": SIZE, "hidden_size": 16, "n_layer": 2, "n_head": 2, "pad_token_id": 1},
    "XLM": {"vocab_size": SIZE, "emb_dim": 16, "n_layers": 1, "n_heads": 2, "max_position_embeddings": 64,
            "pad_index": 1, "pad_token_id": 1},
    "T5": {"vocab_size": SIZE, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2,
           "pad_token_id": 1, "eos_token_id": 4, "decoder_start_token_id": 1},
    "Bart": PAIR,
}  # fmt: skip
HEADS = {"sequence_classification": "SequenceClassification", "token_classification": "TokenClassification"}
CASES = [
    (family, objective)
    for family in FAMILIES
    for objective, head in HEADS.items()
    if hasattr(transformers, f"{family}For{head}")
    and (family, head) != ("T5", "TokenClassification")  # an encoder alone, which is refused
]
QUICK = [("Bert", "sequence_classification"), ("Bert", "token_classification"), ("GPT2", "sequence_classification"),
         ("Camembert", "sequence_classification")]  # fmt: skip


def folder_of(
    folder: Path, family: str, objective: str, labels: tuple[str, ...] | None = THEIRS, **more: Any
) -> Any:
    """A folder of transformers, whose random head has rows of any size; and its model."""
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family], **more)
    if labels:
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: number for number, label in enumerate(labels)}
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}For{HEADS[objective]}")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.tie_weights()
    model.save_pretrained(folder)
    return model


def begun(folder: Path, objective: str, labels: tuple[str, ...] = OURS, **more: Any) -> Any:
    return load(f"hf:{folder}", objective, KNOWN, sequence_length=LENGTH, labels=labels, **more)


def built(workload: Any) -> Any:
    if isinstance(workload, HuggingFaceWorkload):
        return trained_model(workload, 0).eval()
    model = workload.build()
    model.load_state_dict({name: workload.initial(name, 0) for name in workload.shapes})
    return model.eval()


def batch_of(objective: str, labels: tuple[str, ...], said: tuple[str, ...]) -> Batch:
    """Texts of several lengths, with what is `said` of them as numbers of these labels."""
    tokens = torch.randint(7, SIZE, (len(said), LENGTH), generator=torch.Generator().manual_seed(0))
    padding = torch.arange(LENGTH) < torch.tensor([LENGTH - n for n in range(len(said))])[:, None]
    tokens = tokens.where(padding, 1)
    tokens[torch.arange(len(said)), padding.sum(1) - 1] = 4  # where BART reads
    numbers = torch.tensor([labels.index(each) for each in said])
    batch = {"tokens": tokens, "padding": padding}
    if objective == "sequence_classification":
        return {**batch, "sequence_labels": numbers}
    return {**batch, "labels": numbers[:, None].where(padding, -100)}


@pytest.mark.proves("loss", objective="objective", family="family")
@pytest.mark.proves("labels", objective="objective", family="family")
@pytest.mark.proves("export", objective="objective", family="family")
@pytest.mark.parametrize(
    ("family", "objective"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
    ids=str,
)
def test_a_head_predicts_the_labels_by_name(family: str, objective: str, tmp_path: Path) -> None:
    """Loss and accuracy before the first step are those of transformers on the folder, and so is the export."""
    theirs, said = folder_of(tmp_path / "in", family, objective), ("fair", "good", "bad", "good")
    workload = begun(tmp_path / "in", objective)
    assert any("its rows follow data.labels by name" in note for note in workload.notes)
    model, batch = built(workload), batch_of(objective, OURS, said)
    given = {"input_ids": batch["tokens"], "attention_mask": batch["padding"].long()}
    known = batch_of(objective, THEIRS, said)
    labels = known.get("sequence_labels", known.get("labels"))
    with torch.no_grad():
        ours, wanted = workload.loss(model, batch), theirs(**given, labels=labels)
    torch.testing.assert_close(ours.total / ours.count, wanted.loss, rtol=1e-5, atol=1e-6)
    right = (wanted.logits.argmax(-1) == labels) & (labels != -100)
    assert int(ours.correct) == int(right.sum())

    workload.to_hf(lambda name: workload.initial(name, 0), str(tmp_path / "out"))
    again = getattr(transformers, f"AutoModelFor{HEADS[objective]}").from_pretrained(tmp_path / "out").eval()
    assert again.config.id2label == dict(enumerate(OURS))
    assert again.config.label2id == {label: number for number, label in enumerate(OURS)}
    with torch.no_grad():
        logits = again(**given).logits
    order = [THEIRS.index(label) for label in OURS]
    mask = batch["padding"] if objective == "token_classification" else slice(None)
    torch.testing.assert_close(logits[mask], wanted.logits[..., order][mask], rtol=1e-4, atol=1e-5)
    if objective == "sequence_classification":
        assert again.config.problem_type == "single_label_classification"


@pytest.mark.parametrize("family", ["Bert", "Camembert"])
def test_other_labels_are_refused_by_name_and_a_new_head_takes_any(family: str, tmp_path: Path) -> None:
    objective = "sequence_classification"
    folder_of(tmp_path, family, objective)
    with pytest.raises(
        WorkloadError,
        match=r"predicts bad, fair, good, and data.labels names poor; name the head's labels .*or rename them in "
        r"id2label of its config.json",
    ):
        begun(tmp_path, objective, ("poor", "fair", "good"))
    bare = getattr(transformers, f"{family}Model").from_pretrained(tmp_path)
    bare.save_pretrained(tmp_path / "bare")
    assert folder_meaning(str(tmp_path / "bare")).labels == THEIRS  # of the head that is gone
    workload = begun(tmp_path / "bare", objective, ("poor", "fair", "good"))
    assert any("start from random values" in note for note in workload.notes)


@pytest.mark.parametrize("family", ["Bert", "Camembert"])
@pytest.mark.parametrize("labels", [("bad", "good"), ("bad", "fair", "good", "great")])
def test_another_number_of_labels_is_refused_by_name(
    family: str, labels: tuple[str, ...], tmp_path: Path
) -> None:
    objective = "sequence_classification"
    folder_of(tmp_path / "named", family, objective)
    named = "great" if len(labels) > 3 else "bad, good"
    with pytest.raises(
        WorkloadError, match=rf"predicts bad, fair, good, and data.labels names {named}; name the head"
    ):
        begun(tmp_path / "named", objective, labels)
    folder_of(tmp_path / "unnamed", family, objective, None, num_labels=3)
    says = rf"predicts 3 labels, which have no names, and data.labels names {len(labels)} \(bad, .*\); name all of"
    with pytest.raises(WorkloadError, match=says):
        begun(tmp_path / "unnamed", objective, labels)


def test_a_number_is_not_trained_by_a_head_of_several_labels(tmp_path: Path) -> None:
    folder_of(tmp_path, "Bert", "sequence_classification")
    says = r"predicts 3 labels \(bad, fair, good\), and regression trains one number; give another checkpoint"
    with pytest.raises(WorkloadError, match=says):
        begun(tmp_path, "regression", ())


@pytest.mark.parametrize("family", ["Bert", "Camembert"])
def test_labels_that_nobody_named_are_taken_in_order_and_that_is_said(family: str, tmp_path: Path) -> None:
    objective = "sequence_classification"
    theirs = folder_of(tmp_path, family, objective, None, num_labels=3)
    workload = begun(tmp_path, objective)
    assert workload.notes[-1].endswith("its rows are taken for good, bad, fair, in this order")
    assert torch.equal(output_of(workload), bias_of(theirs))
    numbered = begun(tmp_path, objective, ("LABEL_2", "LABEL_0", "LABEL_1"))
    assert torch.equal(output_of(numbered), bias_of(theirs)[[2, 0, 1]])
    assert not begun(tmp_path, objective, ("LABEL_0", "LABEL_1", "LABEL_2")).notes


def bias_of(model: Any) -> torch.Tensor:
    found = model.classifier
    bias: torch.Tensor = getattr(found, "out_proj", found).bias.detach()
    return bias


def output_of(workload: TransformerWorkload | HuggingFaceWorkload) -> torch.Tensor:
    name = (
        "head.output.bias"
        if isinstance(workload, TransformerWorkload)
        else "network.classifier.out_proj.bias"
    )
    return workload.initial(name, 0)


@pytest.mark.parametrize("family", ["Bert", "Camembert"])
def test_a_run_of_an_earlier_version_keeps_the_rows_that_it_began_with(family: str, tmp_path: Path) -> None:
    objective = "sequence_classification"
    theirs = folder_of(tmp_path, family, objective, problem_type="multi_label_classification")
    for labels in (OURS, ("one", "two", "three")):
        workload = begun(tmp_path, objective, labels, rule=5)
        assert torch.equal(output_of(workload), bias_of(theirs))
        assert not workload.notes


@pytest.mark.parametrize("family", ["Bert", "Camembert"])
def test_a_head_of_another_problem_is_refused(family: str, tmp_path: Path) -> None:
    folder_of(tmp_path / "many", family, "sequence_classification", problem_type="multi_label_classification")
    says = r"trained for multi_label_classification, and sequence_classification trains single_label_classification"
    with pytest.raises(WorkloadError, match=says):
        begun(tmp_path / "many", "sequence_classification")
    folder_of(tmp_path / "one", family, "sequence_classification", ("likeness",), problem_type="regression")
    workload = begun(tmp_path / "one", "regression", ())
    workload.to_hf(lambda name: workload.initial(name, 0), str(tmp_path / "out"))
    found = folder_meaning(str(tmp_path / "out"))
    assert (found.labels, found.problem_type) == (("likeness",), "regression")


def test_the_meaning_of_a_folder_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objective = "sequence_classification"
    folder_of(tmp_path / "in", "Camembert", objective)
    reads: list[str] = []
    monkeypatch.setattr(
        "workloads.load.folder_meaning", lambda *given: reads.append("load") or folder_meaning(*given)
    )
    monkeypatch.setattr(
        "workloads.hf.as_they_are.workload.folder_meaning", lambda *_: reads.append("workload")
    )
    workload = begun(tmp_path / "in", objective)
    assert any("its rows follow data.labels by name" in note for note in workload.notes)
    workload.to_hf(lambda name: workload.initial(name, 0), str(tmp_path / "out"))
    assert reads == ["load"]


def test_numbers_that_are_no_rows_are_no_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "bert", "id2label": {"1": "a", "2": "b"}})
    )
    assert folder_meaning(str(tmp_path)).labels == ()


def test_names_that_transformers_loses_are_no_names_here(tmp_path: Path) -> None:
    """It reads id2label alone: of label2id it keeps neither the names nor their number."""
    named = {"model_type": "bert", "label2id": {label: number for number, label in enumerate(THEIRS)}}
    (tmp_path / "config.json").write_text(json.dumps(named))
    assert transformers.AutoConfig.from_pretrained(tmp_path).id2label == {0: "LABEL_0", 1: "LABEL_1"}
    assert folder_meaning(str(tmp_path)).labels == ()
