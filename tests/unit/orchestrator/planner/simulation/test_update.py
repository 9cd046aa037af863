"""The update of the weights as the planner counts it, beside the engine's own."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.optim.blocks import names_in_8_bits
from orchestrator.parallel.layout import Layout, ModelShape
from orchestrator.planner.device import Machine
from orchestrator.planner.shape_of_model import model_shape
from orchestrator.planner.simulation.operators import Program
from orchestrator.planner.simulation.step import STEP_SECONDS, step_time
from orchestrator.planner.simulation.update import kept_numbers, update_seconds
from workloads.describe import describe
from workloads.load import load
from workloads.workload import Vocabulary

ROOFLINE = Machine(
    memory=1e12, flops=1e12, full_flops=1e12, matrix_share=1.0, memory_bandwidth=1e30, launch=0.0
)
"""A machine whose products take their arithmetic alone."""
OWN = """
from torch import nn

class Model(nn.Module):
    def __init__(self, vocabulary_size):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64, bias=False)])
        self.table = nn.Embedding(vocabulary_size, 64)
        self.head = nn.Linear(64, vocabulary_size, bias=False)
    def loss(self, batch):
        raise NotImplementedError
"""
"""A model without named layers."""
MUON = Program(width=4.0, optimizer="muon")


def shape_of(model: str) -> ModelShape:
    return model_shape(describe(model), 64)


def arithmetic_of(model: str) -> float:
    """Floating-point operations of Muon's iterations over the matrices of the layers that the model really has."""
    workload = load(model, "causal_lm", Vocabulary(300, 0), sequence_length=64)
    top, found = max(map(workload.depth, workload.shapes)), 0.0
    for name, size in workload.shapes.items():
        if len(size) >= 2 and 0 < workload.depth(name) < top:
            *stack, rows, columns = size
            least, most = sorted((rows, columns))
            found += 5 * (4 * least**2 * most + 2 * least**3) * (stack[0] if stack else 1)
    return found


def test_numbers_kept_are_the_slots_of_the_engine() -> None:
    assert {kept_numbers(name, shape_of("llama-tiny")) for name in ("adamw", "lamb")} == {2.0}
    assert {kept_numbers(name, shape_of("llama-tiny")) for name in ("lion", "lars")} == {1.0}
    shape = shape_of("llama-tiny")
    tables = 2 * shape.vocabulary * shape.hidden / shape.parameters
    assert kept_numbers("muon", shape) == pytest.approx(1.0 + tables)
    assert kept_numbers("my_module:mine", shape) == 2.0
    in_8_bits = 0.5 + 2 / 256  # two codes of a byte, and two scales for each block
    share = shape.vocabulary * shape.hidden / shape.parameters
    assert kept_numbers("adamw_8bit", shape) == pytest.approx(share * 2.0 + (1 - share) * in_8_bits)
    assert kept_numbers("adamw_8bit", replace(shape, trained_share=0.01)) == pytest.approx(in_8_bits)


def test_embeddings_of_an_own_model_are_counted_from_its_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small_own.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "small_own", raising=False)
    workload = load("small_own:Model", "causal_lm", Vocabulary(5000, 0), sequence_length=16)
    assert workload.embeddings == {"network.table.weight"}
    assert names_in_8_bits(workload) == {"network.layers.0.weight", "network.head.weight"}
    table, everything = 5000 * 64, sum(map(math.prod, workload.shapes.values()))
    kept = kept_numbers("adamw_8bit", model_shape(workload.config, 16))
    in_8_bits = 0.5 + 2 / 256
    assert kept == pytest.approx((table * 2.0 + (everything - table) * in_8_bits) / everything)


@pytest.mark.parametrize("model", ["llama-tiny", "gpt-tiny", "mixtral-tiny"])
def test_matrices_are_those_of_the_model(model: str) -> None:
    found = update_seconds(shape_of(model), Layout(), ROOFLINE, MUON, 0.0) * ROOFLINE.full_flops
    assert found == pytest.approx(arithmetic_of(model), rel=0.02)  # of a router it counts nothing


def test_replicas_share_the_matrices_and_tensor_parallel_ranks_do_not() -> None:
    shape = replace(shape_of("llama-tiny"), layers=8, hidden=512, feedforward=1536, heads=8, kv_heads=8)
    free = replace(ROOFLINE, inside=replace(ROOFLINE.inside, latency=0.0, bandwidth=1e30))
    alone, two, tensor, stages = (
        update_seconds(shape, layout, free, MUON, 0.0)
        for layout in (Layout(), Layout(dp=2), Layout(tp=2), Layout(pp=2))
    )
    assert two == pytest.approx(alone / 2)
    assert stages == pytest.approx(alone / 2)
    assert tensor == pytest.approx(alone)
    slow = replace(ROOFLINE, inside=replace(ROOFLINE.inside, latency=0.0, bandwidth=1e9))
    sent = [update_seconds(shape, Layout(dp=2, zero=zero), slow, MUON, 0.0) - two for zero in (0, 1)]
    assert sent[1] == pytest.approx(2 * sent[0])


def test_a_step_is_longer_by_the_update() -> None:
    shape, layout = shape_of("llama-tiny"), Layout()
    plain, muon = (
        step_time(shape, layout, 8, ROOFLINE, Program(width=4.0, optimizer=o)) for o in ("adamw", "muon")
    )
    assert muon.optimizer - STEP_SECONDS > 2 * (plain.optimizer - STEP_SECONDS)
    assert muon.seconds - plain.seconds == pytest.approx(muon.optimizer - plain.optimizer)
