"""Bottleneck adapters against transformers' BERT with the same modules behind its sub-layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from workloads.adapters.adapter import Adapter
from workloads.errors import WorkloadError
from workloads.inference import with_weights
from workloads.load import load
from workloads.transformer_workload import TransformerWorkload
from workloads.workload import Vocabulary

KNOWN = Vocabulary(size=160, eos=2, pad=1, bos=0, cls=3, sep=4, mask=5)


def test_twenty_steps_are_those_of_bert_with_adapters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=160, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.1,
    )  # fmt: skip
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    workload = load(
        f"hf:{tmp_path}", "masked_lm", KNOWN, sequence_length=16, adapter=Adapter("houlsby", 8, 32.0, ())
    )
    assert isinstance(workload, TransformerWorkload)
    with pytest.raises(WorkloadError, match="no class with houlsby adapters"):
        workload.check_hf()
    ours = with_weights(workload, lambda name: workload.initial(name, 3)).train()
    theirs = transformers.BertForMaskedLM.from_pretrained(tmp_path, dtype=torch.float32).train()
    theirs.requires_grad_(False)
    pairs: dict[str, torch.Tensor] = {}
    for number, layer in enumerate(theirs.bert.encoder.layer):
        for place, room in ((layer.attention.output, "attention"), (layer.output, "feedforward")):
            down, up = nn.Linear(32, 8), nn.Linear(8, 32)
            place.dropout.register_forward_hook(
                lambda _, __, y, down=down, up=up: y + up(nn.functional.gelu(down(y)))
            )
            place.LayerNorm.requires_grad_(True)
            parts = {f"{room}_adapter.down": down, f"{room}_adapter.up": up, f"{room}_norm": place.LayerNorm}
            for name, module in parts.items():
                pairs |= {f"layers.{number}.{name}.{leaf}": p for leaf, p in module.named_parameters()}
    mine = {name: p for name, p in ours.named_parameters() if name not in workload.frozen}
    assert pairs.keys() == mine.keys()
    with torch.no_grad():
        for name, parameter in pairs.items():
            parameter.copy_(mine[name])
    optimizers = [torch.optim.AdamW(each.values(), lr=1e-2, eps=1e-4) for each in (mine, pairs)]
    for step in range(20):
        tokens = torch.randint(6, 150, (4, 16), generator=torch.Generator().manual_seed(step))
        labels = torch.where(torch.arange(16) % 3 == 0, tokens, -100)
        first = workload.loss(ours, {"tokens": tokens, "labels": labels})
        losses = [first.total / first.count, theirs(input_ids=tokens, labels=labels).loss]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for name, parameter in pairs.items():
        torch.testing.assert_close(mine[name], parameter, rtol=0, atol=1e-5)
