"""What an engine reads of a job."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.evaluate.config import EvaluateSpec
from orchestrator.prune.config import PruneSpec
from orchestrator.quantize.config import QuantizeSpec
from orchestrator.train.config import TrainSpec
from orchestrator.train.distillation.config import DistillSpec


@dataclass(frozen=True)
class EngineConfig:
    """How an engine computes a step. Neither where the data comes from nor where results go is part of it.

    Attributes:
        train: precision, optimizer, batch and the other options of training.
        seed: of the initial weights.
        sequence_length: tokens of a row.
        ema: the decay of a moving average of the weights; None without one.
        gpus: GPUs of a worker; 0 to compute on CPUs.
        prune: which weights are set to zero; None without pruning.
        head_penalty: what the loss adds for each open attention head; 0 without gates.
        quantize: how weights are rounded while they train; None without.
        distill: what is learned from a teacher; None without one.
        evaluate: whose metrics the losses must keep values for; None without evaluations.
    """

    train: TrainSpec
    seed: int
    sequence_length: int
    ema: float | None
    gpus: float
    prune: PruneSpec | None
    head_penalty: float
    quantize: QuantizeSpec | None
    distill: DistillSpec | None
    evaluate: EvaluateSpec | None
