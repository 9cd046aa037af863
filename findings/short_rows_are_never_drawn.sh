#!/usr/bin/env bash
# torch.multinomial over millions of rows never draws the light rows at the end of the table.
#
# Guess: with replacement a row is drawn in proportion to its weight, whatever its place. float32 rounds a weight by less than a
#   ten-millionth.
# Behaviour: on a CPU the weights are added up in float32, one after the other. When the sum is at 2 * 10^9 its steps are 128, so a
#   weight below 64 does not change it: that row has no chance at all, and those above are rounded up or down.
#   Of four million documents of 1 to 2,000 tokens, those of up to 64 tokens in the second half are never drawn, and
#   those in the first quarter are drawn as often as they should be. In float64, or through WeightedRandomSampler, which converts to it, all is right.
# Packages: torch 2.13.0, numpy 2.4.6
# Why it matters: drawing documents by length, by a quality score or by importance weights (DSIR, replay) loses whole sources
#   that stand last and have short rows. A test with a thousand rows passes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6

venv/bin/python -W ignore - <<'PY'
import torch
from torch.utils.data import WeightedRandomSampler

print("version: torch", torch.__version__)
print("guess: documents of up to 64 tokens are drawn as often as their tokens say, wherever they stand: all shares are near 1")
torch.set_num_threads(1)
DOCUMENTS = 4_000_000
tokens = torch.randint(1, 2001, (DOCUMENTS,), generator=torch.Generator().manual_seed(0)).float()
short = (tokens <= 64).nonzero()[:, 0]


def shares(drawn):
    """How often short documents were drawn, by how often they should be: those in each quarter of the table."""
    times = torch.bincount(drawn, minlength=DOCUMENTS).double()
    expected = tokens.double() / tokens.double().sum() * len(drawn)
    return [round((times[part].sum() / expected[part].sum()).item(), 2) for part in short.chunk(4)]


def draw(weights):
    return torch.multinomial(weights, DOCUMENTS, replacement=True, generator=torch.Generator().manual_seed(1))


single, double = shares(draw(tokens)), shares(draw(tokens.double()))
sampler = WeightedRandomSampler(tokens, DOCUMENTS, generator=torch.Generator().manual_seed(1))
print("the sampler holds its weights in", sampler.weights.dtype)
print(f"seen: shares by quarter of the table {single} in float32, and {double} in float64")
assert single[3] == 0 and single[2] < 0.01 and single[0] > 0.9
assert all(0.9 < share < 1.1 for share in double)
assert sampler.weights.dtype == torch.float64
PY
