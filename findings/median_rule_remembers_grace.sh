#!/usr/bin/env bash
# Ray Tune's median rule ignores grace-period results of others, but not a trial's own.
#
# Guess: results before grace_period do not count: neither in the medians nor for the trial that is judged.
# Behaviour: the running means of the other trials begin at the grace period. The trial's own best value
#   includes results before it, so one lucky early value protects a bad trial to the end.
# Packages: ray 2.60.0 with tune
# Why it matters: a loss is often lowest by chance at one early step, or before a warm-up has raised the
#   rate; such a trial takes its workers for the whole search.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    'ray[tune]==2.60.0'

venv/bin/python - <<'PY'
from types import SimpleNamespace

import ray
from ray.tune.experiment import Trial
from ray.tune.schedulers import MedianStoppingRule

print("version: ray", ray.__version__)
print("guess: a trial that is bad from the grace period on is stopped, whatever it reported before")


def stopped_at(first):
    """The step at which the rule stops a trial with loss 9 among three with loss 1; its first loss is given."""
    rule = MedianStoppingRule(
        time_attr="step", metric="loss", mode="min", grace_period=3, min_samples_required=3, min_time_slice=0
    )
    trials = [Trial("a trainable", stub=True) for _ in range(4)]
    runner = SimpleNamespace(get_live_trials=list)  # no trial is paused or waits
    for trial in trials:
        rule.on_trial_add(runner, trial)
    for step in range(1, 30):
        for trial in trials:
            loss = 1.0 if trial is not trials[-1] else first if step == 1 else 9.0
            answer = rule.on_trial_result(runner, trial, {"step": step, "loss": loss, "time_total_s": step})
            if trial is trials[-1] and answer == rule.STOP:
                return step
    return None


print("first loss 9.0, grace until step 3: stopped at step", stopped_at(9.0))
print("seen: first loss 0.5, grace until step 3: stopped at step", stopped_at(0.5))
assert stopped_at(9.0) == 3
assert stopped_at(0.5) is None
PY
