"""Weights in compressed-tensors' form, written by its own compressor, are read in whole and in parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file

from workloads.errors import WorkloadError
from workloads.hf.files.compressed_weights import check_form, rounds_activations
from workloads.hf.files.weight_files import Weights


@pytest.mark.parametrize("form", ["pack-quantized", "int-quantized"])
@pytest.mark.parametrize(("bits", "group"), [(4, 16), (8, 32), (8, 0), (4, 0)])
def test_a_weight_is_read_in_whole_and_in_parts(form: str, bits: int, group: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight = torch.randn(12, 96)
    how = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(num_bits=bits, symmetric=True, **how)
    )
    scale = weight.unflatten(1, (-1, group or 96)).abs().amax(-1) / (2 ** (bits - 1) - 1)
    compressor = BaseCompressor.get_value_from_registry(form)
    state = compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    save_file({f"a.{name}": tensor.contiguous() for name, tensor in state.items()} | {"b": torch.ones(3)},
              tmp_path / "model.safetensors")  # fmt: skip
    wanted = compressor.decompress(state, scheme)["weight"]
    stored = Weights(str(tmp_path))
    assert sorted(stored.names) == ["a.weight", "b"]
    assert stored.shape("a.weight") == (12, 96)
    assert torch.equal(stored.read("a.weight"), wanted)
    assert torch.equal(stored.part("a.weight", (slice(3, 7), slice(20, 50))), wanted[3:7, 20:50])


@pytest.mark.parametrize(
    ("changes", "is_read"),
    [
        ({}, True),
        ({"symmetric": False}, False),
        ({"num_bits": 3}, False),
        ({"type": "float"}, False),
    ],
)
def test_only_symmetric_integers_are_read(changes: dict[str, object], is_read: bool) -> None:
    weights = {"num_bits": 4, "symmetric": True, "type": "int", **changes}
    described = {"format": "pack-quantized", "config_groups": {"all": {"weights": weights}}}
    assert not rounds_activations(described)
    if is_read:
        check_form(described, "folder")
        return
    with pytest.raises(WorkloadError, match="only symmetric integers of 4 or 8 bits can be read"):
        check_form(described, "folder")
