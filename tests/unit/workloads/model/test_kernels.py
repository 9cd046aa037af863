"""Attention with sinks: a softmax with a further score, under every kind of mask; of documents, without a mask."""

import pytest
import torch
import torch.nn.attention.varlen
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from varlen import varlen_attn

from workloads.errors import WorkloadError
from workloads.model import kernels
from workloads.model.kernels import attend, attend_documents
from workloads.model.layers import capped
from workloads.model.masks import SEGMENTS, Documents, _bounds, _by_length, with_starts
from workloads.model.presets import preset

HEADS, GROUPS, LENGTH, SIZE = 4, 2, 9, 16


def defined(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scale: float, cap: float, sinks: Tensor
) -> Tensor:
    """The definition: the sink's share of the softmax takes no value."""
    key, value = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (key, value))
    scores = capped(query @ key.transpose(-2, -1) * scale, cap).masked_fill(~allowed, -torch.inf)
    column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ value


def below(queries: int) -> Tensor:
    """Causal, aligned at the lower right."""
    return torch.arange(LENGTH) <= torch.arange(LENGTH - queries, LENGTH)[:, None]


SOME = torch.rand(2, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(5)) < 0.4
ALONE = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
MASKS = {
    "causal": (None, True, below(LENGTH)), "all": (None, False, ~ALONE), "some": (SOME, False, SOME),
    "none": (ALONE, False, ALONE), "last queries": (causal_lower_right(3, LENGTH), False, below(3)),
    "added": (torch.zeros(SOME.shape).masked_fill(~SOME, -torch.inf), False, SOME),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "cap"), [*((kind, 0.0) for kind in MASKS), *((kind, 0.5) for kind in ("causal", "some"))]
)
def test_a_sink_is_a_score_that_takes_no_value(kind: str, cap: float) -> None:
    allowed, causal, dense = MASKS[kind]
    random = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).requires_grad_()

    query, sinks = drawn(2, HEADS, dense.shape[-2], SIZE), drawn(HEADS)
    key, value = drawn(2, GROUPS, LENGTH, SIZE), drawn(2, GROUPS, LENGTH, SIZE)
    given = (query, key, value, sinks)
    found = attend(query, key, value, allowed, causal, 0.3, cap, sinks)
    wanted = defined(query, key, value, dense, 0.3, cap, sinks)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
    pulls = torch.randn(found.shape, generator=random)
    ours, theirs = (torch.autograd.grad((out * pulls).sum(), given) for out in (found, wanted))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("model", "changes", "why"),
    [
        ("t5-tiny", {"sinks": True}, "an encoder-decoder has no sinks"),
        ("deepseek-v3-tiny", {"sinks": True}, "latent attention has no qk_norm, window, score_cap or sinks"),
        ("gpt-tiny", {"swiglu_limit": 7.0}, "swiglu_limit needs gated: true and activation: silu"),
    ],
)
def test_sinks_and_clamps_that_do_not_fit_are_refused(
    model: str, changes: dict[str, object], why: str
) -> None:
    with pytest.raises(WorkloadError, match=why):
        preset(model).changed(changes)


ENDS = ([4, 9], [1, 2, 7], [LENGTH])
"""Where the documents of three rows end."""


