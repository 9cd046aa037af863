"""Exports in processes of their own: their metrics equal those of a plain loop, and what cannot run is told by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import transformers

from orchestrator.bench.export_folder import ExportFolder, Runtime, read_exports
from orchestrator.bench.inputs import CLASSES, LABELS, MASK, TOKENS, Inputs, comparable_metric
from orchestrator.bench.measure import ExportFailed, Measured, measure_exports, to_json
from orchestrator.config.errors import InputError
from orchestrator.extensions.onnx.write import export_onnx

SMALL = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT = transformers.BertConfig(**SMALL, intermediate_size=32, max_position_embeddings=16, num_labels=3)
GPT2 = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16)


def saved(model: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


def of_classes(samples: int = 70) -> Inputs:
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 13, samples)
    return Inputs(
        {
            TOKENS: rng.integers(1, 50, (samples, 12)),
            MASK: np.arange(12) < lengths[:, None],
            CLASSES: rng.integers(0, 3, samples),
        },
        "sequence_classification",
        ("a", "b", "c"),
        tokens_per_byte=0.0,
    )


def measured(
    folders: list[str], inputs: Inputs, rounds: int = 0, batches: tuple[int, ...] = (1,)
) -> list[Measured]:
    exports = read_exports(folders)
    return measure_exports(
        exports, [inputs] * len(exports), batches, rounds, threads=1, tell=lambda status: None
    )


@pytest.mark.slow
def test_a_classifier_in_both_runtimes_scores_as_a_plain_loop_does(tmp_path: Path) -> None:
    plain = saved(transformers.BertForSequenceClassification(BERT), tmp_path / "plain")
    (tmp_path / "onnx").mkdir()
    export_onnx(str(plain), str(tmp_path / "onnx"))
    inputs = of_classes()
    model = transformers.BertForSequenceClassification.from_pretrained(plain).eval()
    tokens, mask = (torch.from_numpy(inputs.arrays[name]) for name in (TOKENS, MASK))
    with torch.no_grad():
        logits = model(input_ids=tokens, attention_mask=mask.long()).logits
    wanted = torch.from_numpy(inputs.arrays[CLASSES])
    found = measured([str(plain), str(tmp_path / "onnx")], inputs, rounds=2, batches=(1, 8))
    assert [each.export.runtime for each in found] == [Runtime.TRANSFORMERS, Runtime.ONNX]
    for each in found:
        assert each.metrics["accuracy"] == (logits.argmax(-1) == wanted).double().mean().item()
        assert each.metrics["loss"] == pytest.approx(
            torch.nn.functional.cross_entropy(logits, wanted).item(), rel=1e-5
        )
        assert each.export.parameters == sum(p.numel() for p in model.parameters())
        assert [speed.batch for speed in each.speeds] == [1, 8]
        assert all(0 < speed.p50 <= speed.p95 and speed.tokens_per_second > 0 for speed in each.speeds)
    assert found[1].memory < found[0].memory, "an ONNX model needs no torch"
    rows = to_json(found, "accuracy")
    assert [row["share"] for row in rows] == [1.0, 1.0]
    assert rows[0]["weights_bytes"] == (plain / "model.safetensors").stat().st_size
    assert rows[1]["smaller"] == rows[0]["weights_bytes"] / (tmp_path / "onnx/model.onnx").stat().st_size
    json.dumps(rows)


@pytest.mark.slow
def test_a_language_model_scores_as_a_plain_loop_does(tmp_path: Path) -> None:
    plain = saved(transformers.GPT2LMHeadModel(GPT2), tmp_path / "plain")
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 50, (9, 12))
    labels = np.where(rng.random((9, 12)) < 0.7, rng.integers(0, 50, (9, 12)), -100)
    arrays = {TOKENS: tokens, MASK: np.ones((9, 12), dtype=bool), LABELS: labels}
    (found,) = measured([str(plain)], Inputs(arrays, "causal_lm", (), tokens_per_byte=0.25))
    model = transformers.GPT2LMHeadModel.from_pretrained(plain).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(tokens)).logits.flatten(0, 1)
    losses = torch.nn.functional.cross_entropy(
        logits, torch.from_numpy(labels).flatten(), reduction="sum"
    ).item()
    count = int((labels != -100).sum())
    assert found.metrics["perplexity"] == pytest.approx(math.exp(losses / count), rel=1e-5)
    assert found.metrics["bits_per_byte"] == pytest.approx(losses / count / math.log(2) * 0.25, rel=1e-5)
    assert found.export.parameters == model.num_parameters(), "a tied table counts once"
    assert found.speeds == []


@pytest.mark.slow
def test_metrics_that_are_known_are_not_measured_again(tmp_path: Path) -> None:
    plain = saved(transformers.BertForSequenceClassification(BERT), tmp_path / "plain")
    phases: list[str] = []
    (found,) = measure_exports(
        read_exports([str(plain)]),
        [of_classes()],
        batches=(1,),
        rounds=1,
        threads=1,
        tell=lambda status: phases.append(status["phase"]),
        known={str(plain): {"accuracy": 0.25}},
    )
    assert found.metrics == {"accuracy": 0.25}
    assert "score" not in phases
    assert found.speeds[0].p50 > 0


def row(accuracy: float, perplexity: float) -> Measured:
    export = ExportFolder("a", "/a", Runtime.TRANSFORMERS, weights_bytes=1, parameters=1)
    return Measured(
        export, {"accuracy": accuracy, "perplexity": perplexity}, memory=1, load_seconds=1.0, speeds=[]
    )


def test_a_share_is_below_one_for_the_worse_model_whatever_the_metric() -> None:
    first, other = row(0.8, 20.0), row(0.6, 25.0)
    assert other.share("accuracy", first) == pytest.approx(0.75)
    assert other.share("perplexity", first) == pytest.approx(0.8)


@pytest.mark.slow
def test_an_export_that_cannot_be_loaded_is_named_and_leaves_no_process(tmp_path: Path) -> None:
    good = saved(transformers.BertForSequenceClassification(BERT), tmp_path / "good")
    bad = saved(transformers.BertForSequenceClassification(BERT), tmp_path / "bad")
    content = (bad / "model.safetensors").read_bytes()
    (bad / "model.safetensors").write_bytes(content[: len(content) // 2])
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(ExportFailed, match=r"^bad: .*") as error:
        measured([str(good), str(bad)], of_classes())
    assert "\n" not in str(error.value)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "has no readable config.json"),
        ({"config.json": '{"architectures": ["BertModel"]}'}, "has a configuration but no weights"),
        ({"config.json": "{}", "model.gguf": "x"}, "is a GGUF file"),
        (
            {"config.json": '{"architectures": ["NoModel"]}', "model.safetensors": "x"},
            "is of the class 'NoModel'",
        ),
    ],
)
def test_a_folder_that_cannot_be_measured_is_refused(
    tmp_path: Path, files: dict[str, str], says: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=says):
        read_exports([str(tmp_path)])


def test_an_export_is_measured_once_and_named_by_what_tells_it_apart(tmp_path: Path) -> None:
    for name in ("one", "two"):
        saved(transformers.BertForSequenceClassification(BERT), tmp_path / name / "export")
    places = [str(tmp_path / name / "export") for name in ("one", "two")]
    assert [export.name for export in read_exports(places)] == ["one/export", "two/export"]
    with pytest.raises(InputError, match="is named twice"):
        read_exports([places[0], f"{places[0]}/../export"])
    with pytest.raises(InputError, match="is not on this machine"):
        read_exports(["s3://bucket/export"])


def test_means_over_other_tokens_are_not_compared() -> None:
    """A vocabulary of which a text needs more tokens has the lower perplexity for the same probability of the text."""
    folders = [ExportFolder(name, f"/{name}", Runtime.TRANSFORMERS, 1, 1) for name in ("whole", "cut")]

    def of(tokens: int, per_byte: float) -> Inputs:
        labels = np.array([[1] * tokens + [-100] * (8 - tokens)])
        return Inputs({TOKENS: labels, LABELS: labels}, "causal_lm", (), tokens_per_byte=per_byte)

    same, other = [of(6, 0.5), of(6, 0.5)], [of(6, 0.5), of(8, 0.6)]
    assert comparable_metric(folders, same, None, "--metric") == "perplexity"
    assert comparable_metric(folders, other, "bits_per_byte", "--metric") == "bits_per_byte"
    says = "/cut: reads the rows as 8 tokens, and whole as 6: their perplexity cannot be compared"
    with pytest.raises(InputError) as error:
        comparable_metric(folders, other, None, "--metric")
    assert str(error.value) == f"{says}; set --metric to bits_per_byte"
    with pytest.raises(InputError, match="bits_per_byte is not measured"):
        comparable_metric(folders, [of(6, 0.5), of(6, 0.0)], "bits_per_byte", "--metric")
