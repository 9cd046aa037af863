"""The loss of a class of transformers in chunks of tokens, where its logits are what its head gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from workloads.hf.as_they_are.hf_class import describe_hf_class
from workloads.hf.as_they_are.workload import HuggingFaceWorkload
from workloads.load import load
from workloads.model.chunked_loss import ChunkedLoss
from workloads.model.losses import token_loss
from workloads.workload import Vocabulary

SIZES = {"vocab_size": 161, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
CLASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "tied decoder": ("GPTNeoX", "ForCausalLM", {"intermediate_size": 32, "tie_word_embeddings": True}),
    "plain decoder": ("Phi", "ForCausalLM", {"intermediate_size": 32}),
    "head with a bias": ("GPTJ", "ForCausalLM", {"n_inner": 32, "rotary_dim": 4}),
    "encoder-decoder": (
        "UMT5",
        "ForConditionalGeneration",
        {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 1},
    ),
    "capped": ("Gemma2", "ForCausalLM", {"intermediate_size": 32, "num_key_value_heads": 1, "head_dim": 8}),
    "scaled": ("Cohere", "ForCausalLM", {"intermediate_size": 32, "num_key_value_heads": 1}),
}  # fmt: skip


def workload_of(name: str, folder: Path) -> HuggingFaceWorkload:
    family, kind, sizes = CLASSES[name]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **sizes})
    config.architectures = [f"{family}{kind}"]
    config.save_pretrained(folder)
    described = describe_hf_class(str(folder))
    words = Vocabulary(161, eos=2, pad=1, bos=0, sentinels=tuple(range(60, 160)))
    objective = "span_corruption" if described.architecture == "encoder-decoder" else "causal_lm"
    found = load(f"hf:{folder}", objective, words, sequence_length=12, described=described)
    assert isinstance(found, HuggingFaceWorkload)
    return found


@pytest.mark.parametrize("name", CLASSES)
def test_chunks_give_what_whole_logits_give(name: str, tmp_path: Path) -> None:
    workload = workload_of(name, tmp_path)
    model = workload.build()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    tokens = torch.randint(3, 50, (2, 12), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens, "labels": tokens.flip(1)}
    if workload.config.architecture == "encoder-decoder":
        batch["decoder_tokens"] = tokens
    gradients = []
    for at_once in (None, 5):
        model.zero_grad()
        output = model(batch, in_chunks=None if at_once is None else ChunkedLoss(token_loss, at_once))
        assert (output.sums is None) == (at_once is None or name in ("capped", "scaled"))
        found = workload.criterion(output, batch)
        found.total.backward()
        gradients.append([found.total.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for whole, chunks in zip(*gradients, strict=True):
        torch.testing.assert_close(chunks, whole, rtol=0, atol=2e-6 * max(float(whole.abs().max()), 0.1))