def of_documents(window: int) -> Documents:
    rows = [torch.bucketize(torch.arange(LENGTH), torch.tensor(ends), right=True) for ends in ENDS]
    numbers = torch.stack(rows)
    starts = with_starts({SEGMENTS: numbers})["starts"]
    assert starts.tolist() == [[0, 4, 9, 9], [0, 1, 2, 7], [0, 9, 9, 9]]
    return Documents(numbers, window, _by_length(numbers), _bounds(starts, LENGTH))


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("how", ["processor", "flash"])
def test_documents_see_themselves_alone(how: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mask as with one: values and gradients, of grouped queries and in a window."""
    dtype = torch.bfloat16 if how == "flash" else torch.float64
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", varlen_attn)
    monkeypatch.setattr(kernels, "_has_flash", lambda device: True)
    monkeypatch.setattr(kernels, "A_CALL", 0)
    random, documents = torch.Generator().manual_seed(1), of_documents(window)
    shapes = ((3, HEADS, LENGTH, SIZE), (3, GROUPS, LENGTH, SIZE), (3, GROUPS, LENGTH, SIZE))
    given = [torch.randn(shape, generator=random).to(dtype).requires_grad_() for shape in shapes]
    serves = kernels._attend_flash if how == "flash" else attend_documents
    with kernels.noting() as used:
        found = serves(*given, documents, 0.3)
    assert found is not None
    assert used == {"variable-length flash" if how == "flash" else "flash"}
    wide = [x.detach().double().requires_grad_() for x in given]
    wanted = attend(*wide, documents.dense(LENGTH, torch.device("cpu")), False, 0.3)
    off = 2e-2 if how == "flash" else 1e-12
    torch.testing.assert_close(found.double(), wanted, atol=off, rtol=off)
    pulls = torch.randn(found.shape, generator=random).to(dtype)
    ours = torch.autograd.grad((found * pulls).sum(), given)
    theirs = torch.autograd.grad((wanted * pulls.double()).sum(), wide)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.double(), other, atol=4 * off, rtol=4 * off)


def test_documents_of_a_length_are_attended_to_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as there are lengths; with a mask where that many calls take longer."""
    steps = torch.arange(512)

    def calls(numbers: Tensor) -> int:
        documents, query = (
            Documents(numbers, 0, _by_length(numbers)),
            torch.zeros(2, HEADS, len(numbers[0]), SIZE),
        )
        took: list[int] = []
        monkeypatch.setattr(
            kernels,
            "attend",
            lambda q, *more, **keywords: took.append(len(q)) or attend(q, *more, **keywords),
        )
        found = attend_documents(query, query, query, documents, 0.3)
        assert (found is None) == (not took)
        assert sum(took) == (sum(count for count, _ in documents.by_length.groups) if took else 0)
        return len(took)

    assert calls((steps // 4).expand(2, -1)) == 1
    assert calls(torch.stack((steps // 100, steps // 4))) == 3
    assert calls((steps[:64] ** 0.5).long().expand(2, -1)) == 0


def test_flash_attention_is_left_where_it_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = of_documents(0)

    def serves(dtype: torch.dtype, size: int = SIZE, of_values: int = SIZE, has: bool = True) -> bool:
        monkeypatch.setattr(kernels, "_has_flash", lambda device: has)
        q = torch.zeros(3, HEADS, LENGTH, size, dtype=dtype)
        return kernels._attend_flash(q, q, q[..., :of_values], documents, 1.0) is not None

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", varlen_attn)
    assert serves(torch.bfloat16)
    assert serves(torch.float16)
    assert not serves(torch.float32)
    assert not serves(torch.bfloat16, size=12, of_values=12)
    assert not serves(torch.bfloat16, size=264, of_values=264)
    assert not serves(torch.bfloat16, of_values=8)
    assert not serves(torch.bfloat16, has=False)


def test_the_kernels_that_run_are_noted() -> None:
    query, key = torch.zeros(1, HEADS, LENGTH, SIZE), torch.zeros(1, GROUPS, LENGTH, SIZE)

    def used(allowed: Tensor | None = None, cap: float = 0.0, causal: bool = True) -> set[str]:
        with kernels.noting() as found:
            attend(query, key, key, allowed, causal, 1.0, cap)
        attend(query, key, key, None, True, 1.0, 0.5)
        return found

    assert used() == {"flash"}
    assert used(causal_lower_right(LENGTH, LENGTH), causal=False) == {"flash"}
    assert used(cap=0.5) == {"unfused"}


@pytest.mark.parametrize("mask", ["causal", "some"])
def test_values_narrower_than_keys_hold_no_scores(mask: str) -> None:
    """As latent attention has them: on a CPU no fused kernel takes them as they are."""
    torch.manual_seed(3)
    allowed, causal, seen = MASKS[mask]
    query, key = (torch.randn(2, HEADS, LENGTH, SIZE, requires_grad=True) for _ in range(2))
    value = torch.randn(2, HEADS, LENGTH, SIZE // 2, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        found = attend(query, key, value, allowed, causal, 0.25)
    scores = (query @ key.transpose(-2, -1) * 0.25).masked_fill(~seen, -torch.inf)
    wanted = scores.softmax(-1).nan_to_num() @ value
    assert torch.allclose(found, wanted, atol=1e-5)
    ways = (torch.autograd.grad(out.square().sum(), (query, key, value)) for out in (found, wanted))
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(*ways, strict=True))
    assert all(tuple(each.shape[:2]) != (2, HEADS) or each.shape[-2:] != (LENGTH, LENGTH) for each in kept)
