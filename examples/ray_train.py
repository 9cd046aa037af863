"""A job of ours as a Ray Train `TorchTrainer`: Ray Train starts and restarts the workers, we train and commit.

    python examples/ray_train.py examples/quickstart.yaml --workers 2

The run directory is that of `orchestrator run`: report, verify-resume, checkpoint export and run itself work on it.
"""

from __future__ import annotations

import argparse
import os

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from orchestrator.config.spec import load
from orchestrator.launch.ray_train import loop_config, train_func


def main() -> None:
    """Train the job to its end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--fault", action="append", default=[], help="inject a fault, to see it survived")
    options = parser.parse_args()
    ray.init("local", num_cpus=options.workers)
    config = loop_config(load(options.job), faults=tuple(options.fault))
    trainer = TorchTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=options.workers),
        run_config=RunConfig(
            name="train",
            storage_path=os.path.join(config["run"], "ray_train"),
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    result = trainer.fit()
    print(f"done: step {result.metrics['step']}, loss {result.metrics['loss']:.4f}, {config['run']}")


if __name__ == "__main__":
    main()
