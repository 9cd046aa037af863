"""Twenty steps of AdamW of an adapter on a small Llama: by our model, and by peft's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from workloads.transformer_workload import TransformerWorkload
from workloads.workload import Batch, Vocabulary

KNOWN = Vocabulary(size=160, eos=2, pad=1, bos=0, cls=3, sep=4, mask=5)
LENGTH, STEPS, TOLERANCE = 16, 20, 1e-5
OURS = {
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "output": "o_proj",
    "up": "up_proj",
    "down": "down_proj",
}
"""Linear layers of transformers' Llama by ours."""


def batch_of(step: int) -> Batch:
    random = torch.Generator().manual_seed(step)
    tokens = torch.randint(6, 150, (4, LENGTH + 1), generator=random)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def trained_by_us(workload: TransformerWorkload, model: nn.Module) -> list[float]:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in workload.frozen)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = workload.loss(model.train(), batch_of(step))
        (loss.total / loss.count).backward()
        optimizer.step()
        losses.append(float(loss.total / loss.count))
    return losses


def trained_by_peft(model: Any) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = batch_of(step)
        logits = model.train()(input_ids=batch["tokens"]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses
