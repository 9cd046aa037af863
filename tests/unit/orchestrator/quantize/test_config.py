"""What a job says of quantisation, and what it cannot be combined with."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec, parse
from orchestrator.parallel.layout import Layout
from orchestrator.planner.demand import demand_of
from orchestrator.planner.memory import peak_bytes
from orchestrator.resolve.resolved_job import resolve
from workloads.model.scheme import Scheme

INT4 = {"weights": "int4"}


def job(quantize: dict[str, Any] | None, **parts: Any) -> JobSpec:
    document: dict[str, Any] = {
        "name": "small",
        "workload": {"model": "llama-tiny", "objective": "causal_lm"},
        "data": {"sources": [{"uri": "a.txt"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 32},
        "train": {"steps": 4, "global_batch": 8},
        "quantize": quantize,
    }
    for key, value in parts.items():
        document[key] = {**document.get(key, {}), **value}
    return parse(document)


@pytest.mark.parametrize(
    ("quantize", "parts", "wanted"),
    [
        (
            INT4,
            {"workload": {"adapter": {"kind": "lora"}, "init_from": "runs/a"}},
            "an adapter changes them when it is merged",
        ),
        (INT4, {"train": {"precision": "fp8"}}, "both replace linear layers"),
        (INT4, {"train": {"compile": True}}, "train.compile may compute the rounding with other bits"),
        (
            INT4,
            {"workload": {"objective": "dpo"}},
            "would round the reference of dpo too",
        ),
        ({**INT4, "from_step": 4}, {}, "from_step 4 is not before the last of 4 steps"),
        ({"weights": "q4_0", "group": 64}, {}, "group 64 is not that of q4_0, which is 32"),
        ({"weights": "q8_0", "activations": "dynamic"}, {}, "activations are not stored with q8_0"),
        ({"weights": "int3"}, {}, "int8"),
        ({"weights": "int8", "int8": ["*"]}, {}, "int8 is for weights int4, and these are int8"),
    ],
)
def test_what_does_not_go_together_is_told(
    quantize: dict[str, Any], parts: dict[str, Any], wanted: str
) -> None:
    with pytest.raises(InputError, match=wanted):
        job(quantize, **parts)


def test_the_scheme_has_the_groups_of_the_format() -> None:
    assert job(INT4).quantize.scheme == Scheme("int4", 128)  # type: ignore[union-attr]
    assert job({"weights": "int8", "group": "row"}).quantize.scheme.group == 0  # type: ignore[union-attr]
    assert job({"weights": "q4_0"}).quantize.scheme.group == 32  # type: ignore[union-attr]


def test_the_weights_are_in_full_precision_before_the_first_step_of_rounding() -> None:
    asked = job({**INT4, "from_step": 2}).quantize
    assert asked is not None
    assert [asked.at(step) is not None for step in range(4)] == [False, False, True, True]


def test_a_run_is_another_one_with_it_and_the_same_without() -> None:
    assert "quantize" not in job(None).identity()
    assert job(INT4).identity() != job({**INT4, "group": 64}).identity()
    assert "int8" not in job(INT4).identity()["quantize"]  # as of a run before there was the key
    assert job({**INT4, "int8": ["*.query.*"]}).identity()["quantize"]["int8"] == ["*.query.*"]


def test_a_group_is_not_cut_by_tensor_parallelism() -> None:
    """Rows of 96 and of 64 over two ranks have 48 and 32 on each."""
    sizes = {"hidden": 64, "heads": 4, "kv_heads": 4, "intermediate": 96}
    for group, wanted in ((32, ["96"]), (16, []), ("row", []), (48, ["64"])):
        shape = resolve(job({**INT4, "group": group}, workload={"changes": sizes})).shape
        found = [each for each in Layout(tp=2).problems(shape, 8) if "share a scale" in each]
        assert [each.split(" rows of ")[1].split()[0] for each in found] == wanted


def test_a_plan_counts_what_rounding_holds() -> None:
    plain, rounded, tokens = (
        demand_of(job(each)) for each in (None, INT4, {**INT4, "weights": "int8", "activations": "dynamic"})
    )
    shape = resolve(job(None)).shape
    sizes = [peak_bytes(demand, shape, Layout(micro_batch=8)) for demand in (plain, rounded, tokens)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[2]
    assert tokens.program.rounds_weights
    assert tokens.program.rounds_inputs
    assert not rounded.program.rounds_inputs
