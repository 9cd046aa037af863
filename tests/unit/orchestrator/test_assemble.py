"""From the job file's words to parts, as far as that needs no data."""

from __future__ import annotations

from typing import Any

import pytest
from jobs import job

from orchestrator.assemble import check_objective, data_cache, shape_of, vocabulary_size
from orchestrator.errors import InputError
from orchestrator.rundir import RunDir
from orchestrator.spec import JobSpec, parse


def spec(**changes: Any) -> JobSpec:
    document = job("a.txt")
    for part, values in changes.items():
        document[part] = {**document[part], **values}
    return parse(document)


@pytest.mark.parametrize(
    ("run", "cache"),
    [("/work/runs/small", "/work/runs/_data"), ("memory://bucket/runs/small", "memory://bucket/runs/_data")],
)
def test_runs_beside_each_other_share_their_data(run: str, cache: str) -> None:
    assert data_cache(spec(), RunDir(run)) == cache
    assert data_cache(spec(data={"cache": "/elsewhere"}), RunDir(run)) == "/elsewhere"


def test_the_vocabulary_is_known_before_there_is_data() -> None:
    assert vocabulary_size(spec()) == 512
    shape = shape_of(spec(), 512)
    assert (shape.vocabulary, shape.hidden, shape.layers, shape.sequence_length) == (512, 32, 2, 32)


def test_an_objective_must_fit_the_architecture() -> None:
    check_objective(spec())
    with pytest.raises(
        InputError, match="masked_lm does not train gpt-tiny, which is a decoder; choose from causal_lm"
    ):
        check_objective(spec(workload={"objective": "masked_lm"}))
    with pytest.raises(InputError, match="no objective 'casual_lm'"):
        check_objective(spec(workload={"objective": "casual_lm"}))
    with pytest.raises(InputError, match="unknown model 'gpt-tinny'"):
        check_objective(spec(workload={"model": "gpt-tinny"}))
