"""Runs that began with the version before: every objective reads their data as it did then."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
from before import unpack

from orchestrator.data.samples.batches import batches_of
from orchestrator.data.store.tokens import Tokens
from workloads.objectives import OF_TEXT, build
from workloads.workload import Batch

OPTIONS = {"entity_masking": {"entities": [[400, 401], [410]]}, "span_corruption": {"mean_span": 4.0}}
WEIGHTS = {"plain": [1.0, 1.0], "weighted": [2.0, 0.3]}


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the version before has left."""
    return unpack(tmp_path_factory.mktemp("before"))


ADDED = {"queries"}
"""Entries that batches had not then, and which say what the others do."""


def digest(batch: Batch) -> str:
    state = blake2b(digest_size=16)
    for key in sorted(batch.keys() - ADDED):
        state.update(key.encode())
        state.update(np.ascontiguousarray(batch[key].numpy()).tobytes())
    return state.hexdigest()


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", OF_TEXT)
def test_every_objective_reads_old_data_as_it_did(before: Path, name: str, weights: str) -> None:
    (data,) = before.glob("pairs/*" if name == "translation_lm" else "data/*")
    tokens = Tokens.open(str(data))
    rule = tokens.manifest.format
    assert rule == 1
    options = OPTIONS.get(name, {})
    objective = build(name, vocabulary=tokens.vocabulary(), sequence_length=64, seed=9, rule=rule, **options)
    batches = batches_of(tokens, objective, 9, WEIGHTS[weights][: tokens.sources])
    expected = json.loads((before / "batches.json").read_text())[f"{name}/{weights}"]
    for position, receipt, content in expected:
        batch, found = batches.batch(position, 8)
        assert (found, digest(batch)) == (receipt, content)
