#!/usr/bin/env bash
# Population-based training of Ray Tune leaves the range that a hyperparameter was given, and never moves an integer of 1 or 2.
#
# Guess: hyperparam_mutations={"momentum": tune.uniform(0.8, 0.99)} keeps momentum between 0.8 and 0.99. An integer of
#   tune.randint(1, 9) moves up or down within it.
# Behaviour: the range is for drawing anew, a quarter of the time. Otherwise the value is multiplied by 1.2 or 0.8, without
#   a look at the range, again and again: momentum exceeds 1 after one step. An integer is rounded after that, which gives 1
#   for 1 and 2 for 2, so the two are traps that only a new draw leaves. Larger integers leave their range too.
# Packages: ray 2.60.0 with tune
# Why it matters: a momentum or a decay above 1 diverges or grows the weights, the trial is replaced by a copy of another,
#   and the population ends with values that nobody allowed; the number of layers or of accumulation steps is never searched.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check 'ray[tune]==2.60.0'

venv/bin/python - 2>/dev/null <<'PY'
import random

import ray
from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import PopulationBasedTraining

print("version: ray", ray.__version__)
print("guess: momentum stays in 0.8 .. 0.99, and a count of 1 or 2 moves within 1 .. 8")
random.seed(0)


def reached(start, domain, resample, generations=20):
    """The values that a population of 50 takes in some generations, each made from the one before."""
    scheduler = PopulationBasedTraining(
        time_attr="step", metric="loss", mode="min", perturbation_interval=1, resample_probability=resample,
        hyperparam_mutations={"value": domain},
    )
    found = set()
    for _ in range(50):
        trial = Trial("a trainable", stub=True, config={"value": start})
        donor = Trial("a trainable", stub=True, config={"value": start})
        for _ in range(generations):
            donor.config, _ = scheduler._get_new_config(trial, donor)
            found.add(donor.config["value"])
    return found


momentum = reached(0.9, tune.uniform(0.8, 0.99), 0.25)
counts = reached(8, tune.randint(1, 9), 0.25)
stuck = [reached(start, tune.randint(1, 9), 0.0) for start in (1, 2)]
print(f"seen: momentum from {min(momentum):.2f} to {max(momentum):.2f}, counts up to {max(counts)}, 1 and 2 become {stuck}")
assert max(momentum) > 1.2 and min(momentum) < 0.7
assert max(counts) > 8
assert stuck == [{1}, {2}]
PY
