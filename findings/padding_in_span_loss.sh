#!/usr/bin/env bash
# The loss of extractive question answering in transformers grows with the padding of its batch.
#
# Guess: with an attention mask, padding changes neither the logits of the text nor the loss.
# Behaviour: the softmax over start and end positions runs over all positions, padding too, and nothing masks their
#   logits. For a new model a text of 20 tokens has a loss near log(20) alone and near log(384) padded to 384.
# Packages: transformers 5.23.0, torch 2.13.0, numpy 2.4.6
# Why it matters: padding to the longest row of a batch and padding to a fixed length train different models, losses of
#   two settings cannot be compared, and part of the gradient teaches the model that padding holds no answer.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    transformers==5.23.0 torch==2.13.0 numpy==2.4.6
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

venv/bin/python - <<'PY'
import logging
import math

import torch
import transformers
from transformers import BertConfig, BertForQuestionAnswering

logging.disable(logging.WARNING)
print("version: transformers", transformers.__version__)
print("guess: one loss for each amount of padding")
torch.manual_seed(0)
sizes = dict(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
model = BertForQuestionAnswering(BertConfig(**sizes)).eval()
text = torch.randint(5, 100, (1, 20))
losses = {}
for length in (20, 40, 384):
    padding = torch.zeros(1, length - 20, dtype=torch.long)
    mask = torch.cat((torch.ones_like(text), padding), 1)
    outputs = model(
        torch.cat((text, padding), 1), attention_mask=mask,
        start_positions=torch.tensor([3]), end_positions=torch.tensor([5]),
    )
    losses[length] = outputs.loss.item()
    print(f"seen: padded to {length} the loss is {losses[length]:.3f}; log({length}) is {math.log(length):.3f}")
assert all(abs(loss - math.log(length)) < 0.2 for length, loss in losses.items())
PY
