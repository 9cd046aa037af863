"""The page of a plan: its timeline shows every action, and memory never falls below what is always held."""

from __future__ import annotations

import re

import pytest

from orchestrator.config.spec import parse
from orchestrator.observe.pages.plan_page import plan_page
from orchestrator.planner.choose_layout import plan
from orchestrator.planner.demand import demand_of
from orchestrator.planner.device import Machine
from orchestrator.planner.shape_of_model import model_shape
from workloads.describe import describe


@pytest.mark.parametrize(
    ("parallel", "bars"),
    [
        ({"pp": 2, "micro_batch": 1}, 2 * 8 * 2),
        ({"pp": 2, "micro_batch": 1, "schedule": "zbv"}, 2 * 8 * 2 * 3),
        ({"micro_batch": 2}, 0),
        ("auto", 0),
    ],
)
def test_the_page_shows_the_plan(parallel: object, bars: int) -> None:
    spec = parse(
        {
            "name": "paper",
            "workload": {"model": "gpt-tiny"},
            "data": {"sources": [{"uri": "a"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 64},
            "train": {"steps": 10, "global_batch": 32},
            "parallel": parallel,
        }
    )
    shape = model_shape(describe("gpt-tiny"), 64)
    found = plan(demand_of(spec), shape, 2, Machine(64e9, 1e12, name="mine"))
    page = plan_page(
        spec.name,
        spec.workload.model,
        demand_of(spec),
        shape,
        found,
        fits=False,
        needed=3 * 2**30,
        peaks=[5 * 2**30, 7 * 2**30][: found.chosen.layout.pp],
        traced=True,
    )
    assert "<h1>paper</h1>" in page
    assert "mine" in page
    assert "does not fit" in page
    assert "3 GiB" in page
    assert len(re.findall('<rect class="a-[FBIW]"', page)) == bars
    assert page.count("memory over the step") == (2 if bars else 1)
    assert "at most 5 GiB by the trace" in page
    assert ("at most 7 GiB by the trace" in page) is bool(bars)
    assert f'<td class="n">{7 if bars else 5} GiB</td>' in page, "the row of the chosen layout"
    drawn = set(re.findall('<rect class="a-([a-z]+)"', page))
    assert drawn
    assert all(f".a-{part} {{" in page for part in drawn), "each part of a step has a colour"
