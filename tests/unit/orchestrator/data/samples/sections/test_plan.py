from __future__ import annotations

from itertools import chain

import pytest

from orchestrator.data.samples.sections.plan import PARTS, SectionPlan


@pytest.mark.parametrize("parts", [(1,), (1, 1), (3, 70), (64,), (5, 0, 9), (1000, 3), (0, 2)])
def test_sections_need_every_part_once_and_in_order(parts: tuple[int, ...]) -> None:
    plan = SectionPlan(parts)
    numbers = [plan.numbers(section) for section in range(plan.sections)]
    assert sorted(chain(*numbers)) == list(range(sum(parts)))
    assert plan.needed(plan.sections - 1) == list(parts)
    assert plan.end(plan.sections - 1) == [(count, 0) for count in parts]
    for source, (first, count) in enumerate(zip(plan.first, parts, strict=True)):
        own = [n for n in chain(*numbers) if first <= n < first + count]
        assert own == list(range(first, first + count)), f"source {source}"


def test_a_section_is_an_eighth_of_little_text_and_at_most_so_many_parts_of_much() -> None:
    assert SectionPlan((64,)).sections == 8
    assert SectionPlan((3,)).sections == 3
    assert SectionPlan((10_000,)).sections == 157
    assert max(len(SectionPlan((10_000,)).numbers(n)) for n in range(157)) <= PARTS
