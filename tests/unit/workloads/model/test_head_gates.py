"""Gates of attention heads: the distribution, its draws, and the model without gates that computes the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestrator.prune.config import TO_CLOSE
from workloads.errors import WorkloadError
from workloads.load import load
from workloads.model.dropout import KEYS, row_keys
from workloads.model.head_gates import (
    START,
    FoldedOutput,
    HeadGates,
    drawn_gates,
    folded_reader,
    gates_of,
    open_probability,
)
from workloads.model.importance import gradient
from workloads.model.stored import is_gates
from workloads.transformer_workload import TransformerWorkload
from workloads.workload import Vocabulary

VOCABULARY = Vocabulary(160, eos=2, pad=1, bos=0, cls=3, sep=4, mask=5, sentinels=tuple(range(60, 160)))
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-tiny": ("causal_lm", {}),
    "qwen3-tiny": ("causal_lm", {"kv_heads": 2}),
    "deepseek-v3-tiny": ("causal_lm", {}),
    "bert-tiny": ("masked_lm", {}),
    "albert-tiny": ("masked_lm", {}),
    "t5-tiny": ("span_corruption", {}),
}


def workload_of(model: str, head_gates: bool = True) -> TransformerWorkload:
    objective, changes = MODELS[model]
    found = load(
        model, objective, VOCABULARY, changes=changes, sequence_length=16, seed=1, head_gates=head_gates
    )
    assert isinstance(found, TransformerWorkload)
    return found


def spread_out(workload: TransformerWorkload) -> nn.Module:
    """The model in evaluation mode with gates that are closed, between and open."""
    model = workload.build().eval()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(workload.initial(name, 1))
            if is_gates(name):
                tensor.add_(torch.randn(tensor.shape, generator=draw) * 4 - 2)
    return model


def batch_of(workload: TransformerWorkload, seed: int = 0) -> dict[str, Tensor]:
    tokens = torch.randint(6, 50, (3, 16), generator=torch.Generator().manual_seed(seed))
    pair = {"decoder_tokens": tokens.flip(1)} if workload.config.architecture == "encoder-decoder" else {}
    return {"tokens": tokens, "labels": tokens.flip(1), **pair}


@pytest.mark.parametrize("log_alpha", [-4.0, -1.0, 0.0, START])
def test_the_penalty_is_the_integral_of_the_distribution_and_so_is_its_gradient(log_alpha: float) -> None:
    """By counting the numbers for which the gate is open: the middle of each of a million parts of (0, 1)."""
    count = 1_000_000
    uniform = ((torch.arange(count, dtype=torch.float64) + 0.5) / count).unsqueeze(0)

    def share(at: float) -> float:
        return float((drawn_gates(torch.full((count,), at), uniform) > 0).double().mean())

    point = torch.tensor(log_alpha, dtype=torch.float64, requires_grad=True)
    probability = open_probability(point)
    (slope,) = torch.autograd.grad(probability, point)
    assert float(probability.detach()) == pytest.approx(share(log_alpha), abs=3e-6)
    step = 0.05
    assert float(slope) == pytest.approx(
        (share(log_alpha + step) - share(log_alpha - step)) / (2 * step), abs=1e-4
    )


def test_a_gate_begins_open_and_closes_where_the_note_to_the_user_says() -> None:
    assert float(gates_of(torch.tensor(START))) == 1.0
    assert float(gates_of(torch.tensor(START - TO_CLOSE))) == 0.0
    assert float(gates_of(torch.tensor(START - TO_CLOSE + 0.1))) > 0.0
    assert float(gates_of(torch.tensor(0.0))) == pytest.approx(0.5)


@pytest.mark.parametrize("model", MODELS)
def test_folded_gates_compute_the_same(model: str) -> None:
    workload, plain = workload_of(model), workload_of(model, head_gates=False)
    gated = spread_out(workload)
    state = gated.state_dict()
    closed = torch.cat([gates_of(each) == 0 for name, each in state.items() if is_gates(name)])
    assert 0 < int(closed.sum()) < len(closed)
    read = folded_reader(workload.shapes, state.__getitem__)
    folded = plain.build().eval()
    folded.load_state_dict({name: read(name) for name in plain.shapes})
    batch = batch_of(workload)
    with torch.no_grad():
        torch.testing.assert_close(folded(batch).hidden, gated(batch).hidden, rtol=1e-5, atol=1e-5)
    workload.check_hf()
    written = dict(workload.hf_state(state.__getitem__))
    wanted = dict(plain.hf_state(folded.state_dict().__getitem__))
    assert written.keys() == wanted.keys()
    assert all(torch.equal(written[name], wanted[name]) for name in wanted)


def test_parts_of_a_stored_projection_are_folded_too() -> None:
    weight = torch.randn(6, 12)
    log_alpha = torch.tensor([-5.0, 0.3, 5.0])
    folded = FoldedOutput(weight, log_alpha)
    whole = folded[slice(0, 6), slice(0, 12)]
    assert torch.equal(whole, weight * gates_of(log_alpha).repeat_interleave(4))
    assert torch.equal(folded[slice(2, 5), slice(3, 9)], whole[2:5, 3:9])


def test_each_sample_draws_its_own_gates_in_each_layer_whatever_batch_it_is_in() -> None:
    workload = workload_of("t5-tiny")
    model = spread_out(workload).train()
    seen: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, HeadGates):
            nn.init.zeros_(module.log_alpha)
            module.register_forward_hook(lambda _, given, out: seen.append((out / given[0])[:, :, 0, 0]))
    batch = batch_of(workload) | {KEYS: row_keys(7, 40, 3)}
    model(batch)
    together = seen[:]
    seen.clear()
    for row in range(3):
        model({name: each[row : row + 1] for name, each in batch.items()})
    count = len(together)
    apart = [torch.cat(seen[layer::count]) for layer in range(count)]
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    # Encoder, decoder and what the decoder reads of the encoder: no two draw alike.
    assert count == sum(is_gates(name) for name in workload.shapes)
    assert len({tuple(row.tolist()) for each in together for row in each}) == 3 * count


def test_ranks_of_tensor_parallelism_draw_for_their_own_heads() -> None:
    gates, keys, mixed = HeadGates(4, 3), row_keys(7, 40, 5), torch.ones(5, 4, 1, 1)
    nn.init.zeros_(gates.log_alpha)
    whole = gates(mixed, keys)
    gates.log_alpha = nn.Parameter(torch.zeros(2))
    parts = []
    for gates.part in range(2):
        parts.append(gates(mixed[:, :2], keys))
    assert torch.equal(torch.cat(parts, 1), whole)


def test_closed_heads_have_no_importance_so_a_smaller_model_leaves_them_out_first() -> None:
    workload, plain = workload_of("bert-tiny"), workload_of("bert-tiny", head_gates=False)
    state = spread_out(workload).state_dict()
    read = folded_reader(workload.shapes, state.__getitem__)
    model = plain.build().eval()
    model.load_state_dict({name: read(name) for name in plain.shapes})
    scores = gradient(model, plain.config, plain.loss, [batch_of(plain)])
    for name, log_alpha in ((name, each) for name, each in state.items() if is_gates(name)):
        of_heads = scores[name.removesuffix(".gates.log_alpha")]
        assert torch.equal(of_heads == 0, gates_of(log_alpha) == 0)


def test_two_networks_have_no_gates() -> None:
    with pytest.raises(WorkloadError, match="head_penalty is for one network"):
        load(
            "electra-tiny",
            "replaced_token_detection",
            VOCABULARY,
            sequence_length=16,
            seed=1,
            head_gates=True,
        )


def test_gates_are_vectors_that_no_weight_decay_reaches() -> None:
    workload = workload_of("gpt-tiny")
    shapes = {name: shape for name, shape in workload.shapes.items() if is_gates(name)}
    assert set(shapes.values()) == {torch.Size([workload.config.heads])}
    assert replace(workload.config, head_gates=False) == workload_of("gpt-tiny", head_gates=False).config
