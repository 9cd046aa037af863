"""Rotary angles, sinusoids and relative buckets."""

import math

import pytest
import torch
from transformers import T5Config
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position
from transformers.models.t5.modeling_t5 import T5Attention

from workloads.model.disentangled import bucket
from workloads.model.positions import RelativeBias, rotary, rotate, sinusoids
from workloads.model.presets import preset


def test_rotation_keeps_length_and_turns_by_the_angle() -> None:
    config = preset("llama-tiny")
    table = rotary(config, torch.arange(9)[None])
    x = torch.randn(2, 4, 9, 16, generator=torch.Generator().manual_seed(0))
    turned = rotate(x, table)
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), atol=1e-5)
    assert torch.equal(turned[:, :, 0], x[:, :, 0])
    unit = torch.zeros(1, 1, 9, 16)
    unit[..., 0] = 1
    assert math.isclose(rotate(unit, table)[0, 0, 3, 8].item(), math.sin(3), rel_tol=1e-5)


def test_llama3_stretches_long_waves_and_keeps_short_ones() -> None:
    scaling = {"kind": "llama3", "factor": 8.0, "original_positions": 8192}
    plain, stretched = preset("llama-3-8b"), preset("llama-3-8b").changed({"rope_scaling": scaling})
    one = torch.ones(1, 1, dtype=torch.int64)
    before, after = (rotary(c, one)[1][0, 0, 0, :64].asin() for c in (plain, stretched))
    assert torch.allclose(after[1:10], before[1:10], rtol=1e-4)
    assert torch.allclose(after[-10:], before[-10:] / 8, rtol=1e-3)


def test_sinusoids_are_those_of_the_paper() -> None:
    table = sinusoids(torch.arange(5), 8)
    assert table.shape == (5, 8)
    assert math.isclose(table[3, 1].item(), math.sin(3 / 10000 ** (1 / 4)), rel_tol=1e-5)
    assert math.isclose(table[3, 5].item(), math.cos(3 / 10000 ** (1 / 4)), rel_tol=1e-5)


@pytest.mark.parametrize(("buckets", "farthest"), [(256, 512), (6, 16), (32, 128), (7, 100)])
def test_buckets_are_debertas_at_every_distance(buckets: int, farthest: int) -> None:
    distance = torch.arange(-600, 601)
    theirs = make_log_bucket_position(distance, buckets, farthest).long()
    assert torch.equal(bucket(distance, buckets, farthest), theirs)


def test_buckets_are_t5s_at_every_distance() -> None:
    distance = torch.arange(-600, 600)
    for both in (True, False):
        ours = RelativeBias(preset("t5-tiny"), bidirectional=both).bucket(distance)
        theirs = T5Attention(T5Config(is_decoder=not both))._relative_position_bucket(distance, both, 32, 128)
        assert torch.equal(ours, theirs)


def test_frequencies_do_not_depend_on_the_default_type() -> None:
    config = preset("llama-tiny")
    positions = torch.arange(3000)[None]
    before = rotary(config, positions)
    torch.set_default_dtype(torch.bfloat16)
    try:
        after = rotary(config, positions)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(before[0], after[0])
