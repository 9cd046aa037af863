"""The peer of a search: plain Ray Tune over a function that trains the same model by hand.

    python plain_tune.py JOB STORAGE VOCABULARY CONCURRENCY CONFIGS

CONFIGS is a file of JSON, a list of {learning rate, weight decay}. Batches are random tokens of the job's shape, since
only the seconds are of interest; each trial reports every tenth step and ends with a checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1", "RAY_AIR_NEW_OUTPUT": "0"}

import ray
from ray import tune


def train(config: dict[str, Any]) -> None:
    """One trial."""
    config = config["trial"]
    import torch
    from torch import nn

    from orchestrator.config.spec import load as read_job
    from workloads.load import load
    from workloads.workload import Vocabulary

    torch.set_num_threads(1)
    spec = read_job(config["job"])
    workload = load(
        spec.workload.model, "causal_lm", Vocabulary(config["vocabulary"], eos=0),
        changes=spec.workload.changes, sequence_length=spec.data.sequence_length,
    )  # fmt: skip
    model = workload.build()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(workload.initial(name, spec.seed))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config["lr"], weight_decay=config["decay"], fused=True
    )
    shape = (spec.train.global_batch, spec.data.sequence_length)
    for step in range(1, spec.train.steps + 1):
        tokens = torch.randint(1, config["vocabulary"], shape)
        loss = workload.loss(model, {"tokens": tokens, "labels": tokens})
        (loss.total / loss.count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == spec.train.steps:
            with tempfile.TemporaryDirectory() as folder:
                torch.save([model.state_dict(), optimizer.state_dict()], Path(folder) / "state.pt")
                tune.report({"loss": loss.total.item()}, checkpoint=tune.Checkpoint.from_directory(folder))
        elif step % 10 == 0:
            tune.report({"loss": loss.total.item()})


def main() -> None:
    """Search on a Ray of its own."""
    job, storage, vocabulary, concurrency, configs = sys.argv[1:]
    points = [
        {"job": job, "vocabulary": int(vocabulary), "lr": lr, "decay": decay}
        for lr, decay in json.loads(Path(configs).read_text())
    ]
    ray.init(address="local", num_cpus=int(concurrency), include_dashboard=False, log_to_driver=False)
    found = tune.Tuner(
        tune.with_resources(train, {"cpu": 1}),
        param_space={"trial": tune.grid_search(points)},
        tune_config=tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=int(concurrency)),
        run_config=tune.RunConfig(name="plain", storage_path=storage, verbose=0),
    ).fit()
    assert not found.errors, found.errors
    assert len(found) == len(points)


if __name__ == "__main__":
    main()
