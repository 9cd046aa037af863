"""Which layers a deeper model begins as."""

import pytest

from workloads.errors import WorkloadError
from workloads.model.depth_stacking import stacked

BASE = [
    "tokens.weight",
    *(f"{stack}.layers.{i}.up.weight" for stack in ("encoder", "decoder") for i in range(2)),
]


def deeper(count: int) -> list[str]:
    return [
        "tokens.weight",
        *(f"{stack}.layers.{i}.up.weight" for stack in ("encoder", "decoder") for i in range(count)),
    ]


def test_each_stack_is_copied_on_top_of_itself() -> None:
    found = stacked(BASE, deeper(4), "there")
    assert found == {
        f"{stack}.layers.{i}.up.weight": f"{stack}.layers.{i - 2}.up.weight"
        for stack in ("encoder", "decoder")
        for i in (2, 3)
    }


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_depth_that_is_no_multiple_is_refused(count: int) -> None:
    with pytest.raises(WorkloadError, match=f"there has 2 encoder.layers, but workload.model {count}"):
        stacked(BASE, deeper(count), "there")
