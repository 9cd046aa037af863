"""The FLOPs of a class of transformers that is run as it is are those that it multiplies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from workloads.hf.as_they_are.hf_class import describe_hf_class

LENGTH = 96
SIZES = {
    "vocab_size": 500,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 1,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 128, "eos_token_id": 2}
CLASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "decoder": ("GPTNeoX", "ForCausalLM", {"intermediate_size": 256}),
    "experts": ("Olmoe", "ForCausalLM", EXPERTS),
    "encoder": ("MegatronBert", "ForMaskedLM", {"intermediate_size": 256}),
    "encoder-decoder": ("UMT5", "ForConditionalGeneration", {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4}),
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSES)
def test_flops_are_counted_without_data(name: str, tmp_path: Path) -> None:
    family, kind, sizes = CLASSES[name]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **sizes})
    config.architectures = [f"{family}{kind}"]
    config.save_pretrained(tmp_path)
    described = describe_hf_class(str(tmp_path))
    # Fused kernels and grouped products are no products to the counter.
    config._attn_implementation = config._experts_implementation = "eager"
    model = getattr(transformers, f"{family}{kind}")(config).eval()
    tokens = torch.randint(5, 500, (1, LENGTH))
    pair = {"decoder_input_ids": tokens} if described.architecture == "encoder-decoder" else {}
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=tokens, **pair)
    assert described.flops(LENGTH) == pytest.approx(3 * counter.get_total_flops() / LENGTH, rel=1e-6)


def test_a_class_that_cannot_run_without_data_counts_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = transformers.GPTNeoXConfig(**SIZES, intermediate_size=256)
    config.architectures = ["GPTNeoXForCausalLM"]
    config.save_pretrained(tmp_path)
    described = describe_hf_class(str(tmp_path))
    monkeypatch.setattr(described.bare, "forward", None)
    assert described.flops(LENGTH) == 6 * (described.parameters() - 500 * 64)
