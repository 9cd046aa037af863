"""Check that an objective with a reference model begins with weights, and that its loss has what the job asks for."""

from __future__ import annotations

from orchestrator.config.errors import InputError
from orchestrator.config.records import OF_ANSWERS, OF_CLASSES, REFERENCED
from orchestrator.config.workload import WorkloadSpec
from orchestrator.resolve.resolved_job import wrong_input
from orchestrator.train.config import TrainSpec


def check_preferences(workload: WorkloadSpec, train: TrainSpec, shuffle: str) -> None:
    """Check that an objective with a reference model begins with weights, and that no option is undefined for its loss.

    The reference is the model that the run begins with. The loss is defined over whole answers.

    Args:
        workload: the job's model and objective.
        train: how the job trains.
        shuffle: how its samples are ordered.

    Raises:
        InputError: the objective cannot train so.
    """
    name = workload.objective
    for key, feature in (("z_loss", "z-loss"), ("label_smoothing", "smoothing over a vocabulary")):
        if name in (*OF_ANSWERS, *OF_CLASSES) and getattr(train, key):
            raise InputError(f"{name} has no {feature}", f"train.{key}", "set it to 0")
    if name not in REFERENCED:
        return
    if shuffle == "sections" and train.reference != "held":
        problem = f"{name} computes its reference's log-probabilities of all records before it trains"
        hint = "set train.reference to held, or leave out data.shuffle and data.streaming"
        raise InputError(problem, "data.shuffle", hint)
    if workload.init_from:
        return
    from workloads.hf.files.weight_names import weights_of_model

    with wrong_input("workload.model"):
        folder = weights_of_model(workload.model)
    if folder is None:
        problem = f"{name} compares with the initial model, and this run starts from random weights"
        raise InputError(problem, "workload.init_from", "name a run or an export, or a model with weights")
