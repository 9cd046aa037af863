"""Gangs of local ranks that run many cases, and the comparison of two runs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rank_cases import LENGTH, job, micro_batches, workload_of

from cluster.workers.gang import FINISHED, Bundle, RankStatus
from cluster.workers.process_gang import ProcessGang
from orchestrator.parallel.layout import Layout, ModelShape
from orchestrator.parallel.legal_layouts import legal
from orchestrator.planner.shape_of_model import model_shape

TOGETHER = 12
"""Cases in one start of the ranks."""
TOLERANCE = 1e-5
"""fp32, relative. Sums in another order differ by a few units of 6e-8; ten steps of Adam with eps 1e-4 carry them
to some 1e-6 of a tensor's largest weight. With the usual eps of 1e-8 a key bias, whose gradient is nothing but
rounding, would move by 4e-4 under any framework."""

LAYERS = {"layers": 4}
APART = {"initial_std": 0.1}
"""Routers are steps: where two experts score alike to the last bits, rounding chooses. Larger weights set scores
apart, so that in ten steps none of some ten thousand choices is that close."""
EXPERTS = {"layers": 4, "kv_heads": 2, "moe": {"experts": 4, "intermediate": 32}, **APART}
HEADS = {"layers": 4, "kv_heads": 2, "head_dim": 8}
"""Of a preset of full size."""
MODELS: dict[str, dict[str, Any]] = {
    "decoder": {"model": "gpt-tiny", "changes": LAYERS},
    "modern": {"model": "qwen3-tiny", "changes": {"layers": 4, "kv_heads": 2}},
    "moe": {"model": "mixtral-tiny", "changes": EXPERTS},
    "documents": {
        "model": "qwen3-tiny",
        "changes": {"layers": 2, "kv_heads": 2, "window": 8},
        "options": {"documents": "isolate"},
    },
    "capped": {
        "model": "gemma-2-2b",
        "changes": {
            **HEADS,
            **APART,
            "score_cap": 2.0,
            "logit_cap": 1.0,
            "window": 6,
            "qk_norm": True,
            "window_theta": 100.0,
        },
    },
    "whole-norms": {"model": "olmo-2-7b", "changes": HEADS},
    "shared-gate": {
        "model": "qwen1.5-moe-a2.7b",
        "changes": {**HEADS, **EXPERTS, "moe": {"experts": 4, "top_k": 2, "intermediate": 32, "shared": 2}},
    },
    "sinks": {
        "model": "gpt-oss-20b",
        "changes": {
            **HEADS,
            **APART,
            "window": 6,
            "swiglu_limit": 1.5,  # clamps one number in a hundred: at 0.5 one lay on it, where a rounding decides
            "rope_scaling": {"factor": 4.0, "original_positions": 8},
            "moe": {"experts": 4, "top_k": 2, "intermediate": 32},
        },
    },
    "latent": {"model": "deepseek-v3-tiny", "changes": {**LAYERS, **APART}},
    "encoder": {"model": "bert-tiny", "objective": "masked_lm", "changes": LAYERS},
    "sparse": {
        "model": "bert-tiny",
        "objective": "masked_lm",
        "changes": {
            **LAYERS,
            "window": 2,
            "window_dilation": 2,
            "global_tokens": 1,
            "random_blocks": 1,
            "block_size": 4,
        },
    },
    "disentangled": {
        "model": "deberta-v3-base",
        "objective": "masked_lm",
        "changes": {**LAYERS, "kv_heads": 4, "head_dim": 8, "disentangled": 6, "relative_distance": 14},
    },
    "two-streams": {
        "model": "xlnet-base",
        "objective": "permuted_lm",
        "changes": {**LAYERS, "kv_heads": 4, "head_dim": 8},
    },
    "distances": {
        "model": "mpnet-base",
        "objective": "masked_lm",
        "changes": {**LAYERS, "task_types": 3, "kv_heads": 4, "head_dim": 8},
    },
    "pair": {"model": "t5-tiny", "objective": "span_corruption"},
    "summary": {
        "model": "pegasus-large",
        "objective": "gap_sentences",
        "changes": {"decoder_layers": 2, "kv_heads": 4, "head_dim": 8},
    },
    "pair-moe": {
        "model": "switch-tiny",
        "objective": "span_corruption",
        "changes": {"moe": {"experts": 4, "intermediate": 32}},
    },
}
"""Dense and with experts; decoder, encoder and encoder-decoder."""
WIDE = {
    "model": "mixtral-tiny",
    "changes": {**EXPERTS, "tied": True},
    "mup": {"hidden": 8, "heads": 2, "kv_heads": 1, "intermediate": 16, "moe": {"intermediate": 8}},
}
"""Scaled beside a narrower base, so that learning rates differ from tensor to tensor."""
BATCH = 8


def shape_of(model: str) -> ModelShape:
    """The sizes that legality depends on."""
    return model_shape(workload_of(job(MODELS[model])).config, LENGTH)


def layouts_of(model: str, world: int) -> list[Layout]:
    """Every legal layout of a model, each with the largest micro-batch of 2 and 1 that is legal."""
    found: dict[Any, Layout] = {}
    for layout in legal(shape_of(model), world, BATCH, micro_batches=(2, 1)):
        degrees = tuple(v for k, v in layout.to_json().items() if k != "micro_batch")
        found.setdefault(degrees, layout)
    return list(found.values())


def features(layout: Layout) -> frozenset[str]:
    """What is at work in a layout."""
    found = [axis for axis in ("cp", "ep") if getattr(layout, axis) > 1]
    found += [f"zero{layout.zero}"] if layout.dp * layout.cp > 1 else []
    found += ["dp"] if layout.dp > 1 else []
    found += ["sequence" if layout.sequence else "tp"] if layout.tp > 1 else []
    found += [layout.schedule] if layout.pp > 1 else []
    return frozenset(found)


def cover(layouts: Sequence[Layout], size: int) -> list[Layout]:
    """Few layouts in which every combination of `size` features that any of them has is found: the greedy choice."""

    def combinations(found: frozenset[str]) -> set[tuple[str, ...]]:
        return {c for n in range(1, size + 1) for c in itertools.combinations(sorted(found), n)}

    wanted = {layout: combinations(features(layout)) for layout in layouts}
    missing = set().union(*wanted.values())
    chosen = []
    while missing:
        best = max(layouts, key=lambda layout: len(wanted[layout] & missing))
        chosen.append(best)
        missing -= wanted[best]
    return chosen


def run(
    world: int,
    cases: list[dict[str, Any]],
    folder: Path,
    gang: ProcessGang,
    target: str = "rank_cases:main",
    timeout: float = 280,
) -> list[str]:
    """Run the cases on `world` ranks. Returns the errors of ranks that failed, none if all is done."""
    ranks = _ended(gang, world, {"cases": cases, "folder": str(folder)}, target, timeout)
    if not ranks:
        return [f"not done after {timeout} s"]
    return [f"rank {r.rank}: {r.error}" for r in ranks if r.state in ("failed", "dead")]


def finished(
    world: int, config: dict[str, Any], target: str, gang: ProcessGang, timeout: float = 280
) -> list[Any]:
    """What the target returned on each rank. Raises AssertionError unless all ended well."""
    ranks = _ended(gang, world, config, target, timeout)
    assert ranks
    assert all(r.state == "done" for r in ranks), [r.error for r in ranks]
    return [r.result for r in ranks]


def _ended(
    gang: ProcessGang, world: int, config: dict[str, Any], target: str, timeout: float
) -> tuple[RankStatus, ...]:
    """The ranks when all are done, or two seconds after one has failed; empty if it takes too long."""
    try:
        gang.start(world, Bundle(), target, config)
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            ranks = gang.poll(0).ranks
            failed = [r for r in ranks if r.state in ("failed", "dead")]
            if all(r.state in FINISHED for r in ranks):
                return ranks
            if failed and time.monotonic() - min(r.failed_at for r in failed) > 2:
                return ranks
            time.sleep(0.05)
        return ()
    finally:
        gang.stop()


def write_hf_class(folder: str) -> None:
    """A tiny GPT-NeoX whose head is tied."""
    from transformers import GPTNeoXConfig

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = GPTNeoXConfig(vocab_size=160, max_position_embeddings=64, tie_word_embeddings=True, **sizes)
    config.architectures = ["GPTNeoXForCausalLM"]
    config.save_pretrained(folder)


class Results:
    """Runs cases on ranks of one gang, and compares each with the same steps of one process."""

    def __init__(self, folder: Path, gang: ProcessGang) -> None:
        self._folder, self._gang = folder, gang
        self._errors: dict[str, list[str]] = {}

    def run(self, world: int, cases: list[dict[str, Any]], timeout: float = 280) -> None:
        """One start for some of the cases that were not run yet, until there are none: each leaves process groups
        behind, whose threads wake a hundred times a second until the process ends."""
        new = [case for case in cases if case["id"] not in self._errors]
        for first in range(0, len(new), TOGETHER):
            some = new[first : first + TOGETHER]
            errors = run(world, some, self._folder, self._gang, timeout=timeout)
            self._errors |= {case["id"]: errors for case in some}

    def run_beside_one_process(self, world: int, cases: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Run cases, and each on one process; returns the latter by the id of the former."""
        alone = {case["id"]: reference_of(case) for case in cases}
        self.run(1, list({case["id"]: case for case in alone.values()}.values()))
        self.run(world, cases)
        return alone

    def of(self, case: dict[str, Any]) -> dict[str, Any]:
        """What a case left. Raises AssertionError with the ranks' errors if it did not end."""
        path = self._folder / f"{case['id']}.pt"
        assert path.exists(), f"{case['id']}: {self._errors[case['id']]}"
        return torch.load(path, weights_only=False)


