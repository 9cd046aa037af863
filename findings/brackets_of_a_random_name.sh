#!/usr/bin/env bash
# Optuna's HyperbandPruner chooses a trial's bracket by the name of the study, which is random if none is given.
#
# Guess: the same seed, pruner and objective give the same search, one trial after the other in one process. A name only
#   labels a study.
# Behaviour: the bracket of a trial is a hash of the study's name and the trial's number. A study in memory without a
#   name gets a random one, so two runs of one program stop their trials at other steps, and so does a copy of a study
#   under a new name. The sampler may well suggest the same values: the budget that each of them gets differs. (A note
#   of the class asks for a name.)
# Packages: optuna 5.0.0
# Why it matters: a search that is repeated with its seed finds another winner, and a change of a search is compared
#   with a search that differs by chance.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check optuna==5.0.0

venv/bin/python - <<'PY'
import optuna

optuna.logging.set_verbosity(optuna.logging.ERROR)
TRIALS, STEPS = 60, 27


def searched(name):
    """Suggested values, and the last step of each trial, of a search whose seed, pruner and objective never change."""
    sampler = optuna.samplers.RandomSampler(seed=0)
    pruner = optuna.pruners.HyperbandPruner(min_resource=1, max_resource=STEPS, reduction_factor=3)
    study = optuna.create_study(study_name=name, sampler=sampler, pruner=pruner)

    def objective(trial):
        value = trial.suggest_float("value", 0, 1)
        for step in range(1, STEPS + 1):
            trial.report(value + 1 / step, step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return value

    study.optimize(objective, n_trials=TRIALS)
    return [trial.params["value"] for trial in study.trials], [trial.last_step for trial in study.trials]


print("version: optuna", optuna.__version__)
print("guess: every trial of the second search stops where it stopped in the first")
values, first = searched(None)
again, second = searched(None)
moved = sum(a != b for a, b in zip(first, second, strict=True))
assert values == again
assert searched("a name") == searched("a name")
assert searched("a name") != searched("another")
print(f"seen: equal values in both; {moved} of {TRIALS} trials stop at another step; none if the study has one name")
assert moved > TRIALS // 5
PY
