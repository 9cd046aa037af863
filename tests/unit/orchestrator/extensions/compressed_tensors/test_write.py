"""Exports in compressed-tensors' form: transformers computes what our model with fake quantisation does, also of a
class that runs as it is, and what the form cannot hold is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from traced_cases import vocabulary_of
from transformers import GPTNeoXConfig

from orchestrator.export.quantised import schemes_by_name
from orchestrator.extensions.compressed_tensors.write import export_compressed
from workloads.errors import WorkloadError
from workloads.hf.check.compare import difference, probes
from workloads.inference import with_weights
from workloads.load import load
from workloads.model.fake_quantise import quantised_layers
from workloads.model.scheme import Scheme
from workloads.workload import Workload

SIZES = {"hidden": 64, "heads": 4, "layers": 2, "intermediate": 96}


def exported(workload: Workload, scheme: Scheme, folder: Path) -> list[str]:
    """Write the model with weights larger than initial ones; returns the layers in full precision."""
    (folder / "plain").mkdir()
    (folder / "out").mkdir()
    workload.to_hf(read(workload), str(folder / "plain"))
    with torch.device("meta"):
        model = workload.build()
    weights = workload.hf_weights([*quantised_layers(model, workload.blocks(model), scheme)])
    chosen = schemes_by_name(scheme, weights)
    return export_compressed(str(folder / "plain"), str(folder / "out"), chosen)


def read(workload: Workload):  # type: ignore[no-untyped-def]
    return lambda name: workload.initial(name, 3) * (4 if name.endswith("weight") else 1)


@pytest.mark.parametrize("model", ["qwen3-tiny", "bert-tiny", "class"])
def test_transformers_computes_the_same(model: str, tmp_path: Path) -> None:
    objective, changes = ("masked_lm" if model == "bert-tiny" else "causal_lm"), dict(SIZES)
    if model == "class":
        sizes = {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 96,
        }
        config = GPTNeoXConfig(vocab_size=192, max_position_embeddings=64, **sizes)
        config.architectures = ["GPTNeoXForCausalLM"]
        config.save_pretrained(tmp_path / "class")
        model, changes = f"hf:{tmp_path / 'class'}", {}
    workload = load(model, objective, vocabulary_of(192), changes=changes, sequence_length=16)
    scheme = Scheme("int4", 32, keep=("*.0.attention.*",), int8=("*.1.attention.*",))
    kept = exported(workload, scheme, tmp_path)
    assert any(".0." in name for name in kept)
    assert not any(".1." in name for name in kept)
    text = torch.arange(400) % 180 + 6
    tried = [*probes(workload.config, workload.vocabulary, text, (16, 7))]
    for each, least, most in ((scheme, 0.0, 1e-5), (None, 1e-3, 9.0)):
        ours = with_weights(workload, read(workload), scheme=each)
        found = difference(workload.config, ours, str(tmp_path / "out"), tried, in_fp64=True)
        assert least <= found < most
    about = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert about["ignore"] == kept
    formats = {group["weights"]["num_bits"]: group["targets"] for group in about["config_groups"].values()}
    assert formats.keys() == {4, 8}
    assert {".1." in name and "att" in name for name in formats[8]} == {True}
    assert not {*formats[4]} & {*formats[8]}


def test_a_layer_that_is_no_linear_one_in_transformers_is_refused(tmp_path: Path) -> None:
    workload = load("gpt-tiny", "causal_lm", vocabulary_of(192), changes=SIZES, sequence_length=16)
    with pytest.raises(
        WorkloadError, match="outside a linear layer, and compressed-tensors quantises linear layers only"
    ):
        exported(workload, Scheme("int4", 32), tmp_path)


def test_weights_that_transformers_joins_are_quantised_together() -> None:
    workload = load("gpt-tiny", "causal_lm", vocabulary_of(192), changes=SIZES, sequence_length=16)
    query = [name for name in workload.shapes if name.endswith("attention.query.weight")]
    with pytest.raises(WorkloadError, match="joins quantised weights and others"):
        workload.hf_weights(query)
    both = [*query, *(name.replace(".query.", f".{other}.") for name in query for other in ("key", "value"))]
    joined = workload.hf_weights(both)
    assert {len(ours) for ours in joined.values()} == {3}
    with pytest.raises(WorkloadError, match="joins weights of 4 and of 8 bits"):
        schemes_by_name(Scheme("int4", int8=("*.query.*",)), joined)
