"""AdamW in 8 bits against a plain loop with the map of bitsandbytes, and divided over ranks against one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bitsandbytes.functional import create_dynamic_map
from torch import Tensor, nn

from orchestrator.optim.adamw_8bit import AdamW8bit, Codes, dynamic_map
from orchestrator.optim.blocks import names_in_8_bits, saved_views, scales_shape, slot_views, stored_shape
from orchestrator.optim.build import OptimizerContext, build_optimizer
from orchestrator.optim.config import OptimizerSpec
from orchestrator.optim.kinds import MOMENTS_IN_8_BITS
from orchestrator.parallel.block_maxima import CutBlocks, own_maxima
from orchestrator.parallel.mesh import ProcessGroup
from orchestrator.parallel.parameter_shard import ParameterShard, boxes_of
from orchestrator.parallel.partition import Cut

SPEC = OptimizerSpec(name="adamw_8bit", lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
STEPS = 5


def norms(parts: Sequence[Tensor]) -> list[Tensor]:
    raise AssertionError("an update by AdamW needs no norm")


def gradients_of(shape: Sequence[int], steps: int = STEPS) -> list[Tensor]:
    """Gradients over several powers of ten, so that blocks differ in size."""
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(*shape, generator=generator) * 10 ** (torch.rand(*shape, generator=generator) * 4 - 4)
        for _ in range(steps)
    ]


def shard_of(
    shape: Sequence[int], start: Tensor, cut: Cut | None = None, flat: slice | None = None
) -> ParameterShard:
    """A part of a parameter: the box of `cut`, and of its numbers those of `flat`."""
    cut = cut or Cut(tuple(shape), (0,) * len(shape), tuple(shape))
    mine = start[cut.slices()].clone(memory_format=torch.contiguous_format)
    boxes = boxes_of(cut, 0, mine.numel())
    if flat is not None:
        mine = mine.reshape(-1)[flat].clone()
        boxes = boxes_of(cut, flat.start, flat.stop)
    return ParameterShard("p", cut, nn.Parameter(mine), boxes, ProcessGroup((0,), 0, None), True, True)


def optimizer_of(shard: ParameterShard, maxima: Any = own_maxima) -> AdamW8bit:
    made = build_optimizer(OptimizerContext(SPEC, [shard], norms, in_8_bits={"p"}, maxima=maxima))
    assert isinstance(made, AdamW8bit)
    return made


def part_of(shard: ParameterShard, whole: Tensor) -> Tensor:
    found = torch.empty_like(shard.parameter)
    for box, view in shard.views(found):
        view.copy_(box.of(whole))
    return found


class FakeRanks:
    """Maxima over ranks that are threads of this process."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count, timeout=60)
        self._lock = threading.Lock()
        self._found: dict[tuple[str, int], Tensor] = {}

    def __call__(self, blocks: CutBlocks, values: Tensor) -> Tensor:
        keys = [(name, int(number)) for name, numbers in blocks for number in numbers]
        assert len(keys) == values.shape[1]
        with self._lock:
            for key, value in zip(keys, values.T, strict=True):
                self._found[key] = torch.maximum(self._found.get(key, torch.zeros(2)), value)
        self._barrier.wait()
        found = torch.stack([self._found[key] for key in keys], 1) if keys else values
        self._barrier.wait()
        with self._lock:
            self._found = {}
        self._barrier.wait()
        return found


