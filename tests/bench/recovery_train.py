"""The driver of the Ray Train peer: our rank program in a `TorchTrainer` on a cluster that is there.

    python recovery_train.py ADDRESS JOB RUN_DIR STEPS_BETWEEN_REPORTS [FAULT ...]

What is tuned is tuned by the environment that this process is started with.
"""

from __future__ import annotations

import sys

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from orchestrator.config.spec import load
from orchestrator.launch.ray_train import loop_config, train_func


def main() -> None:
    """Train to the end, whatever fails."""
    address, job, run_dir, report_every, *faults = sys.argv[1:]
    ray.init(address=address, log_to_driver=False)
    spec = load(job)
    config = loop_config(spec, run_dir, report_every=int(report_every), faults=tuple(faults))
    TorchTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=spec.resources.workers.max),
        run_config=RunConfig(
            name="train",
            storage_path=f"{run_dir}/ray_train",
            failure_config=FailureConfig(max_failures=1000),
        ),
    ).fit()


if __name__ == "__main__":
    main()
