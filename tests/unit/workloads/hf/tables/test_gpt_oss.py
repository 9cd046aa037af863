"""Folders of gpt-oss: weights in MXFP4 and in bf16, and what the class cannot be."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from workloads.errors import WorkloadError
from workloads.hf.check.compare import TOLERANCE
from workloads.hf.convert.folder import describe_folder
from workloads.hf.convert.load_weights import pretrained
from workloads.hf.files import mxfp4
from workloads.hf.files.weight_files import Weights
from workloads.load import load
from workloads.model.config import TransformerConfig
from workloads.model.stored import whole
from workloads.transformer_workload import TransformerWorkload
from workloads.workload import Vocabulary

SIZES = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 32, "num_local_experts": 4,
         "num_experts_per_tok": 2, "sliding_window": 6, "max_position_embeddings": 64}  # fmt: skip
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"
WORDS = Vocabulary(97, eos=2, pad=1)


def stored(folder: Path, packed: bool) -> dict[str, Tensor]:
    """A folder with random weights in bf16; those of experts, if they are packed, in MXFP4."""
    config = transformers.GptOssConfig(**SIZES)
    config.architectures = ["GptOssForCausalLM"]
    config.save_pretrained(folder)
    random = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for name, tensor in transformers.GptOssForCausalLM(config).state_dict().items():
        if packed and name.endswith("_proj") and "experts" in name:
            experts, inputs, outputs = tensor.shape
            shape = (experts, outputs, inputs // mxfp4.GROUP)
            tensors[f"{name}_blocks"] = torch.randint(
                0, 256, (*shape, 16), generator=random, dtype=torch.uint8
            )
            tensors[f"{name}_scales"] = torch.randint(118, 124, shape, generator=random, dtype=torch.uint8)
        else:
            tensors[name] = (torch.randn(tensor.shape, generator=random) * 0.1).bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if packed:
        quantise(folder, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    return tensors


def quantise(folder: Path, method: dict[str, Any]) -> None:
    """Have config.json say that the weights are quantised."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": method}))


def test_numbers_of_4_bits_are_those_of_transformers() -> None:
    """All 256 bytes under all scales but those at the ends, whose products overflow."""
    every = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scales = torch.arange(1, 252, dtype=torch.uint8)
    blocks = every.expand(len(scales), 16, 16).contiguous()
    exponents = scales[:, None].expand(-1, 16).contiguous()
    theirs = convert_moe_packed_tensors(blocks[:, :, None], exponents[:, :, None])
    assert torch.equal(mxfp4.values(blocks[:, :, None], exponents[:, :, None]).transpose(1, 2), theirs)


@pytest.mark.parametrize("packed", [True, False])
def test_a_folder_computes_what_transformers_computes(packed: bool, tmp_path: Path) -> None:
    stored(tmp_path, packed)
    config = describe_folder(str(tmp_path))
    assert isinstance(config, TransformerConfig)
    workload = load(f"hf:{tmp_path}", "causal_lm", WORDS, sequence_length=24)
    assert workload.notes == ()
    model = workload.build().eval()
    model.load_state_dict({name: workload.initial(name, 0) for name in workload.shapes})
    dequantise = {"quantization_config": transformers.Mxfp4Config(dequantize=True)} if packed else {}
    hf_model = transformers.GptOssForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **dequantise)
    tokens = torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, theirs = model({"tokens": tokens}).logits, hf_model.eval()(tokens).logits
    assert (ours - theirs).abs().max() <= TOLERANCE * max(1.0, float(theirs.abs().max()))


def test_parts_of_packed_tensors_are_read_alone(tmp_path: Path) -> None:
    stored(tmp_path, True)
    weights = Weights(str(tmp_path))
    full = weights.read(GATE_UP)
    assert weights.blank(GATE_UP).shape == full.shape == (4, 64, 64)
    for part in ((slice(1, 3), slice(0, 64), slice(2, 9)), (slice(0, 4), slice(31, 34), slice(63, 64)),
                 (slice(2, 3), slice(5, 5), slice(0, 1))):  # fmt: skip
        assert torch.equal(weights.part(GATE_UP, part), full[part])
    config = describe_folder(str(tmp_path))
    assert isinstance(config, TransformerConfig)
    shapes = TransformerWorkload("model", config, None, WORDS).shapes  # type: ignore[arg-type]
    found = pretrained(config, shapes, str(tmp_path)).find("layers.1.feedforward.experts.up")
    assert found is not None
    assert torch.equal(found[whole(found.shape)], full.transpose(1, 2)[:, 1::2])
    assert torch.equal(
        found[slice(1, 2), slice(3, 7), slice(30, 40)], full[1:2, 30:40, 7:15:2].transpose(1, 2)
    )


def test_other_ways_of_quantising_are_refused(tmp_path: Path) -> None:
    stored(tmp_path, True)
    quantise(tmp_path, {"quant_method": "fp8"})
    with pytest.raises(WorkloadError, match="are quantised; give a folder with the full ones"):
        describe_folder(str(tmp_path))
    transformers.Qwen2Config(hidden_size=64).save_pretrained(tmp_path)
    quantise(tmp_path, {"quant_method": "mxfp4"})
    with pytest.raises(WorkloadError, match="are quantised"):
        describe_folder(str(tmp_path))


def test_a_block_without_its_scales_has_no_place(tmp_path: Path) -> None:
    tensors = stored(tmp_path, True)
    del tensors[f"{GATE_UP}_scales"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        WorkloadError, match=r"layers\.1\.feedforward\.experts\.gate \[4, 32, 64\] is missing"
    ):
        load(f"hf:{tmp_path}", "causal_lm", WORDS, sequence_length=24)
