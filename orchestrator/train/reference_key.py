"""The key of a reference model's log-probabilities, by which a run finds those that it has computed."""

from __future__ import annotations

import json

import xxhash

from orchestrator.config.workload import WorkloadSpec
from orchestrator.data.config import DataSpec
from orchestrator.models.base import Base
from orchestrator.train.config import Precision


def reference_key(
    name: str | None,
    *,
    workload: WorkloadSpec,
    data: DataSpec,
    seed: int,
    precision: Precision,
    base: Base,
) -> str:
    """Return a hash of everything that determines a set's log-probabilities besides the data.

    The data is identified by the folder in which the values are stored. `name` is the name of a part of that data,
    such as its held-out part, else None.

    Args:
        name: of a part of the run's data, such as its held-out part; None for data of its own.
        workload: the model and its objective.
        data: the data as the job names it.
        seed: of the run, by which held-out text is divided from training text.
        precision: dtype of the model's products.
        base: the weights that the run began with.
    """
    share = data.validation.share if data.validation and name is not None else None
    model = "" if workload.model.startswith("hf:") else workload.model
    # An adapter's initial values may change the model.
    adapter = workload.adapter and workload.adapter.model_dump(mode="json")
    inputs = [
        *(base.digest, name, share, model, workload.changes),
        *(workload.objective, workload.options.get("truncate"), workload.mup, adapter),
        *(data.sequence_length, seed, precision),
    ]
    return xxhash.xxh3_64_hexdigest(json.dumps(inputs, sort_keys=True).encode())
