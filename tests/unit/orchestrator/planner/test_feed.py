"""Whether preparation keeps up with training."""

from __future__ import annotations

import pytest
from jobs import job

from orchestrator.config.spec import JobSpec, parse
from orchestrator.parallel.layout import ModelShape
from orchestrator.planner.choose_layout import Plan, plan
from orchestrator.planner.demand import demand_of
from orchestrator.planner.device_profile import load
from orchestrator.planner.feed import RATES, TOKEN_BYTES, feed
from orchestrator.resolve.resolved_job import resolve


def streamed(**data: object) -> JobSpec:
    document = job("a.txt")
    document["data"] |= {"streaming": True, **data}
    return parse(document)


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    return resolve(parse(job("a.txt"))).shape


def planned(spec: JobSpec, shape: ModelShape, device: str) -> Plan:
    return plan(demand_of(spec), shape, 2, load(device).machine("fp32"), must_fit=False)


def test_only_streamed_text_feeds(shape: ModelShape) -> None:
    spec = parse(job("a.txt"))
    assert feed(spec.data, spec.resources.per_worker, planned(spec, shape, "h100")) is None


def test_a_step_waits_for_what_it_reads_faster_than_text_is_prepared(shape: ModelShape) -> None:
    spec = streamed()
    chosen = planned(spec, shape, "h100")
    found = feed(spec.data, spec.resources.per_worker, chosen)
    assert found is not None
    assert found.processors == int(14 - spec.resources.per_worker.bundle.cpu) * chosen.chosen.layout.world
    assert found.prepared == found.processors * RATES["fastest"] / TOKEN_BYTES
    assert found.read == pytest.approx(chosen.tokens / chosen.chosen.seconds)
    slow = feed(
        (asked := streamed(encode_with="tokenizers")).data,
        asked.resources.per_worker,
        chosen,
    )
    assert slow is not None
    assert slow.stall_seconds >= found.stall_seconds
    waited = chosen.tokens / (chosen.chosen.seconds + slow.stall_seconds)
    assert waited == pytest.approx(min(slow.prepared, slow.read))


def test_one_task_runs_where_no_processor_is_free(shape: ModelShape) -> None:
    spec = streamed()
    found = feed(spec.data, spec.resources.per_worker, planned(spec, shape, "cpu-core"))
    assert found is not None
    assert found.processors == 1
