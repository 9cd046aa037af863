#!/usr/bin/env bash
# MLflow takes the largest of a metric's values at one step and millisecond for the latest.
#
# Guess: a value that is logged later replaces the earlier one of the same step as the run's current value.
# Behaviour: the current value is the one with the largest step, then the largest timestamp, then the largest value. With
#   a client's own timestamps, or two calls within a millisecond, a corrected loss that is lower changes nothing: the
#   history has both and the run, its page and search_runs keep the higher.
# Packages: mlflow 3.17.2
# Why it matters: importers that write the timestamps of a log file, and loops that log a step twice, show and sort by a
#   worse loss or by a better accuracy than the last one, and "metrics.loss < x" misses the run.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check mlflow==3.17.2

venv/bin/python - 2>/dev/null <<'PY'
import mlflow
from mlflow import MlflowClient

print("version: mlflow", mlflow.__version__)
print("guess: 3.0, which was logged last, and then 7.0")
client = MlflowClient("sqlite:///runs.db")
experiment = client.create_experiment("losses")
run = client.create_run(experiment).info.run_id
seen = []
for value in (5.0, 3.0, 7.0):
    client.log_metric(run, "loss", value, timestamp=1_700_000_000_000, step=7)
    seen.append(client.get_run(run).data.metrics["loss"])
history = [metric.value for metric in client.get_metric_history(run, "loss")]
found = client.search_runs([experiment], "metrics.loss < 4")
print(f"seen: after 5.0, 3.0 and 7.0 the run says {seen}; its history is {history}; below 4: {len(found)} runs")
assert seen == [5.0, 5.0, 7.0]
assert sorted(history) == [3.0, 5.0, 7.0] and not found
PY
