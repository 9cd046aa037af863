#!/usr/bin/env bash
# torchmetrics decides for each batch anew whether scores are logits, so the area under the curve depends on the batch size.
#
# Guess: BinaryAUROC and BinaryAccuracy over a data set are the same for any batch size. They take logits or probabilities; an area
#   under the curve depends on the order of scores alone, and a sigmoid keeps it.
# Behaviour: a batch whose scores all lie between 0 and 1 is taken for probabilities, any other for logits and given a sigmoid. Some
#   batches of logits happen to lie there. Theirs are stored as they are beside squashed ones, and are compared with
#   them; in the accuracy a logit of 0.3 is a no in one batch and a yes in another.
# Packages: torchmetrics 1.9.0, torch 2.13.0, numpy 2.4.6
# Why it matters: a small batch, a last batch of few rows or a model at its beginning, whose logits are small, changes the metric, by
#   three points here. Changing the batch size or the number of ranks of an evaluation changes it again.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torchmetrics==1.9.0 torch==2.13.0 numpy==2.4.6

venv/bin/python -W ignore - <<'PY'
import torch
import torchmetrics
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC

print("version: torchmetrics", torchmetrics.__version__)
print("guess: equal values for every batch size")
source = torch.Generator().manual_seed(0)
logits = torch.randn(4000, generator=source)
labels = (logits + torch.randn(4000, generator=source) > 0).long()


def over_batches(metric, scores, size):
    for begin in range(0, len(scores), size):
        metric.update(scores[begin : begin + size], labels[begin : begin + size])
    return round(metric.compute().item(), 4)


sizes = (4000, 8, 2, 1)
areas = [over_batches(BinaryAUROC(), logits, size) for size in sizes]
shares = [over_batches(BinaryAccuracy(), logits, size) for size in sizes]
probabilities = [over_batches(BinaryAUROC(), logits.sigmoid(), size) for size in sizes]
print("with probabilities, areas in batches of", sizes, "are", probabilities)
print("seen: with logits areas", areas, "and accuracies", shares)
assert len(set(probabilities)) == 1 and areas[0] == probabilities[0]
assert areas[0] > areas[2] + 0.02 and areas[2] > areas[3] + 0.01
assert shares[0] > shares[2] > shares[3] and shares[0] > shares[3] + 0.015
PY
