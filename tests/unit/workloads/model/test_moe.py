"""Experts: where tokens go, what is dropped, how they are kept balanced."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workloads.model.moe import DROPPED, PADDING, Experts, MixtureOfExperts, Router, grouped_linear
from workloads.model.parts import MoE
from workloads.model.presets import preset
from workloads.transformer_workload import TransformerWorkload
from workloads.workload import Vocabulary

CONFIG = preset("mixtral-tiny").changed({"hidden": 16, "heads": 2, "kv_heads": 2})
BASE = MoE(experts=4, top_k=2, intermediate=8)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def filled(module: nn.Module) -> nn.Module:
    for number, tensor in enumerate([*module.parameters(), *module.buffers()]):
        with torch.no_grad():
            tensor.copy_(random(*tensor.shape, seed=number))
    return module


def mixture(**options: object) -> MixtureOfExperts:
    return filled(MixtureOfExperts(CONFIG, replace(BASE, **options)))


def slowly(module: MixtureOfExperts, hidden: Tensor) -> Tensor:
    """The definition, token by token."""
    routes, experts = module.router(hidden), module.experts
    out = torch.zeros_like(hidden)
    for b, i, k in torch.ones(routes.experts.shape).nonzero().tolist():
        e = routes.experts[b, i, k]
        if e >= 0:
            x = hidden[b, i]
            gate, up, down = (
                getattr(experts, f"{name}_bias", [0.0] * 4)[e] for name in ("gate", "up", "down")
            )
            inner = F.silu(experts.gate[e] @ x + gate) * (experts.up[e] @ x + up)
            out[b, i] += routes.weights[b, i, k] * (experts.down[e] @ inner + down)
    return out if module.shared is None else out + module.shared(hidden)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 1},
        {"normalise": True},
        {"capacity_factor": 0.6},
        {"shared": 2},
        {"bias": True, "normalise": True},
        {"gate": "sigmoid", "normalise": True, "scale": 2.5, "bias_rate": 0.1, "groups": 2, "top_groups": 1},
    ],
)
def test_dispatch_is_the_sum_over_chosen_experts(options: dict) -> None:
    module, hidden = mixture(**options), random(2, 9, 16, seed=7)
    assert torch.allclose(module(hidden)[0], slowly(module, hidden), atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_those_of_the_definition(bias: bool) -> None:
    module, hidden = mixture(normalise=True, bias=bias), random(2, 9, 16, seed=7)
    module(hidden)[0].square().sum().backward()
    found = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    slowly(module, hidden).square().sum().backward()
    for mine, other in zip(found, module.parameters(), strict=True):
        assert torch.allclose(mine, other.grad, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("inner", "outer"), [(16, 24), (6, 10)])
def test_grouped_linear_in_every_type_and_size(dtype: torch.dtype, inner: int, outer: int) -> None:
    rows, weight = random(7, inner).to(dtype).requires_grad_(), random(3, outer, inner, seed=1).to(dtype)
    counts = torch.tensor([2, 0, 5])
    out = grouped_linear(rows, weight, counts)
    expected = torch.cat([rows[:2] @ weight[0].t(), rows[2:] @ weight[2].t()])
    assert out.dtype == dtype
    assert torch.allclose(out, expected, atol=1e-1 if dtype == torch.bfloat16 else 1e-5)
    out.square().sum().backward()
    assert rows.grad.isfinite().all()


def test_experts_without_tokens_are_no_trouble() -> None:
    experts = filled(Experts(CONFIG, BASE))
    assert experts(random(0, 16), torch.zeros(4, dtype=torch.int64)).shape == (0, 16)


def test_capacity_drops_the_last_tokens_of_a_sequence() -> None:
    module = mixture(top_k=1, capacity_factor=1.0)
    with torch.no_grad():
        module.router.weight.zero_()
        module.router.weight[2] = 1.0
    hidden = random(1, 8, 16).abs()
    chosen = module.router(hidden).experts[0, :, 0].tolist()
    assert chosen == [2, 2, -1, -1, -1, -1, -1, -1]
    out = module(hidden)[0]
    assert out[0, :2].abs().sum() > 0
    assert out[0, 2:].abs().sum() == 0


def test_what_is_dropped_does_not_depend_on_the_batch() -> None:
    module, hidden = mixture(capacity_factor=0.7, auxiliary=0.01, z_loss=0.001), random(4, 9, 16, seed=3)
    whole, extra = module(hidden)
    parts = [module(part) for part in hidden.split(1)]
    assert torch.allclose(whole, torch.cat([p[0] for p in parts]), atol=1e-5)
    assert torch.allclose(extra, torch.stack([p[1] for p in parts]).mean())


def test_the_balancing_loss_is_switchs() -> None:
    moe = replace(BASE, top_k=1, auxiliary=0.01)
    router, hidden = filled(Router(CONFIG, moe)), random(1, 50, 16)
    routes = router(hidden)
    probabilities = (hidden[0] @ router.weight.t()).softmax(-1)
    share = torch.bincount(routes.experts.flatten(), minlength=4) / 50
    assert torch.allclose(routes.extra, 0.01 * 4 * (share * probabilities.mean(0)).sum())


def test_a_balanced_router_has_the_least_balancing_loss() -> None:
    moe = replace(BASE, auxiliary=1.0)
    router = Router(CONFIG, moe)
    with torch.no_grad():
        router.weight.copy_(torch.eye(4, 16) * 10)
    even = torch.eye(4, 16).repeat(1, 3).view(1, 12, 16)
    uneven = torch.eye(4, 16)[:1].expand(12, -1).view(1, 12, 16)
    assert router(even).extra < router(uneven).extra
    assert 0.9 < router(even).extra < 1.1


def test_the_z_loss_is_the_squared_log_partition() -> None:
    router, hidden = filled(Router(CONFIG, replace(BASE, z_loss=0.5))), random(1, 5, 16)
    logits = hidden @ router.weight.t()
    assert torch.allclose(router(hidden).extra, 0.5 * logits.logsumexp(-1).square().mean())


def test_a_router_keeps_to_its_groups() -> None:
    moe = MoE(experts=8, top_k=3, intermediate=8, groups=4, top_groups=2)
    router = filled(Router(CONFIG, moe))
    groups = router(random(2, 30, 16, seed=5)).experts // 2
    assert max(len(set(row.tolist())) for row in groups.flatten(0, 1)) == 2


def test_the_bias_evens_the_load_without_changing_weights() -> None:
    module, hidden = mixture(gate="sigmoid", top_k=1, bias_rate=0.01), random(4, 64, 16, seed=2)
    hidden[..., 0] = 1.0
    with torch.no_grad():
        module.router.weight.mul_(0.1)
        module.router.weight[:, 0] = torch.tensor([1.0, 0.0, 0.0, 0.0])  # expert 0 is liked by all
        module.router.bias.zero_()

    def load() -> Tensor:
        module(hidden)
        found, module.routing_statistics = module.routing_statistics, None
        return found[1:-2]

    before = load()
    for _ in range(40):
        module.update(load())
    after = load()
    assert before.max() > 150
    assert after.max() < 85
    routes = module.router(hidden)
    scores = (hidden @ module.router.weight.t()).sigmoid()
    assert torch.allclose(routes.weights, scores.gather(-1, routes.experts))


def test_the_load_is_summed_over_micro_batches() -> None:
    module, hidden = mixture(gate="sigmoid", bias_rate=0.1), random(2, 9, 16)
    module(hidden)
    module(hidden)
    assert module.routing_statistics[1:-2].sum() == 2 * 2 * 9 * 2


ROUTINGS = [
    {"auxiliary": 0.01, "z_loss": 0.001},
    {"top_k": 1, "capacity_factor": 0.8, "auxiliary": 0.01, "z_loss": 0.001},
    {"gate": "sigmoid", "bias_rate": 0.1, "shared": 1, "groups": 2, "top_groups": 1, "auxiliary": 0.01},
]


def places(count: int, seed: int) -> Tensor:
    """Padding anywhere: bool [4, 12], the last row without a single token."""
    real = torch.rand(4, 12, generator=torch.Generator().manual_seed(seed)) > count / 12
    real[3] = False
    return real


@pytest.mark.parametrize("options", ROUTINGS)
@pytest.mark.parametrize("count", [1, 4, 8])
def test_what_stands_at_padding_moves_nothing(options: dict, count: int) -> None:
    """Neither tokens, losses, load and statistics, nor the gradient of any weight that routes."""
    real, found = places(count, count), []
    for seed in (1, 2):
        module, hidden = mixture(**options), random(4, 12, 16, seed=9)
        hidden[~real] = 10 * random(int((~real).sum()), 16, seed=seed)
        out, extra = module(hidden, real)
        (out[real].square().sum() + extra).backward()
        assert module.routing_statistics is not None
        grads = [p.grad for p in (*module.router.parameters(), *module.experts.parameters())]
        found.append([out[real], extra, module.routing_statistics, *grads])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("options", ROUTINGS)
def test_padding_has_no_part_in_what_is_counted(options: dict) -> None:
    module, hidden, real = mixture(**options), random(4, 12, 16, seed=9), places(4, 5)
    out, _ = module(hidden, real)
    routes = module.router(hidden, real)
    tokens = int(real.sum())
    assert module.routing_statistics is not None
    assert int(module.routing_statistics[:-2].sum()) == tokens * module.moe.top_k
    assert float(module.routing_statistics[-1]) == tokens
    assert bool((routes.experts[~real] == PADDING).all())
    assert bool((routes.experts[real] != PADDING).all())
    shared = 0 if module.shared is None else module.shared(hidden)[~real]
    assert torch.allclose(out[~real], torch.zeros(()) + shared, atol=1e-6)


@pytest.mark.parametrize("options", [o for o in ROUTINGS if "capacity_factor" not in o])
def test_padded_sequences_are_routed_as_they_are_alone(options: dict) -> None:
    module, hidden = mixture(**options), random(3, 12, 16, seed=9)
    lengths = (5, 12, 9)
    real = torch.arange(12) < torch.tensor(lengths)[:, None]
    out, extra = module(hidden, real)
    seen, module.routing_statistics = module.routing_statistics, None
    alone = [module(hidden[i : i + 1, :n]) for i, n in enumerate(lengths)]
    torch.testing.assert_close(out[real], torch.cat([part[0][0] for part in alone]))
    torch.testing.assert_close(extra, torch.stack([part[1] for part in alone]).mean())
    torch.testing.assert_close(seen, module.routing_statistics, rtol=1e-6, atol=0)


def test_padding_takes_no_capacity() -> None:
    module = mixture(top_k=1, capacity_factor=1.0)
    with torch.no_grad():
        module.router.weight.zero_()
        module.router.weight[2] = 1.0
    hidden, real = (
        random(1, 8, 16).abs(),
        torch.tensor([[False, False, True, False, True, True, False, True]]),
    )
    chosen = module.router(hidden, real).experts[0, :, 0].tolist()
    assert chosen == [PADDING, PADDING, 2, PADDING, 2, DROPPED, PADDING, DROPPED]


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_what_routers_did_is_counted_in_training_and_evaluation(gate: str) -> None:
    module, hidden = mixture(gate=gate, capacity_factor=0.5), random(2, 9, 16)
    for _ in range(2):
        module(hidden)
    module.eval()
    module(hidden)
    routes, logits = module.router(hidden), F.linear(hidden, module.router.weight)
    scores = logits.softmax(-1) if gate == "softmax" else logits.sigmoid()
    shares = scores / scores.sum(-1, keepdim=True)
    counted = [3 * int((routes.experts == expert).sum()) for expert in range(-1, 4)]
    assert counted[0] > 0
    assert module.routing_statistics is not None
    assert module.routing_statistics[:5].tolist() == counted
    assert float(module.routing_statistics[5]) == pytest.approx(
        -3 * float((shares * shares.log()).sum().detach()), rel=1e-5
    )
    assert float(module.routing_statistics[6]) == 3 * 2 * 9


def test_the_workload_hands_over_what_routers_did_once() -> None:
    workload = TransformerWorkload("deepseek", preset("deepseek-v3-tiny"), None, Vocabulary(4096, 0))
    model = workload.build()
    model.load_state_dict({n: workload.initial(n, 0) for n in workload.shapes})
    model({"tokens": torch.randint(4096, (2, 16), generator=torch.Generator().manual_seed(0))})
    found = workload.routing(model)
    assert list(found) == ["layers.1.feedforward.router.weight"]  # layer 0 is dense
    assert set(found) <= set(workload.shapes)
    assert float(found["layers.1.feedforward.router.weight"][:-2].sum()) == 2 * 16 * 2
    assert workload.routing(model) == {}


def test_the_workload_balances_all_layers_by_the_load_of_all_ranks() -> None:
    workload = TransformerWorkload("deepseek", preset("deepseek-v3-tiny"), None, Vocabulary(4096, 0))
    model = workload.build()
    model.load_state_dict({n: workload.initial(n, 0) for n in workload.shapes})
    model({"tokens": torch.randint(4096, (2, 16), generator=torch.Generator().manual_seed(0))})
    routed = {name: 2 * seen for name, seen in workload.routing(model).items()}  # of two ranks
    (load,) = (seen[1:-2] for seen in routed.values())  # layer 0 is dense
    assert int(load.sum()) == 2 * 2 * 16 * 2
    workload.balance(model, routed)
    bias = model.layers["1"].feedforward.router.bias
    assert set(bias.sign().tolist()) <= {-1.0, 0.0, 1.0}
    assert torch.allclose(bias.abs()[bias != 0], torch.tensor(0.001))
    assert bias[load.argmax()] < 0 < bias[load.argmin()]
    before = bias.clone()
    workload.balance(model, {name: torch.ones_like(seen) for name, seen in routed.items()})
    assert torch.equal(bias, before)


@pytest.mark.parametrize("counts", [[3, 0, 17, 16, 1], [0, 0, 5, 0, 0], [0, 0, 0, 0, 0]])
def test_products_in_16_bits_are_those_of_each_expert(counts: list[int]) -> None:
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(sum(counts), 32, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(len(counts), 24, 32, generator=generator).bfloat16().requires_grad_()
    found = grouped_linear(rows, weight, torch.tensor(counts))
    upstream = torch.randn(found.shape, generator=generator).bfloat16()
    found.backward(upstream)
    exact_rows, exact_weight = (each.detach().double().requires_grad_() for each in (rows, weight))
    parts = zip(exact_rows.split(counts), exact_weight.unbind(), strict=True)
    exact = torch.cat([part @ expert.T for part, expert in parts])
    exact.backward(upstream.double())
    pairs = ((found, exact), (rows.grad, exact_rows.grad), (weight.grad, exact_weight.grad))
    for mine, other in pairs:
        assert mine is not None
        assert other is not None
        torch.testing.assert_close(mine.double(), other, rtol=1e-2, atol=2e-2)
