"""ONNX models of encoders: onnxruntime computes what transformers does, at other lengths than that of the trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
import transformers

from orchestrator.extensions.onnx import write as onnx_export
from orchestrator.extensions.onnx.write import export_onnx
from workloads.errors import WorkloadError

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
DISTIL = {"vocab_size": 97, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
CASES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "BertForPreTraining": ("bert", SIZES, ["prediction_logits", "seq_relationship_logits"]),
    "XLMRobertaForSequenceClassification": ("xlm-roberta", SIZES, ["logits"]),
    "DistilBertForTokenClassification": ("distilbert", DISTIL, ["logits"]),
    "AlbertModel": ("albert", SIZES | {"embedding_size": 16}, ["last_hidden_state", "pooler_output"]),
}


def write(folder: Path, case: str) -> Any:
    kind, sizes, _ = CASES[case]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, max_position_embeddings=66, pad_token_id=1, **sizes)
    model = getattr(transformers, case)(config).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("case", CASES)
def test_onnxruntime_computes_the_same(case: str, tmp_path: Path) -> None:
    model = write(tmp_path / "hf", case)
    export_onnx(str(tmp_path / "hf"), str(tmp_path))
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    assert [output.name for output in session.get_outputs()] == CASES[case][2]
    assert (tmp_path / "config.json").exists()
    names = [given.name for given in session.get_inputs()]
    for rows, length in ((1, 5), (4, 40)):
        tokens = torch.randint(2, 97, (rows, length))
        mask = torch.ones(rows, length, dtype=torch.int64)
        mask[-1, 3:] = 0
        tokens = tokens.masked_fill(mask == 0, 1)
        batch = {"input_ids": tokens, "attention_mask": mask, "token_type_ids": torch.zeros_like(tokens)}
        batch = {name: batch[name] for name in names}
        with torch.no_grad():
            wanted = model(**batch)
        found = session.run(None, {name: tensor.numpy() for name, tensor in batch.items()})
        for name, value in zip(CASES[case][2], found, strict=True):
            one, other = wanted[name], torch.from_numpy(value)
            if one.shape[:2] == tokens.shape:
                one, other = one[mask.bool()], other[mask.bool()]
            torch.testing.assert_close(other, one, rtol=0, atol=1e-4)


def test_another_model_in_the_file_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "hf", "DistilBertForTokenClassification")
    plain = onnx_export._batch

    def swapped(model: Any, inputs: Any, length: int) -> Any:
        found = plain(model, inputs, length)
        if length == 8:  # that of the trace
            with torch.no_grad():
                model.classifier.weight.mul_(2)
        elif length == 7:
            with torch.no_grad():
                model.classifier.weight.div_(2)
        return found

    monkeypatch.setattr(onnx_export, "_batch", swapped)
    with pytest.raises(RuntimeError, match="onnxruntime's logits of 7 tokens differ by"):
        export_onnx(str(tmp_path / "hf"), str(tmp_path))


def test_what_is_no_encoder_or_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "hf", "DistilBertForTokenClassification")
    monkeypatch.setattr(onnx_export, "LARGEST", 1000)
    with pytest.raises(WorkloadError, match="a file of ONNX holds 2"):
        export_onnx(str(tmp_path / "hf"), str(tmp_path))
    about = json.loads((tmp_path / "hf" / "config.json").read_text())
    about |= {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(about))
    with pytest.raises(WorkloadError, match=r"written of single encoders .*, but this is GPT2LMHeadModel"):
        export_onnx(str(tmp_path / "hf"), str(tmp_path))
    assert not (tmp_path / "model.onnx").exists()