def trained(shards: Sequence[ParameterShard], gradients: Sequence[Tensor]) -> list[AdamW8bit]:
    """Update the shards, each as a rank of its own."""
    ranks = FakeRanks(len(shards))
    optimizers = [optimizer_of(shard, ranks) for shard in shards]
    failed: list[BaseException] = []

    def run(shard: ParameterShard, optimizer: AdamW8bit) -> None:
        try:
            for gradient in gradients:
                shard.parameter.grad = part_of(shard, gradient)
                optimizer.step()
        except BaseException as error:  # told by the test's own thread
            failed.append(error)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(shards, optimizers, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    return optimizers


def assembled(shards: Sequence[ParameterShard], optimizers: Sequence[AdamW8bit]) -> dict[str, Tensor]:
    """The whole tensors, of what each rank saves; every number is saved once."""
    found: dict[str, Tensor] = {}
    for slot in MOMENTS_IN_8_BITS:
        shape = stored_shape(slot, shards[0])
        whole, times = torch.zeros(shape), torch.zeros(shape)
        for shard, optimizer in zip(shards, optimizers, strict=True):
            for box, view in saved_views(slot, shard, optimizer.state[shard.parameter][slot.name]):
                box.of(whole).copy_(view)
                box.of(times).add_(1)
        assert (times == 1).all(), slot.name
        found[slot.name] = whole
    weights = torch.zeros(shards[0].cut.shape)
    for shard in shards:
        for box, view in shard.views(shard.parameter.detach()):
            box.of(weights).copy_(view)
    return {**found, "weights": weights}


def halves(shape: tuple[int, ...], dim: int, at: int) -> list[Cut]:
    def cut(low: int, high: int) -> Cut:
        start, extent = [0] * len(shape), list(shape)
        start[dim], extent[dim] = low, high - low
        return Cut(shape, tuple(start), tuple(extent), over_tp=True)

    return [cut(0, at), cut(at, shape[dim])]


def in_flat(cut: Cut | None, size: int, *at: int) -> list[tuple[Cut | None, slice | None]]:
    bounds = [0, *at, size]
    return [(cut, slice(low, high)) for low, high in pairwise(bounds)]


DIVISIONS: dict[str, tuple[tuple[int, ...], list[tuple[Cut | None, slice | None]]]] = {
    "rows": ((24, 300), [(cut, None) for cut in halves((24, 300), 0, 11)]),
    "columns within a block": ((24, 300), [(cut, None) for cut in halves((24, 300), 1, 150)]),
    "columns at a block": ((8, 1024), [(cut, None) for cut in halves((8, 1024), 1, 512)]),
    "a slice of the numbers": ((24, 300), in_flat(None, 7200, 1000, 1007, 1100, 4321)),
    "slices of columns": (
        (24, 300),
        [part for cut in halves((24, 300), 1, 150) for part in in_flat(cut, 3600, 77, 1811)],
    ),
    "experts": ((4, 10, 130), [(cut, None) for cut in halves((4, 10, 130), 2, 65)]),
    "slices of experts": ((4, 10, 130), in_flat(None, 5200, 129, 2600, 2601)),
    "a vector": ((5000,), in_flat(None, 5000, 100, 300, 2560)),
    "narrow rows": ((512, 16), in_flat(None, 8192, 8, 4096, 5003)),
}


@pytest.mark.parametrize("name", DIVISIONS)
def test_any_division_has_the_bits_of_one_rank(name: str) -> None:
    shape, parts = DIVISIONS[name]
    start = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    gradients = gradients_of(shape)
    whole = [shard_of(shape, start)]
    wanted = assembled(whole, trained(whole, gradients))
    shards = [shard_of(shape, start, cut, flat) for cut, flat in parts]
    found = assembled(shards, trained(shards, gradients))
    for tensor, value in wanted.items():
        assert torch.equal(found[tensor], value), tensor


def test_a_cut_block_needs_the_other_ranks_maximum() -> None:
    """So that the test above cannot pass by chance."""
    shape, parts = DIVISIONS["columns within a block"]
    start, gradients = torch.zeros(shape), gradients_of(shape)
    whole = [shard_of(shape, start)]
    wanted = assembled(whole, trained(whole, gradients))
    shards = [shard_of(shape, start, cut, flat) for cut, flat in parts]
    optimizers = [optimizer_of(shard) for shard in shards]
    for shard, optimizer in zip(shards, optimizers, strict=True):
        shard.parameter.grad = part_of(shard, gradients[0])
        optimizer.step()
    codes = torch.zeros(shape)
    for shard, optimizer in zip(shards, optimizers, strict=True):
        for box, view in slot_views(
            MOMENTS_IN_8_BITS[0], shard, optimizer.state[shard.parameter]["exp_avg_code"]
        ):
            box.of(codes).copy_(view)
    assert (codes != wanted["exp_avg_code"]).float().mean() > 0.1


def test_rows_that_are_updated_one_after_the_other_have_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape, parts = DIVISIONS["columns within a block"]
    start, gradients = torch.randn(*shape), gradients_of(shape)
    found, most = [], []
    moments = AdamW8bit._moments

    def noted(*given: Any) -> Any:
        result = moments(*given)
        most.append(result[0].numel())
        return result

    monkeypatch.setattr(AdamW8bit, "_moments", noted)
    for at_once in (2**22, 1000):
        monkeypatch.setattr("orchestrator.optim.adamw_8bit.MAX_NUMBERS_AT_ONCE", at_once)
        most.clear()
        shards = [shard_of(shape, start, cut, flat) for cut, flat in parts]
        found.append(assembled(shards, trained(shards, gradients)))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert 256 <= max(most) <= 1000


def rounded(numbers: Tensor, values: Tensor, least: int = 0) -> Tensor:
    """Each block as the nearest multiples of its largest absolute value by the numbers of the map.

    `least` is the smallest code of a positive number; with 0 these are the codes of bitsandbytes and torchao.
    """
    found = []
    for block in numbers.split(256, dim=-1):
        scale = block.abs().amax(-1, keepdim=True)
        nearest = ((block / scale)[..., None] - values).abs().argmin(-1)
        nearest = nearest.maximum((block > 0) * least)
        found.append(values[nearest] * scale)
    return torch.cat(found, -1)


def test_twenty_steps_are_those_of_a_plain_loop() -> None:
    """The paper's algorithm with the map of bitsandbytes. A rounding of fp32 may make another code the nearest."""
    shape = (32, 300)
    start, gradients = (
        torch.randn(*shape, generator=torch.Generator().manual_seed(1)),
        gradients_of(shape, 20),
    )
    signed, unsigned = create_dynamic_map(True), create_dynamic_map(False)
    shard = shard_of(shape, start)
    optimizer = optimizer_of(shard)
    w, m, v = start.clone(), torch.zeros(shape), torch.zeros(shape)
    for t, g in enumerate(gradients, start=1):
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        w = w * (1 - 0.01 * 0.1) - 0.01 * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
        m, v = rounded(m, signed), rounded(v, unsigned, least=1)
        shard.parameter.grad = g.clone()
        optimizer.step()
    difference = (shard.parameter - w).abs()
    assert difference.max() < 0.01
    assert (difference < 1e-5).float().mean() > 0.999
    # Without any rounding the weights are other ones, so this test sees the rounding.
    plain = nn.Parameter(start.clone())
    adamw = torch.optim.AdamW([plain], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for gradient in gradients:
        plain.grad = gradient.clone()
        adamw.step()
    assert ((plain - w).abs() < 1e-5).float().mean() < 0.5


def largest_beside_outliers(step: Any, w: nn.Parameter, top: float) -> list[float]:
    """Return the largest weights after 30 steps, and after 10 more without gradients.

    A number of each row has the gradient `top`, and the others have gradients ten thousand times smaller, so their
    second moments are far below the smallest code.
    """
    generator, found = torch.Generator().manual_seed(1), []
    for number in range(1, 41):
        w.grad = torch.randn(w.shape, generator=generator) * 1e-4 * top
        w.grad[:, 0] = top
        if number > 30:
            w.grad.zero_()
        step()
        if number in (30, 40):
            found.append(float(w.detach()[:, 1:].abs().max()))
    return found


@pytest.mark.parametrize("top", [1.0, 1e-3])
def test_numbers_far_below_their_block_s_largest_move_no_more_than_under_adamw(top: float) -> None:
    """A second moment of zero beside a first moment would divide it by eps: weights of 0.15 to 90."""
    shard = shard_of((16, 256), torch.zeros(16, 256))
    spec = OptimizerSpec(name="adamw_8bit", lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    ours = build_optimizer(OptimizerContext(spec, [shard], norms, in_8_bits={"p"}))
    other = nn.Parameter(torch.zeros(16, 256))
    adamw = torch.optim.AdamW([other], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    found = largest_beside_outliers(ours.step, shard.parameter, top)
    wanted = largest_beside_outliers(adamw.step, other, top)
    for ours_, adamws in zip(found, wanted, strict=True):
        assert adamws / 4 < ours_ < adamws
    torch.testing.assert_close(shard.parameter[:, 0], other[:, 0], rtol=1e-4, atol=0)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_nearest_of_the_map_of_bitsandbytes(signed: bool) -> None:
    """bitsandbytes' own search on a CPU is not exact: of these numbers it rounds one in ten to a farther one."""
    theirs = create_dynamic_map(signed)
    values, zero = dynamic_map(signed)
    torch.testing.assert_close(torch.tensor(values), theirs, rtol=1e-6, atol=0)
    assert values[zero] == 0.0
    numbers = gradients_of((16, 256), 1)[0]
    numbers = numbers if signed else numbers**2
    scales = numbers.abs().amax(-1, keepdim=True)
    ours = Codes(signed, torch.device("cpu"))
    found = ours.nearest(numbers.clone()[:, None], scales)
    wanted = rounded(numbers, theirs)
    is_zero = (wanted == 0) & (not signed)
    assert signed or is_zero.any()
    # A second moment that bitsandbytes and torchao round to zero has the smallest code here.
    wanted = wanted.where(~is_zero, theirs[1] * scales)
    torch.testing.assert_close(ours.numbers(found, scales)[:, 0], wanted, rtol=1e-6, atol=0)
    everything = torch.arange(256, dtype=torch.uint8)[None, None]
    one = torch.ones(1, 1)
    assert torch.equal(ours.nearest(ours.numbers(everything, one), one), everything)
    assert ours.numbers(torch.zeros_like(everything), one).eq(0).all()


def test_blocks_of_zeros_stay_zero() -> None:
    shard = shard_of((16, 512), torch.ones(16, 512))
    optimizer = optimizer_of(shard)
    gradient = gradients_of((16, 512), 1)[0]
    gradient[3] = 0.0
    shard.parameter.grad = gradient
    optimizer.step()
    state = optimizer.state[shard.parameter]
    assert (state["exp_avg_code"][3] == 0).all()
    assert (state["exp_avg_scale"].view(16, 2)[3] == 0).all()
    torch.testing.assert_close(shard.parameter[3].detach(), torch.full((512,), 1 - 0.01 * 0.1))


def test_small_parameters_embeddings_and_short_rows_keep_fp32() -> None:
    shapes = {
        "tokens": (1000, 64), "layers.0.up": (64, 64), "layers.0.small": (63, 65), "layers.0.kernel": (4096, 3),
        "layers.0.scale": (), "layers.0.bias": (8192,), "head": (1000, 64),
    }  # fmt: skip
    workload: Any = SimpleNamespace(shapes=shapes, embeddings={"tokens"})
    assert names_in_8_bits(workload) == {"layers.0.up", "layers.0.bias", "head"}
    assert scales_shape((4, 10, 300)) == (4, 10, 2)


def test_other_parameters_are_updated_by_torch() -> None:
    shard = shard_of((8, 16), torch.ones(8, 16))
    optimizer = build_optimizer(OptimizerContext(SPEC, [shard], norms))
    other = nn.Parameter(torch.ones(8, 16))
    torchs = torch.optim.AdamW([other], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    for gradient in gradients_of((8, 16)):
        shard.parameter.grad, other.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        torchs.step()
    assert torch.equal(shard.parameter, other)
    assert set(optimizer.state[shard.parameter]) == {"step", "exp_avg", "exp_avg_sq"}


def test_a_rank_without_a_shard_takes_part() -> None:
    called: list[Any] = []

    def maxima(blocks: CutBlocks, values: Tensor) -> Tensor:
        called.append((list(blocks), values.shape, values.device.type))
        return values

    build_optimizer(OptimizerContext(SPEC, [], norms, maxima=maxima, device=torch.device("meta"))).step()
    assert called == [([], (2, 0), "meta")]  # where the other ranks' collectives are
