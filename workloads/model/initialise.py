"""Initial weights as published. Each tensor depends only on (seed, parameter name)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import product

import numpy as np
import torch
from torch import Tensor

from workloads.model.config import TransformerConfig
from workloads.model.head_gates import START
from workloads.model.mup import std_scale
from workloads.model.stored import Part, is_gates, whole

ROWS, COLUMNS = 64, 1024
"""The size of a tile, see `Drawn`."""


def normal(seed: int, name: str, shape: Sequence[int], beyond: float = math.inf) -> Tensor:
    """Return standard normal values, fp32 of `shape`, from (seed, name): the same bits on every machine.

    This uses a counter-based generator (Philox; Salmon et al. 2011), because torch's normal values depend on the
    CPU's vector instructions. Values larger than `beyond` are drawn again.

    Args:
        seed: of the run.
        name: name of the tensor.
        shape: its shape.
        beyond: the largest magnitude that is kept, in standard deviations.
    """
    key = np.frombuffer(blake2b(f"{seed}/{name}".encode(), digest_size=16).digest(), dtype="<u8")
    random = np.random.Generator(np.random.Philox(key=key))
    values = random.standard_normal(math.prod(shape), dtype=np.float32)
    # From the same stream, so the values still depend on (seed, name) alone.
    while len(large := np.flatnonzero(np.abs(values) > beyond)):
        values[large] = random.standard_normal(len(large), dtype=np.float32)
    return torch.from_numpy(values).view(torch.Size(shape))


@dataclass(frozen=True)
class Drawn:
    """A tensor of normal values that can be drawn in parts: a `StoredTensor`.

    Each tile of ROWS x COLUMNS elements, or the same number of elements of a vector, depends only on (seed, name,
    position). A tensor of at most this size is one tile. `std` is the standard deviation. Values are truncated at
    `beyond`
    standard deviations.
    """

    seed: int
    name: str
    shape: torch.Size
    std: float
    beyond: float = math.inf

    def __getitem__(self, part: Part) -> Tensor:
        """Return a part, fp32 on CPU. Draws only the tiles that overlap it."""
        if self.shape.numel() <= ROWS * COLUMNS:
            return normal(self.seed, self.name, self.shape, self.beyond)[part].mul_(self.std)
        result = torch.empty([each.stop - each.start for each in part])
        sizes = self._tile
        touched = (
            range(each.start // size, -(-each.stop // size)) for each, size in zip(part, sizes, strict=True)
        )
        # Only what a rank holds is drawn, and its bits are those of the whole tensor.
        for tile in product(*touched):
            in_tile = []
            in_result = []
            shape = []
            for number, size, length, requested in zip(tile, sizes, self.shape, part, strict=True):
                first = number * size
                shape.append(min(size, length - first))
                start = max(first, requested.start)
                stop = min(first + shape[-1], requested.stop)
                in_tile.append(slice(start - first, stop - first))
                in_result.append(slice(start - requested.start, stop - requested.start))
            values = normal(self.seed, f"{self.name}#{','.join(map(str, tile))}", shape, self.beyond)
            result[tuple(in_result)] = values[tuple(in_tile)]
        return result.mul_(self.std)

    @property
    def _tile(self) -> tuple[int, ...]:
        return (ROWS * COLUMNS,) if len(self.shape) == 1 else (*(1,) * (len(self.shape) - 2), ROWS, COLUMNS)


def initial(
    config: TransformerConfig, name: str, shape: torch.Size, seed: int, base: torch.Size | None = None
) -> Tensor:
    """Return the initial tensor `name` of `shape`, fp32 on CPU. `base` is its shape in the muP base model, if there is
    one.

    Norm weights are one (zero if stored minus one). Biases and buffers are zero. Gates of heads are open. All others
    have the standard deviation `spread`, scaled relative to the base.

    Args:
        config: the model.
        name: name of the tensor.
        shape: its shape.
        seed: of the run.
        base: its shape in the muP base model; None without one.
    """
    random_tensor = drawn(config, name, shape, seed, base)
    if random_tensor is not None:
        return random_tensor[whole(shape)]
    if is_gates(name):
        return torch.full(shape, START)
    ones = is_norm(name) and config.norm != "rms_offset"
    return torch.ones(shape) if ones else torch.zeros(shape)


def drawn(
    config: TransformerConfig, name: str, shape: torch.Size, seed: int, base: torch.Size | None = None
) -> Drawn | None:
    """Like `initial`, but drawn in parts. Returns None for tensors that are not drawn: norms, biases and gates.

    Args:
        config: the model.
        name: name of the tensor.
        shape: its shape.
        seed: of the run.
        base: its shape in the muP base model; None without one.
    """
    if is_norm(name) or name.endswith("bias") or is_gates(name):
        return None
    # Like tf.truncated_normal: no value beyond two standard deviations.
    beyond = 2.0 if config.initial == "truncated" else math.inf
    base = base or shape
    std = spread(config.base or config, name, base) * std_scale(name, shape, base)
    return Drawn(seed, name, shape, std, beyond)


def new_rows(
    config: TransformerConfig,
    name: str,
    shape: torch.Size,
    numbers: Sequence[int],
    *,
    seed: int,
    base: torch.Size,
) -> Tensor:
    """Return rows `numbers` of the table `name` of `shape`, each from (seed, name, number) alone.

    Rows of a bias are zero. All others have the standard deviation that `initial` uses.

    Args:
        config: the model.
        name: name of the table.
        shape: its shape.
        numbers: the rows to return.
        seed: of the run.
        base: shape of the table in the muP base model.
    """
    if len(shape) == 1:
        return torch.zeros(len(numbers))
    std = spread(config.base or config, name, base) * std_scale(name, shape, base)
    return torch.stack([normal(seed, f"{name}/{number}", shape[1:]) for number in numbers]).mul_(std)


def is_norm(name: str) -> bool:
    """Return whether `name` is the weight of a norm."""
    module, _, leaf = name.rpartition(".")
    return leaf == "weight" and module.endswith("norm")


def spread(config: TransformerConfig, name: str, shape: torch.Size) -> float:
    """Return the standard deviation of a weight's initial values.

    GPT-2 (release, model.py): 0.02, positions 0.01, and projections into the residual stream divided by the root of
    their number (paper, section 2.3). BERT, ALBERT, ELECTRA: truncated 0.02. BART, RoBERTa, Llama: 0.02. DeepSeek-V3:
    0.006 (section 4.2). fan_in is T5's (Mesh TensorFlow): initial_std over the root of the inputs; queries also over
    the root of the head size, because scores are not scaled; embeddings one.

    Args:
        config: the model.
        name: name of the weight.
        shape: its shape, [.., outputs, inputs].
    """
    std = config.initial_std
    if config.initial == "fan_in":
        return _fan_in(config, name, shape)
    if not config.residual_scaling:
        return std
    if name == "embeddings.positions.weight":
        return std / 2
    if name.endswith(("attention.output.weight", "down.weight", "experts.down")):
        # Each layer adds two such outputs to the residual stream: the sum of 2 N independent terms keeps the variance
        # of one.
        return std / (2 * config.all_layers) ** 0.5
    return std


def _fan_in(config: TransformerConfig, name: str, shape: torch.Size) -> float:
    std = config.initial_std
    if name in ("tokens.weight", "head.weight"):
        return 1.0
    if name.endswith("relative_bias.weight"):
        return std * config.hidden**-0.5
    if name.endswith("attention.query.weight"):
        return std * (config.hidden * config.head_dim) ** -0.5
    return std * shape[-1] ** -0.5
