"""Training with fake-quantised weights: every layout is one process, one process is a plain loop in torch with
compressed-tensors' rounding, and a run that goes on from a commit has the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from harness import MODELS, Results, check_equal, same_bits, whole_batch
from rank_cases import job, workload_of
from torch import Tensor

from cluster.workers.process_gang import ProcessGang

DECODER = {"name": "decoder", **MODELS["decoder"], "steps": 4}
GROUPS = {"weights": "int4", "group": 16, "keep": ["layers.1.*"], "int8": ["*.output.*"]}
TOKENS = {"weights": "int8", "group": "row", "activations": "dynamic"}
ROWS = {"weights": "int8", "group": "row", "from_step": 2}
BLOCKS = {"weights": "q4_0", "keep": ["*.attention.output.*"]}
SCHEMES: dict[str, dict[str, Any]] = {
    "groups": {"quantize": GROUPS},
    "rows": {"quantize": ROWS},
    "tokens": {"quantize": TOKENS},
    "blocks": {**MODELS["modern"], "quantize": BLOCKS, "export": "gguf"},
    "half": {"quantize": TOKENS, "train": {"precision": "bf16"}},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "zero2": {"dp": 2, "zero": 2},
    "zero3": {"dp": 2, "zero": 3},
    "tp": {"tp": 2},
    "sequence": {"tp": 2, "sequence": True, "recompute": "full"},
    "pp": {"pp": 2},
    "zbv": {"pp": 2, "schedule": "zbv"},
    "cp": {"cp": 2},
    "deepspeed2": {"dp": 2, "zero": 2, "engine": "deepspeed"},
    "deepspeed3": {"dp": 2, "zero": 3, "engine": "deepspeed"},
}
QUICK = [
    ("groups", "zero3"), ("groups", "tp"), ("rows", "zbv"), ("blocks", "tp"), ("tokens", "zero3"), ("half", "tp"),
]  # fmt: skip
LATER = [(scheme, layout) for scheme in SCHEMES for layout in LAYOUTS if (scheme, layout) not in QUICK]
NEAR = {"groups": 1e-4, "rows": 1e-4}
"""Tolerance where it is not 1e-5: integers of 8 bits are close, and a sum in another order, as each kind of processor
has its own, moves a weight or two over the middle between them."""
STEPPED = {"tokens": (1e-4, 2e-3, 3e-5), "half": (2**-8, 2**-5, 2**-5)}
"""Tolerance of losses, of norms and of the first norm, where activations are rounded. A sum in another order moves
some of them over the middle between two integers; weights differ by 1e-9 alone, and seldom lie that close to it."""


def case(scheme: str, layout: str) -> dict[str, Any]:
    where = {"micro_batch": 2, **LAYOUTS.get(layout, {})}
    return {**DECODER, **SCHEMES[scheme], "layout": where, "id": f"{scheme}-{layout}"}


def legs(scheme: str, layout: str) -> list[dict[str, Any]]:
    """The same with an end and a new beginning after two steps, where rounding begins."""
    first = {**case(scheme, layout), "steps": 2, "commit": True, "id": f"{scheme}-{layout}-first"}
    return [first, {**first, "commit": False, "restore": first["id"], "id": f"{scheme}-{layout}-second"}]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, gang: ProcessGang) -> Results:
    found = Results(tmp_path_factory.mktemp("quantised"), gang)
    found.run(1, [*(case(scheme, "alone") for scheme in SCHEMES), *legs("rows", "alone")])
    found.run(2, [case(*each) for each in QUICK])
    return found


@pytest.mark.parametrize(
    ("scheme", "layout"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in LATER)]
)
def test_every_layout_is_one_process(results: Results, scheme: str, layout: str) -> None:
    results.run(2, [case(scheme, layout)])
    found, alone = results.of(case(scheme, layout)), results.of(case(scheme, "alone"))
    if scheme not in STEPPED:
        check_equal(found, alone, NEAR.get(scheme, 1e-5))
        return
    losses, norms, first = STEPPED[scheme]
    torch.testing.assert_close(found["losses"], alone["losses"], rtol=losses, atol=0)
    torch.testing.assert_close(found["norms"], alone["norms"], rtol=norms, atol=0)
    assert found["norms"][0] == pytest.approx(alone["norms"][0], rel=first)


def test_a_run_that_goes_on_has_the_same_bits(results: Results) -> None:
    whole, (first, second) = results.of(case("rows", "alone")), map(results.of, legs("rows", "alone"))
    joined = {key: first[key] + second[key] for key in ("losses", "norms")}
    same_bits({**second, **joined}, whole)


def test_one_process_is_a_plain_loop(results: Results) -> None:
    for scheme in ("groups", "rows", "tokens"):
        found = results.of(case(scheme, "alone"))
        most = STEPPED.get(scheme, (1e-5,))[0]
        torch.testing.assert_close(
            found["losses"], plain_loop(case(scheme, "alone"), found), rtol=most, atol=0
        )


def plain_loop(asked: dict[str, Any], found: dict[str, Any]) -> list[float]:
    """The losses of a loop in plain torch that begins with the weights of a case."""
    spec = job(asked)
    workload, quantize = workload_of(spec), asked["quantize"]
    model = workload.build()
    model.load_state_dict({n.removeprefix("model."): t for n, t in found["first"].items() if "model." in n})
    names = [n for n, p in model.named_parameters() if p.dim() == 2 and n.startswith("layers.")]
    chosen = {n for n in names if not (n.startswith("layers.1.") and scheme_keeps(quantize))}
    decayed = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    given = spec.train.optimizer
    groups = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, lr=given.lr, betas=given.betas, eps=given.eps, weight_decay=given.weight_decay
    )
    losses = []
    for step in range(asked["steps"]):
        batch = whole_batch(workload, spec, step)
        rounds = step >= quantize.get("from_step", 0)
        weights = {n: straight_through(p, quantize, n) for n, p in model.named_parameters() if n in chosen}
        handles = []
        if rounds and quantize.get("activations") == "dynamic":
            modules = (model.get_submodule(n.removesuffix(".weight")) for n in sorted(chosen))
            handles = [module.register_forward_pre_hook(rounded_input) for module in modules]
        output = torch.func.functional_call(model, weights if rounds else {}, (batch,))
        loss = workload.criterion(output, batch)
        mean = loss.total / loss.count
        optimizer.zero_grad()
        mean.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), given.clip)
        optimizer.step()
        for handle in handles:
            handle.remove()
        losses.append(float(mean.detach()))
    return losses


def scheme_keeps(quantize: dict[str, Any]) -> bool:
    return bool(quantize.get("keep"))


def straight_through(weight: Tensor, quantize: dict[str, Any], name: str) -> Tensor:
    bits, group = int(quantize["weights"][3:]), quantize["group"]
    if quantize.get("int8") and ".output." in name:
        bits = 8
    how = {"strategy": "channel"} if group == "row" else {"strategy": "group", "group_size": group}
    args = QuantizationArgs(num_bits=bits, symmetric=True, **how)
    groups = weight.detach().unflatten(-1, (-1, weight.shape[1] if group == "row" else group))
    most = 2 ** (bits - 1)
    scale = torch.maximum(groups.amax(-1) / (most - 1), groups.amin(-1) / -most)
    rounded = fake_quantize(weight.detach(), scale, None, args)
    return weight + (rounded - weight).detach()


def rounded_input(_: Any, given: tuple[Tensor]) -> tuple[Tensor]:
    x = given[0]
    args = QuantizationArgs(num_bits=8, symmetric=True, strategy="token", dynamic=True)
    scale, zero = calculate_qparams(x.detach().amin(-1, True), x.detach().amax(-1, True), args)
    return (x + (fake_quantize(x.detach(), scale, zero, args) - x).detach(),)
