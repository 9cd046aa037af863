#!/usr/bin/env bash
# torchmetrics gives a poor regression an R2 of 0.99 if its targets are far from zero.
#
# Guess: R2Score is 1 minus the squared error over the variance, right to three digits or more in float32, for targets of
#   any offset: both terms are small numbers that float32 holds well.
# Behaviour: the variance is computed as the sum of squares minus the square of the sum, each a sum in float32 over all
#   rows. For energies of -97,000 with a spread of 4 the difference is rounding alone. A model whose R2 is 0.42 gets 0.99
#   in batches and more than 1 in one call, and RelativeSquaredError is 10^11. ExplainedVariance is wrong likewise;
#   PearsonCorrCoef, which keeps running means, is right to two digits. float64 is right.
# Packages: torchmetrics 1.9.0, torch 2.13.0, numpy 2.4.6
# Why it matters: total energies, prices, times and pressures are such targets. Early stopping and model selection follow
#   the metric, and a model that learnt little looks perfect.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check torchmetrics==1.9.0 torch==2.13.0 numpy==2.4.6

venv/bin/python -W ignore - <<'PY'
import torch
import torchmetrics
from torchmetrics import ExplainedVariance, PearsonCorrCoef, R2Score
from torchmetrics.functional import r2_score

ROWS, BATCH, SPREAD = 5000, 50, 4.0


def fits(offset, kind=torch.float32):
    """R2, explained variance and correlation in batches, R2 in one call, and the right R2."""
    draw = torch.Generator().manual_seed(0)
    wanted = torch.randn(ROWS, generator=draw) * SPREAD + offset
    given = (wanted + torch.randn(ROWS, generator=draw) * SPREAD * 0.75).to(kind)
    wanted = wanted.to(kind)
    metrics = [R2Score(), ExplainedVariance(), PearsonCorrCoef()]
    for metric in metrics:
        metric.set_dtype(kind)
        for at in range(0, ROWS, BATCH):
            metric.update(given[at : at + BATCH], wanted[at : at + BATCH])
    exact, error = wanted.double(), given.double() - wanted.double()
    right = 1 - error.square().sum() / (exact - exact.mean()).square().sum()
    return [round(float(value), 3) for value in (*(each.compute() for each in metrics), r2_score(given, wanted), right)]


print("version: torchmetrics", torchmetrics.__version__)
print("guess: the last value of each line, under any offset")
found = {offset: fits(offset) for offset in (0.0, -97200.0)}
double = fits(-97200.0, torch.float64)
for offset, values in [*found.items(), ("the same in float64", double)]:
    print(f"seen: offset {offset}: R2 {values[0]}, explained {values[1]}, correlation {values[2]}, R2 at once {values[3]}, right {values[4]}")
near, far = found.values()
assert abs(near[0] - near[4]) < 0.01 and abs(double[0] - double[4]) < 0.01
assert abs(far[0] - far[4]) > 0.3 and abs(far[1] - far[4]) > 0.3 and abs(far[3] - far[4]) > 0.3
assert abs(far[2] - near[2]) < 0.05
PY
