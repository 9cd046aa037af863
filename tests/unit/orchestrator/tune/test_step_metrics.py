"""The numbers of steps by which a search may decide."""

from __future__ import annotations

import pytest
from jobs import changed, job

from orchestrator.config.errors import InputError
from orchestrator.tune.space import check_metric


@pytest.mark.parametrize(
    ("metric", "hint"),
    [
        ("los", "name one of loss, grad_norm"),
        ("step", "name one of loss"),
        ("accuracy", r"as in validation\.accuracy"),
    ],
)
def test_a_metric_that_no_step_has_is_told(metric: str, hint: str) -> None:
    with pytest.raises(InputError, match=rf"tune\.metric: no step has the metric '{metric}'; .*{hint}"):
        check_metric(changed(job("a.txt")).workload, metric)


@pytest.mark.parametrize(
    "metric", ["loss", "tokens_per_second", "memory_bytes", "router_load", "validation.loss"]
)
def test_what_steps_and_evaluations_have_is_taken(metric: str) -> None:
    check_metric(changed(job("a.txt")).workload, metric)


def test_own_code_may_give_any() -> None:
    check_metric(changed(job("a.txt"), workload={"model": "net:Net", "changes": {}}).workload, "energy")


def test_what_is_told_exists_in_a_row() -> None:
    """Each name that is offered is a number of a row's type, or of what a model adds."""
    with pytest.raises(InputError) as found:
        check_metric(changed(job("a.txt")).workload, "los")
    offered = set(found.value.hint.removeprefix("name one of ").replace(";", ",").split(", "))
    assert {"loss", "lr", "mfu", "router_load", "forward_seconds"} <= offered
    assert not offered & {"step", "time", "attempt", "samples", "layout", "saves", "machine"}
