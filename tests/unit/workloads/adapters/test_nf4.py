"""Bases in 4 bits: bitsandbytes' own values, wherever they are cut, and beside peft on transformers' model."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
import transformers
from adapter_steps import KNOWN, LENGTH, OURS, TOLERANCE, trained_by_peft, trained_by_us
from base_run import save_experts
from bitsandbytes import functional

from workloads.adapters.adapter import Adapter
from workloads.adapters.nf4 import (
    QuantisedLinear,
    QuantisedWeight,
    RoundedTensor,
    dequantise,
    product,
    quantise,
    rounded,
)
from workloads.errors import WorkloadError
from workloads.inference import with_weights
from workloads.load import load
from workloads.transformer_workload import TransformerWorkload

TARGETS = ["q_proj", "down_proj"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=160, max_position_embeddings=64, num_key_value_heads=2, initializer_range=0.1,
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
    )  # fmt: skip
    found = str(tmp_path_factory.mktemp("base"))
    transformers.LlamaForCausalLM(config).save_pretrained(found)
    return found


def adapted(folder: str, kind: str = "lora") -> TransformerWorkload:
    adapter = Adapter(kind, 4, 8.0, ("*.attention.query", "*.feedforward.down"), quantise=True)
    found = load(f"hf:{folder}", "causal_lm", KNOWN, sequence_length=LENGTH, adapter=adapter)
    assert isinstance(found, TransformerWorkload)
    return found


def test_values_are_those_of_bitsandbytes() -> None:
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(0))
    theirs = functional.dequantize_4bit(*functional.quantize_4bit(weight, quant_type="nf4", blocksize=64))
    assert torch.equal(rounded(weight), theirs)
    assert len(rounded(weight)[0, :64].unique()) <= 16
    codes, scales = quantise(rounded(weight))
    assert all(map(torch.equal, quantise(weight), (codes, scales)))
    assert codes.nbytes + scales.nbytes == weight.numel() * 4.5 / 8
    assert dequantise(codes, scales, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("columns", [slice(0, 192), slice(96, 192), slice(70, 75)])
def test_a_part_is_that_of_the_whole(columns: slice) -> None:
    weight = torch.randn(3100, 192, generator=torch.Generator().manual_seed(1))
    rows = slice(3, 3090)
    wanted = rounded(weight)[rows, columns]
    assert torch.equal(RoundedTensor(weight)[(rows, columns)], wanted)
    part = QuantisedWeight(rows.stop - rows.start, columns)
    for source in (weight, RoundedTensor(weight)):
        part.fill(source, rows, columns)
        assert torch.equal(part.values(torch.float32), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_and_its_gradient_keep_four_bits(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(2)
    weight, bias = (
        torch.randn(32, 64, generator=random),
        torch.nn.Parameter(torch.randn(32, generator=random)),
    )
    small = QuantisedWeight(32, slice(0, 64))
    small.fill(weight, slice(0, 32), slice(0, 64))
    x = torch.randn(2, 5, 64, generator=random, requires_grad=True)
    kept: list[torch.Tensor] = []
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
    ):
        y = product(x, small)
    assert y.dtype == dtype
    assert not kept
    (mine,) = torch.autograd.grad(y.sum(), x)
    (theirs,) = torch.autograd.grad((x.to(dtype) @ rounded(weight).to(dtype).t()).sum(), x)
    torch.testing.assert_close(mine, theirs)
    layer = QuantisedLinear(small, bias)
    torch.testing.assert_close(layer(x), x @ rounded(weight).t() + bias)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_twenty_steps_are_those_of_peft_on_a_base_in_4_bits(kind: str, folder: str) -> None:
    workload = adapted(folder, kind)
    assert len(workload.quantised) == 14
    assert workload.quantised < workload.frozen
    model = with_weights(workload, lambda name: workload.initial(name, 3))
    in_4_bits = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    base = transformers.LlamaForCausalLM.from_pretrained(
        folder, quantization_config=in_4_bits, dtype=torch.float32
    )
    theirs = peft.get_peft_model(
        base, peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, use_dora=kind == "dora")
    )
    ours, pairs = dict(model.named_parameters()), {}
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            _, _, _, _, layer, block, leaf, part, *_ = name.split(".")
            room = "attention" if block == "self_attn" else "feedforward"
            mine = next(ours for ours, other in OURS.items() if other == leaf)
            end = {"lora_A": "lora_a", "lora_B": "lora_b"}.get(part, "magnitude")
            pairs[f"layers.{layer}.{room}.{mine}.{end}.weight"] = parameter
    assert pairs.keys() == {name for name in ours if name not in workload.frozen}
    with torch.no_grad():
        for name, parameter in pairs.items():
            parameter.copy_(ours[name].view_as(parameter))
    assert trained_by_us(workload, model) == pytest.approx(trained_by_peft(theirs), rel=TOLERANCE)
    for name, parameter in pairs.items():
        torch.testing.assert_close(ours[name], parameter.view_as(ours[name]), rtol=0, atol=TOLERANCE)


def test_the_merged_export_is_the_model_that_was_trained(folder: str, tmp_path: Path) -> None:
    workload = adapted(folder)
    model = with_weights(workload, lambda name: workload.initial(name, 3))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name not in workload.frozen:
                parameter.normal_(0, 0.1)
    state = dict(model.named_parameters())
    workload.to_hf(lambda name: state[name].detach(), str(tmp_path))
    hf = transformers.LlamaForCausalLM.from_pretrained(str(tmp_path), dtype=torch.float32)
    tokens = torch.arange(8, 40).view(2, 16)
    with torch.no_grad():
        torch.testing.assert_close(
            model.eval()({"tokens": tokens}).logits, hf(input_ids=tokens).logits, rtol=0, atol=TOLERANCE
        )


def test_models_that_cannot_be_in_4_bits_are_refused(folder: str, tmp_path: Path) -> None:
    save_experts(tmp_path, 160)
    with pytest.raises(WorkloadError, match="stacked experts, which cannot be stored in 4 bits"):
        adapted(str(tmp_path))
    config = transformers.LlamaConfig.from_pretrained(folder, intermediate_size=96)
    narrow = tmp_path / "narrow"
    transformers.LlamaForCausalLM(config).save_pretrained(narrow)
    with pytest.raises(WorkloadError, match=r"layers\.0\.feedforward\.down has 96 inputs, .* blocks of 64"):
        adapted(str(narrow))
