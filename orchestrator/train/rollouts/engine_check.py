"""The check of `rollout.engine`: whether vLLM can generate the answers of a job."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.config.extras import install
from orchestrator.config.resources import ResourceSpec
from orchestrator.resolve.resolved_job import wrong_input
from orchestrator.train.rollouts.config import RolloutSpec

WHERE = "rollout.engine"
INSTALL = f"{install('vllm')}, or set it to own"


def check_engine(rollout: RolloutSpec | None, resources: ResourceSpec, workload: Any) -> None:
    """Raise InputError unless vLLM, if the job names it, is installed, and has a GPU and a class for the model.

    Args:
        rollout: the job's rollouts; None without.
        resources: of the workers.
        workload: the model.
    """
    if rollout is None or rollout.engine != "vllm":
        return
    if not resources.per_worker.gpu:
        hint = "set resources.per_worker.gpu to 1, or this to own"
        raise InputError("vllm needs a GPU, and each worker of this job has none", WHERE, hint)
    if find_spec("vllm") is None:
        raise InputError("vllm is not installed", WHERE, INSTALL)
    if workload.config.as_transformer is None:
        raise InputError("vllm generates with this project's models only", WHERE, "set it to own")
    with wrong_input(WHERE):
        workload.check_hf()