def reference_of(case: dict[str, Any]) -> dict[str, Any]:
    """The same case on one process."""
    fields = {k: v for k, v in case.items() if k not in ("id", "layout")}
    return {**fields, "id": f"{case['name']}-{case['steps']}-alone", "layout": {"micro_batch": 2}}


def whole_batch(workload: Any, spec: Any, step: int) -> dict[str, torch.Tensor]:
    """The global batch of a step, of 8 samples."""
    get_rank, torch.distributed.get_rank = torch.distributed.get_rank, lambda *_: 0
    try:
        (batch,) = micro_batches(workload, spec, Layout(micro_batch=8), step)
        return batch
    finally:
        torch.distributed.get_rank = get_rank


def check_equal(found: dict[str, Any], reference: dict[str, Any], tolerance: float = TOLERANCE) -> None:
    """Initial weights bit by bit; losses, those of averaged weights, gradient norms and the final state within the
    tolerance."""
    assert found["first"].keys() == reference["first"].keys()
    for name, tensor in reference["first"].items():
        assert torch.equal(found["first"][name], tensor), f"initial {name}"
    torch.testing.assert_close(found["losses"], reference["losses"], rtol=tolerance, atol=0)
    torch.testing.assert_close(found["averaged"], reference["averaged"], rtol=tolerance, atol=0)
    torch.testing.assert_close(found["norms"], reference["norms"], rtol=tolerance, atol=0)
    torch.testing.assert_close(found["eval"], reference["eval"], rtol=tolerance, atol=0)
    check_routers(found["extras"], reference["extras"])
    check_state(found["state"], reference["state"], tolerance)


