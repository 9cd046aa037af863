"""Under dropout, skipped layers and gates of heads every layout trains what one process trains, and a run that changes
its layout is the same run."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from harness import (
    MODELS,
    Results,
    check_equal,
    check_state,
    cover,
    layouts_of,
    reference_of,
    whole_batch,
    write_hf_class,
)
from rank_cases import job, workload_of
from transformers import GPT2Config, GPT2LMHeadModel

from cluster.workers.process_gang import ProcessGang
from orchestrator.parallel.layout import Layout
from workloads.model.dropout import KEYS, SELF_SCORES, SKIPS, keyed, uniform_numbers

STEPS = 3
DROPOUT = {"dropout": 0.1, "attention_dropout": 0.2, "head_penalty": 1.0, "steps": STEPS}
NO_GATES = {"head_penalty": 0.0, "name": "decoder-ungated"}
FIRST = Layout(dp=2, zero=1)
THEN = (Layout(pp=2, tp=2, micro_batch=2), Layout(dp=2, tp=2, sequence=True))
LATER = Layout(dp=2, cp=2, zero=3)


def case(model: str, layout: Layout, **fields: Any) -> dict[str, Any]:
    name = f"{model} {layout} " + " ".join(map(str, fields.values()))
    experts = "moe" in MODELS[model].get("changes", {}) or model == "latent"  # whose layers are not skipped
    skipped = {} if experts else {"layer_drop": 0.25}
    return {
        **MODELS[model],
        **DROPOUT,
        **skipped,
        "name": model,
        "layout": layout.to_json(),
        "id": name,
        **fields,
    }


def cases_of(model: str, world: int, size: int) -> list[dict[str, Any]]:
    return [case(model, layout) for layout in cover(layouts_of(model, world), size)]


CASES = {
    2: [
        *(
            case("decoder", Layout(**way, micro_batch=2))
            for way in (
                {"cp": 2, "zero": 1},
                {"tp": 2, "sequence": True, "recompute": "full"},
                {"dp": 2, "zero": 3, "recompute": "selective"},
            )
        ),
        case("moe", Layout(dp=2, ep=2, micro_batch=2)),
    ],
    4: [case("decoder", Layout(pp=2, dp=2, schedule="interleaved", micro_batch=2))],
}  # fmt: skip
REST = {
    2: [
        *(found for model in ("decoder", "moe", "encoder", "pair") for found in cases_of(model, 2, 1)),
        case("decoder", Layout(pp=2, schedule="zbv", recompute="full", micro_batch=2)),
        case("decoder", Layout(dp=2, zero=1, engine="deepspeed", micro_batch=2), **NO_GATES),
        case(
            "decoder", Layout(dp=2, zero=3, engine="deepspeed", recompute="full", micro_batch=1), **NO_GATES
        ),
        case("pair", Layout(dp=2, zero=2, micro_batch=2)),
        case("pair", Layout(pp=2, schedule="zbv", micro_batch=2)),
    ],
    4: [*cases_of("decoder", 4, 1), case("latent", Layout(dp=2, cp=2, micro_batch=2))],
}
"""Every feature of a layout."""
ALONE = {found["id"]: found for world in CASES for found in map(reference_of, CASES[world])}
LEG = case("decoder", FIRST, commit=True)
ON, ON_LATER = (
    [case("decoder", layout, restore=LEG["id"]) for layout in layouts] for layouts in (THEN, [LATER])
)
WHOLE = {**reference_of(LEG), "steps": 2 * STEPS, "id": "decoder-whole", "commit": False}
WITHOUT = {**WHOLE, "attention_dropout": 0.0, "id": "decoder-without"}
BARE = {**WITHOUT, "dropout": 0.0, "id": "decoder-bare"}
GATED = {**BARE, "layer_drop": 0.0, "id": "decoder-gated"}
PLAIN = {**GATED, "head_penalty": 0.0, "id": "decoder-plain"}


HF_CLASSES = [
    {"dp": 2, "zero": 3, "recompute": "full"},
    {"pp": 2, "recompute": "full"},  # where the next micro-batch goes forward before one is computed again
]
HF_CLASSES_LATER = [{"dp": 2, "zero": 0}, {"dp": 2, "zero": 1, "engine": "deepspeed"}]


def hf_class(layout: dict[str, Any], folder: str = "") -> dict[str, Any]:
    """A class of transformers that has no table here, run as it is."""
    fields = {"model": f"hf:{folder}", "changes": {}, "layout": {"micro_batch": 2, **layout}}
    return {**DROPOUT, "attention_dropout": 0.0, "head_penalty": 0.0, **fields, "id": f"hf class {layout}"}


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("neox"))
    write_hf_class(folder)
    return folder


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, gang: ProcessGang, neox: str) -> Results:
    found = Results(tmp_path_factory.mktemp("dropout"), gang)
    found.run(1, [*ALONE.values(), WHOLE, WITHOUT, BARE, GATED, PLAIN, hf_class({}, neox)])
    found.run(2, [*CASES[2], LEG])
    found.run(2, [hf_class(layout, neox) for layout in HF_CLASSES])
    found.run(4, [*CASES[4], *ON])
    return found


@pytest.mark.parametrize("found", [*CASES[2], *CASES[4]], ids=lambda found: found["id"])
def test_every_layout_trains_what_one_process_trains(results: Results, found: dict[str, Any]) -> None:
    check_equal(results.of(found), results.of(reference_of(found)))


@pytest.mark.parametrize("found", [*CASES[2], *CASES[4]], ids=lambda found: found["id"])
def test_every_layout_counts_all_heads_once(results: Results, found: dict[str, Any]) -> None:
    ours, alone = results.of(found)["extras"], results.of(reference_of(found))["extras"]
    for name in ("open_heads", "head_penalty"):
        assert [row[name] for row in ours] == pytest.approx([row[name] for row in alone], rel=1e-6)
    assert alone[0]["open_heads"] == 16


def test_gates_are_those_of_a_plain_loop_with_a_class_of_transformers(results: Results) -> None:
    """GPT-2 of transformers, whose heads are multiplied by gates drawn from the same numbers, with the penalty in the
    loss."""
    found = results.of(GATED)
    losses, norms, gates, weights = gated_loop(GATED, found)
    torch.testing.assert_close(found["losses"], losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(found["norms"], norms, rtol=1e-5, atol=0)
    check_state(gated(found["state"]), gates)
    workload = workload_of(job(GATED))
    check_state(dict(workload.hf_state(lambda name: found["state"][f"model.{name}"])), weights)


def gated(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: each for name, each in state.items() if "gates." in name and name.startswith("model.")}


def gated_loop(
    asked: dict[str, Any], found: dict[str, Any]
) -> tuple[list[float], list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Losses, gradient norms, gates and transformers' weights of a loop in plain torch that begins as a case."""
    spec = job(asked)
    workload = workload_of(spec)
    model = GPT2LMHeadModel(GPT2Config(**workload.hf_config())).eval()
    begun = dict(workload.hf_state(lambda name: found["first"][f"model.{name}"]))
    model.load_state_dict(begun, strict=False)
    model.tie_weights()
    gates = {name: torch.nn.Parameter(each.clone()) for name, each in gated(found["first"]).items()}
    drawn: dict[int, torch.Tensor] = {}
    for number, block in enumerate(model.transformer.h):
        block.attn.c_proj.register_forward_pre_hook(
            lambda _, given, n=number: (
                given[0] * drawn[n].repeat_interleave(given[0].shape[-1] // drawn[n].shape[1], 1)[:, None],
            )
        )
    given = spec.train.optimizer
    parameters = [*model.parameters(), *gates.values()]
    groups = [
        {"params": [p for p in parameters if p.dim() == 2]},
        {"params": [p for p in parameters if p.dim() != 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=given.lr, betas=given.betas, eps=given.eps, weight_decay=given.weight_decay
    )
    losses, norms = [], []
    for step in range(asked["steps"]):
        batch = whole_batch(workload, spec, step)
        open_heads = torch.zeros(())
        for number in range(len(model.transformer.h)):
            log_alpha = gates[f"model.layers.{number}.attention.gates.log_alpha"]
            keys = keyed(keyed(keyed(keyed(batch[KEYS], 0), SKIPS), 1 + number), SELF_SCORES)
            u = uniform_numbers(keys, len(log_alpha))
            s = torch.sigmoid(((u / (1 - u)).log().float() + log_alpha) * 1.5)
            drawn[number] = torch.minimum(torch.ones(()), torch.maximum(torch.zeros(()), s * 1.2 - 0.1))
            open_heads = open_heads + torch.sigmoid(log_alpha - 2 / 3 * math.log(0.1 / 1.1)).sum()
        logits = model(input_ids=batch["tokens"]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        optimizer.zero_grad()
        (loss + asked["head_penalty"] * open_heads).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, given.clip)))
        optimizer.step()
        losses.append(float(loss.detach()))
    ended = model.state_dict()
    return losses, norms, {n: each.detach() for n, each in gates.items()}, {n: ended[n] for n in begun}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", REST)
def test_every_feature_of_a_layout_trains_what_one_process_trains(results: Results, world: int) -> None:
    results.run(1, list({found["id"]: found for found in map(reference_of, REST[world])}.values()))
    results.run(world, REST[world], 800)
    for found in REST[world]:
        check_equal(results.of(found), results.of(reference_of(found)))


@pytest.mark.parametrize(
    "second",
    [*ON, *(pytest.param(second, marks=pytest.mark.slow) for second in ON_LATER)],
    ids=lambda found: found["id"],
)
def test_a_run_that_changes_its_layout_draws_the_same_masks(results: Results, second: dict[str, Any]) -> None:
    results.run(4, [second])
    legs = [results.of(LEG), results.of(second)]
    whole = {name: legs[0][name] + legs[1][name] for name in ("losses", "averaged", "norms", "extras")}
    ends = {"first": legs[0]["first"], "state": legs[1]["state"], "eval": legs[1]["eval"]}
    check_equal(whole | ends, results.of(WHOLE))


def test_a_mask_moves_the_gradient_norm_by_much_more_than_the_tolerance(results: Results) -> None:
    for one, other in itertools.pairwise(map(results.of, (WHOLE, WITHOUT, BARE, GATED, PLAIN))):
        apart = sorted(abs(a / b - 1) for a, b in zip(one["norms"], other["norms"], strict=True))
        assert apart[3] > 1e-3  # some of the six steps may be near by chance


@pytest.mark.parametrize(
    "layout", [*HF_CLASSES, *(pytest.param(one, marks=pytest.mark.slow) for one in HF_CLASSES_LATER)], ids=str
)
def test_a_model_run_as_it_is_trains_what_one_process_trains(
    results: Results, neox: str, layout: dict[str, Any]
) -> None:
    results.run(2, [hf_class(layout, neox)])
    check_equal(results.of(hf_class(layout)), results.of(hf_class({})))
