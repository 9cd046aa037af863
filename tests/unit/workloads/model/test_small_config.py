"""The small copy of a model: of the same parts, and divided by the same axes."""

from __future__ import annotations

import pytest

from orchestrator.parallel.layout import Layout
from orchestrator.planner.shape_of_model import model_shape
from workloads.describe import parameters
from workloads.errors import WorkloadError
from workloads.hf.check.parity_table import SIZE, VOCABULARY
from workloads.model.config import TransformerConfig
from workloads.model.presets import PRESETS, preset
from workloads.model.small_config import narrow
from workloads.transformer_workload import TransformerWorkload

LAYOUTS = (
    Layout(),
    Layout(tp=2, pp=2),
    Layout(pp=2, schedule="zbv"),
    Layout(dp=2, ep=2),
    Layout(dp=3, ep=3, tp=5),
)
LARGE = [name for name in PRESETS if not name.endswith("tiny")]


@pytest.mark.parametrize("name", LARGE)
def test_a_small_model_has_the_same_parts_and_axes(name: str) -> None:
    config = preset(name).changed({"vocab_size": 512})
    for layout in LAYOUTS:
        large = layout.problems(model_shape(config, 128), 64)
        if large:  # what the model cannot have at its own size
            continue
        small = config.changed(narrow(config, layout.tp, layout.stages, layout.ep))
        assert layout.problems(model_shape(small, 128), 64) == []
        assert parameters(small) < 20e6
        assert (small.moe is None) == (config.moe is None)
        assert (small.kv_heads < small.heads) == (config.kv_heads < config.heads)
        assert small.family == config.family
        if config.moe:
            assert any(map(small.moe.at, range(small.layers)))
            if not all(map(config.moe.at, range(config.layers))):
                assert not all(map(small.moe.at, range(small.layers)))


def exports(config: TransformerConfig) -> bool:
    """Whether transformers has a class for it."""
    try:
        TransformerWorkload("trial", config, None, VOCABULARY).check_hf()  # type: ignore[arg-type]
    except WorkloadError:
        return False
    return True


@pytest.mark.parametrize(
    "name", ["gpt2", "llama-3-8b", "qwen3-8b", "bert-base", "t5-base", "mixtral-8x7b", "deepseek-v3"]
)
def test_a_small_model_is_exported_where_the_large_one_is(name: str) -> None:
    config = preset(name).changed({"vocab_size": SIZE})
    assert exports(config)
    for layout in LAYOUTS:
        if not layout.problems(model_shape(config, 128), 64):
            assert exports(config.changed(narrow(config, layout.tp, layout.stages, layout.ep))), layout
