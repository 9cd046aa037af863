"""What identifies the stored logits of a teacher, so that a run finds those that it has computed."""

from __future__ import annotations

import json

import xxhash

from orchestrator.config.workload import WorkloadSpec
from orchestrator.data.config import DataSpec
from orchestrator.models.base import Base
from orchestrator.train.config import Precision
from orchestrator.train.distillation.config import LogitsSpec


def logits_key(
    workload: WorkloadSpec, data: DataSpec, seed: int, precision: Precision, logits: LogitsSpec, base: Base
) -> str:
    """Return a hash of everything that determines the stored logits besides the data.

    The data is identified by the folder in which they are stored.

    Args:
        workload: the student's objective and its options, which say how samples are read.
        data: the student's data.
        seed: seed of the student's run, which divides held-out text from training text.
        precision: dtype of the teacher's products.
        logits: k and the temperature.
        base: the teacher's weights.
    """
    share = data.validation.share if data.validation else None
    inputs = [
        *(base.digest, share, workload.objective, workload.options, data.labels),
        *(data.sequence_length, seed, precision, logits.k, logits.temperature),
    ]
    return xxhash.xxh3_64_hexdigest(json.dumps(inputs, sort_keys=True).encode())
