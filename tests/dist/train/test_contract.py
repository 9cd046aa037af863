"""The contract on bits, as a table: `docs/determinism.md` has what this module proves, and nothing else.

`python tests/dist/train/test_contract.py` prints the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness import MODELS, Results, check_equal, same_bits

from cluster.workers.process_gang import ProcessGang
from orchestrator.parallel.layout import Layout

PAGE = Path(__file__).parents[3] / "docs" / "determinism.md"
BITWISE = {"determinism": "bitwise", "virtual_shards": 4}
STEPS = 4
ONE: dict[str, Any] = {"dp": 1}
TWO = [{"dp": 2}, {"dp": 2, "zero": 1}, {"dp": 2, "zero": 3}, {"tp": 2}, {"cp": 2, "zero": 3}, {"pp": 2}]
EXPERTS = [{"dp": 2}, {"dp": 2, "ep": 2, "zero": 1}, {"tp": 2}, {"pp": 2}]
FOUR = [{"dp": 2, "tp": 2}, {"dp": 2, "pp": 2, "zero": 1}]


@dataclass(frozen=True)
class Promise:
    """What holds between runs under these layouts: each with itself once more, or all with the first."""

    determinism: str
    changes: str
    exact: bool
    layouts: dict[str, list[dict[str, Any]]]
    """By model."""
    again: bool = False

    @property
    def row(self) -> str:
        """The line of the table."""
        holds = "same bits" if self.exact else "within 1e-5"
        tried = " | ".join(
            ", ".join(named(each) for each in self.layouts[model]) for model in ("decoder", "moe")
        )
        return f"| `{self.determinism}` | {self.changes} | {holds} | {tried} |"


PROMISES = [
    Promise(
        "rerun", "nothing: the run is done again", True, {"decoder": TWO + FOUR, "moe": EXPERTS}, again=True
    ),
    Promise(
        "rerun",
        "the width",
        False,
        {"decoder": [ONE, {"dp": 2}, {"dp": 4}], "moe": [ONE, {"dp": 2}, {"dp": 4}]},
    ),
    Promise("rerun", "the layout", False, {"decoder": [ONE, *TWO, *FOUR], "moe": [ONE, *EXPERTS]}),
    Promise(
        "bitwise",
        "nothing: the run is done again",
        True,
        {"decoder": [{"dp": 2}], "moe": [{"dp": 2}]},
        again=True,
    ),
    Promise(
        "bitwise",
        "the width",
        True,
        {"decoder": [ONE, {"dp": 2}, {"dp": 4}], "moe": [ONE, {"dp": 2}, {"dp": 4}]},
    ),
]


def named(layout: dict[str, Any]) -> str:
    return " ".join(f"{axis}{degree}" for axis, degree in layout.items())


def table() -> str:
    """The table of the page."""
    head = (
        "| `train.determinism` | what changes | losses, norms and weights | dense, tried | experts, tried |\n"
    )
    return head + "|---|---|---|---|---|\n" + "\n".join(each.row for each in PROMISES) + "\n"


def case(promise: Promise, model: str, layout: dict[str, Any], again: bool = False) -> dict[str, Any]:
    micro_batch = 2
    train = {"train": BITWISE} if promise.determinism == "bitwise" else {}
    found = Layout(**{"micro_batch": micro_batch, **layout})
    name = f"{promise.determinism} {model} {named(layout)}{' again' if again else ''}"
    return {"name": model, **MODELS[model], **train, "steps": STEPS, "layout": found.to_json(), "id": name}


def test_the_page_has_the_table() -> None:
    assert table() in PAGE.read_text(), "python tests/dist/train/test_contract.py prints it"


@pytest.mark.slow
@pytest.mark.parametrize(
    "promise", PROMISES, ids=lambda each: f"{each.determinism}-{each.changes.split(':')[0]}"
)
def test_it_holds(promise: Promise, tmp_path: Path, gang: ProcessGang) -> None:
    results = Results(tmp_path, gang)
    for model, layouts in promise.layouts.items():
        cases = [case(promise, model, layout) for layout in layouts]
        repeated = [case(promise, model, layout, again=True) for layout in layouts] if promise.again else []
        for world in (1, 2, 4):
            those = [each for each in cases + repeated if Layout(**each["layout"]).world == world]
            if those:
                results.run(world, those)
        others = repeated or [cases[0]] * len(cases)
        for one, other in zip(cases, others, strict=True):
            compare = same_bits if promise.exact else check_equal
            compare(results.of(one), results.of(other))


if __name__ == "__main__":
    print(table(), end="")