def check_routers(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    """What the rows say of routers: counts are exact, so that nothing but the sum of entropies is rounded."""
    for ours, theirs in zip(found, wanted, strict=True):
        names = {name for name in theirs if name.startswith("router_")}
        assert names == {name for name in ours if name.startswith("router_")}
        for name in names:
            torch.testing.assert_close(
                ours[name], theirs[name], rtol=TOLERANCE, atol=0, msg=lambda m, n=name: f"{n}: {m}"
            )


def same_bits(found: dict[str, Any], reference: dict[str, Any]) -> None:
    """Losses, norms and the final state, with zero tolerance."""
    assert found["losses"] == reference["losses"]
    assert found["norms"] == reference["norms"]
    for name, tensor in reference["state"].items():
        assert torch.equal(found["state"][name], tensor), name


def check_state(found: dict[str, Any], wanted: dict[str, Any], tolerance: float = TOLERANCE) -> None:
    """Every tensor within the tolerance of its largest element, or of 0.1, the size of a typical weight."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        if tensor.dtype is torch.bool:
            assert torch.equal(found[name], tensor), name
            continue
        size = max(float(tensor.abs().max()), 0.1)
        torch.testing.assert_close(
            found[name], tensor, rtol=0, atol=tolerance * size, msg=lambda text, name=name: f"{name}: {text}"
        )


def worst(found: dict[str, Any], reference: dict[str, Any]) -> tuple[float, float, float]:
    """The largest relative differences of losses, of norms and of final weights."""

    def apart(one: list[float], other: list[float]) -> float:
        return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))

    weights = [n for n in reference["state"] if n.startswith("model.")]
    size: Callable[[str], float] = lambda n: max(float(reference["state"][n].abs().max()), 0.1)  # noqa: E731
    moved = max(float((found["state"][n] - reference["state"][n]).abs().max()) / size(n) for n in weights)
    return apart(found["losses"], reference["losses"]), apart(found["norms"], reference["norms"]), moved
