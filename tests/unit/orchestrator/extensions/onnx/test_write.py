"""ONNX models of encoders: onnxruntime computes what transformers does, at other lengths than that of the trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers
from torch import nn
from traced_cases import vocabulary_of

from orchestrator.export.quantised import schemes_by_name
from orchestrator.extensions.onnx import write as onnx_export
from orchestrator.extensions.onnx.write import _RoundedLinear, export_onnx
from workloads.errors import WorkloadError
from workloads.inference import with_weights
from workloads.load import load
from workloads.model.fake_quantise import FakeQuantiser, quantise, quantised_layers
from workloads.model.scheme import Scheme

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
    with pytest.raises(RuntimeError, match=r"onnxruntime's logits of [0-9]+ tokens differ by"):
        export_onnx(str(tmp_path / "hf"), str(tmp_path))


def test_what_is_no_encoder_or_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "hf", "DistilBertForTokenClassification")
    monkeypatch.setattr(onnx_export, "LARGEST", 1000)
    with pytest.raises(WorkloadError, match="an ONNX file holds at most 2"):
        export_onnx(str(tmp_path / "hf"), str(tmp_path))
    about = json.loads((tmp_path / "hf" / "config.json").read_text())
    about |= {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(about))
    with pytest.raises(WorkloadError, match=r"supports single encoders .*, but this is GPT2LMHeadModel"):
        export_onnx(str(tmp_path / "hf"), str(tmp_path))
    assert not (tmp_path / "model.onnx").exists()


@pytest.mark.parametrize("preset", ["bert-tiny", "albert-tiny"])
def test_a_model_that_trained_for_int8_has_its_integers_and_computes_the_same(
    preset: str, tmp_path: Path
) -> None:
    """onnxruntime does what our model with fake quantisation does."""
    sizes = {"hidden": 64, "layers": 2, "heads": 4, "intermediate": 128}
    workload = load(preset, "masked_lm", vocabulary_of(192), changes=sizes, sequence_length=32)
    scheme = Scheme("int8", 0, keep=("*.attention.query.weight",))

    def read(name: str) -> torch.Tensor:
        return workload.initial(name, 3) * (4 if name.endswith("weight") else 1)

    (tmp_path / "hf").mkdir()
    workload.to_hf(read, str(tmp_path / "hf"))
    with torch.device("meta"):
        blank = workload.build()
    chosen = [*quantised_layers(blank, workload.blocks(blank), scheme)]
    written = export_onnx(
        str(tmp_path / "hf"), str(tmp_path), schemes_by_name(scheme, workload.hf_weights(chosen))
    )
    assert written.difference is not None
    assert written.difference < 1e-5
    assert written.rounding is not None
    assert written.rounding > 1e-3
    assert any("query" in name for name in written.kept)
    graph = onnx.load(str(tmp_path / "model.onnx")).graph
    stored = [onnx.numpy_helper.to_array(each) for each in graph.initializer]
    in_8 = sorted((each.T.tobytes() for each in stored if each.dtype == np.int8), key=hash)
    wanted = [quantise(read(name), scheme)[0].flatten(1).to(torch.int8).numpy().tobytes() for name in chosen]
    assert in_8 == sorted(wanted, key=hash)
    tokens = torch.arange(60).view(3, 20) * 7 % 180 + 6
    given = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "token_type_ids": torch.zeros_like(tokens),
    }
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {each.name: given[each.name].numpy() for each in session.get_inputs()})
    ours = with_weights(workload, read, scheme=scheme)({"tokens": tokens}).logits
    torch.testing.assert_close(torch.from_numpy(found), ours, rtol=1e-5, atol=1e-5)


def test_a_layer_with_rounded_tokens_multiplies_the_integers_of_training(tmp_path: Path) -> None:
    """Sums of the largest integers are not cut off, and a token of zeros is zero."""
    torch.manual_seed(0)
    layer = nn.Linear(256, 48)
    x = torch.randn(2, 5, 256) * torch.logspace(-3, 3, 5)[:, None]
    with torch.no_grad():
        layer.weight[0], x[0, 0], x[0, 1] = 1.0, 3.0, 0.0
    rounded = _RoundedLinear(layer, rounds_tokens=True)
    torch.onnx.export(
        rounded, (x,), str(tmp_path / "layer.onnx"), input_names=["x"], opset_version=17, dynamo=False
    )
    session = onnx_export.session_of(tmp_path / "layer.onnx")
    (found,) = session.run(None, {"x": x.numpy()})
    wanted = FakeQuantiser(Scheme("int8", 0, activations=True))(x, layer.weight, layer.bias).detach()
    size = wanted.abs().amax(-1, keepdim=True)
    assert ((torch.from_numpy(found) - wanted).abs() / size).max() < 1e-5
    kinds = [each.op_type for each in onnx.load(str(tmp_path / "layer.onnx")).graph.node]
    (stored,) = (
        onnx.numpy_helper.to_array(each)
        for each in onnx.load(str(tmp_path / "layer.onnx")).graph.initializer
        if each.data_type == onnx.TensorProto.UINT8 and len(each.dims) == 2
    )
    integers = quantise(layer.weight.detach(), Scheme("int8", 0))[0].flatten(1)
    assert np.array_equal(stored.T.astype(int) - 128, integers.numpy().astype(int))
    assert "MatMulInteger" in kinds
    assert "MatMul" not in kinds
