"""Host memory of workers that machines are rendered for is what the planner counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
from jobs import job

from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec, parse
from orchestrator.extensions.render.cluster_needs import ClusterNeeds
from orchestrator.extensions.render.memory import PROCESS_GIB, with_host_memory
from orchestrator.extensions.render.needs import needed_machines
from orchestrator.extensions.render.pods import SHARED_MEMORY_GIB
from orchestrator.planner.host_memory import state_bytes, worker_bytes
from orchestrator.resolve.resolved_job import resolve

BIG = {"workload": {"model": "llama-3-8b"}}


def asked(workers: Any = 8, gpu: int = 1, **more: Any) -> JobSpec:
    return parse(
        job("s3://b/*.txt") | BIG | {"resources": {"workers": workers, "per_worker": {"gpu": gpu}}} | more
    )


def memory(spec: JobSpec, given: float | None = None, per_node: int | None = None) -> tuple[float, str]:
    needs, line = with_host_memory(
        spec,
        needed_machines(
            name=spec.name,
            resources=spec.resources,
            parallel=spec.parallel,
            every=spec.all_workers,
            image=None,
            spot=False,
            per_node=per_node,
            accelerators=(),
        ),
        given,
    )
    return needs.memory_gib, line


@pytest.mark.parametrize("per_node", [None, 8])
def test_a_worker_has_room_for_what_it_saves_its_processes_and_shared_memory(per_node: int | None) -> None:
    spec = asked()
    state = state_bytes(spec.train.optimizer, spec.checkpoint.ema, resolve(spec).shape)
    saved = worker_bytes(spec.resources, state, 8) / 2**30
    found, line = memory(spec, None, per_node)
    assert found == math.ceil(PROCESS_GIB + saved + SHARED_MEMORY_GIB / (per_node or 1))
    assert f"{saved:.1f} for two copies of the run's state among 8" in line


def test_the_fewest_workers_have_the_most_to_hold() -> None:
    few, line = memory(asked({"min": 2, "max": 8}))
    many, _ = memory(asked())
    assert few == memory(asked(2))[0] > many
    assert line.endswith(f"; of 8 workers each needs {many:g}; --memory-gib says otherwise")


def test_less_than_the_run_takes_is_refused_and_less_than_all_of_it_is_told() -> None:
    with pytest.raises(
        InputError, match=r"--memory-gib 12: .*19\.\d GiB of each of 8 workers; leave it out, or"
    ):
        memory(asked(), 12.0)
    assert memory(asked(), 20.0) == (20.0, memory(asked())[1].removesuffix("; --memory-gib says otherwise"))
    assert memory(asked(), 64.0) == (64.0, "")


def test_a_job_on_processors_is_as_it_was() -> None:
    assert memory(asked(gpu=0)) == (PROCESS_GIB, "")
    assert memory(asked(gpu=0), 2.5) == (2.5, "")


def test_a_model_that_is_not_here_is_told() -> None:
    spec = asked(workload={"model": "hf:/nowhere"})
    found, line = memory(spec)
    assert found == PROCESS_GIB + SHARED_MEMORY_GIB
    assert "the size of a worker's checkpoint is unknown here (workload: /nowhere" in line
    assert memory(spec, 64.0) == (64.0, "")


def test_a_tokenizer_on_a_store_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "orchestrator.data.encoding.tokenizer.is_there", lambda uri: pytest.fail(f"{uri} was asked for")
    )
    spec = asked()
    spec = spec.model_copy(update={"data": spec.data.model_copy(update={"tokenizer": "s3://b/tokenizer"})})
    assert memory(spec)[0] >= memory(asked())[0]


def test_needs_without_memory_are_those_of_their_machines() -> None:
    assert isinstance(
        found := needed_machines(
            name=(given := asked()).name,
            resources=given.resources,
            parallel=given.parallel,
            every=given.all_workers,
            image=None,
            spot=False,
            per_node=None,
            accelerators=(),
        ),
        ClusterNeeds,
    )
    assert found.memory_gib == 0.0
