"""What the user's own code must have, by the key of the job file that names it.

Everything is checked before a run starts, and has to be a function of its arguments alone: a run draws the same numbers
whatever its layout, and after every restart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from workloads.workload import Batch


class Model(Protocol):
    """`workload.model: module:name`. A `torch.nn.Module`; the keys of `workload.changes` are the arguments of its
    constructor. If that has an argument `vocabulary_size`, it gets the number of the tokenizer's ids.

    The constructor runs under `torch.manual_seed(job.seed)` for the initial weights, and on the meta device for the
    structure: it may not read the values of tensors. Buffers that are not persistent, which no commit has, are those
    of the seed 0 in every run and export. Any kind of layer may be in it, and `forward` is free. What is
    random in training is drawn by the samples, see `Samples`: dropout and the like are refused, and so is what makes
    the loss of one sample depend on others (batch normalisation), since neither is the same under another layout.
    """

    def loss(self, batch: Batch) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        """The loss of each sample, [B], not their mean.

        batch: what the samples hold, stacked: each array [B, ...], floats in float32, integers in int64. For text it is
        what the objective gives, and the loss is that of each label, of the shape of `batch["labels"]`; those that
        are -100 do not count.

        It may return further values by name too, [B] each: means of them are in the rows of training and evaluations.
        NaN is no value: it does not count.
        """

    def check(self, batch: Batch, limits: Mapping[str, int]) -> None:
        """Optional: raise ValueError if samples do not fit the model. It is called before a run with the first of them
        and with what integers of any of them stay below, see `Samples.limits`."""

    def blocks(self) -> Sequence[nn.Module]:
        """Optional: the layers in the order of the forward pass. They are what is recomputed, compiled and sharded
        (ZeRO 2 and 3) one by one, and what `layer_decay` and muon count."""

    def stages(self) -> Sequence[nn.Module]:
        """Optional, for pipelines: the modules of the forward pass in order, at least two. The first is called with the
        batch, every other with what the one before returned and the batch; the last returns what `loss` does, which may
        then be left out.

        What is handed on is a tensor of floats, or a tuple of them, and becomes fp32. All tensors of the model are in
        these modules; a parameter may be in several. Pipelines cut between any two of them, into as many equal parts as
        there are stages.
        """

    def sharding(self) -> Mapping[str, str]:
        """Optional, for tensor parallelism: fnmatch pattern of a module's name -> style; the first that matches counts.

        column: an nn.Linear whose outputs are divided between ranks, so that what reads them sees a part of them; row:
        one whose inputs are such a part, and whose outputs are whole again; vocabulary: an nn.Embedding whose rows are
        divided, or an nn.Linear whose outputs are and that gives all of them; shared: a module between column and row
        that every rank has whole (a norm inside of heads).
        """

    def to_hf(self, tensors: Mapping[str, Tensor]) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
        """Optional, of a class that transformers has: its configuration as JSON and its tensors. The export is then a
        folder for transformers; `from_hf(tensors)` is the inverse, and `difference_to(theirs)` the largest difference
        of outputs to those of the model that transformers makes of it, which is checked."""

    heads: int
    """Optional: the number of attention heads, of keys if those are fewer, where column-cut layers give heads: a head
    is not divided between ranks."""


class ComparingModel(Protocol):
    """A model whose loss of a sample depends on all others of the global batch (contrastive losses): it has these two
    in place of `loss`. What it computes is exact under data parallelism, ZeRO and accumulation: embeddings of the
    global batch are gathered, and their gradients go back through each micro-batch (Gao et al., 2021, "Scaling Deep
    Contrastive Learning Batch Size under Memory Limited Setup"). With several micro-batches a step each has two
    forward passes."""

    def embed(self, batch: Batch) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        """What the loss needs to know of each sample, [B, E], and further values as of `Model.loss`."""

    def compare(self, features: Tensor, counted: Tensor) -> Tensor:
        """The loss of each sample, [G], from the features of all, fp32 [G, E], and nothing else: no parameters (a
        temperature that is learnt is among the features). counted: bool [G], False for what fills up a batch."""


class Samples(Protocol):
    """`data.samples: module:name`. A dataset by number; `data.samples.options` are the arguments of the constructor.
    Every rank makes one, so it had better read its files as they are asked for."""

    def __len__(self) -> int:
        """How many samples there are."""

    def sample(self, number: int, rng: np.random.Generator) -> Mapping[str, Any]:
        """The arrays of a sample, of the same names and shapes for each.

        number: from 0 on. rng: all random numbers (noise, crops, masks) come from it; it depends on (seed, number,
        turn) alone, where turn is how often the sample has been read before.
        """

    def prepare(self, folder: str, most: int | None) -> Mapping[str, Any]:
        """Optional: write into a local folder what is read from then on, of at most so many samples: `count`, and
        `rejected` by what was done and by kind. It is called once, in the data stage; `open` in every process after it.
        A dataset that is prepared has a `fingerprint`, which with its options names the folder."""

    def open(self, folder: str) -> None:
        """Read from a folder that `prepare` has written; before that it has no length and no samples."""

    def limits(self) -> Mapping[str, int]:
        """Optional: what the integers of an array stay below in all samples, by its name: the size of a vocabulary."""

    def export(self, prepared: str, folder: str) -> None:
        """Optional: write into a local folder, that of an export, what makes such samples of raw ones: a tokenizer, an
        image processor. `prepared` is the folder given to `prepare`, or what a run keeps of it."""

    def fingerprint(self) -> str:
        """Optional: a checksum of the files that are read. A run refuses data with another one. Without it the first
        samples stand for all."""

    def held_out(self, number: int, rng: np.random.Generator) -> Mapping[str, Any]:
        """Optional: the sample as evaluations read it, where that is not as training does (not augmented)."""

    def of_set(self) -> Mapping[str, Any]:
        """Optional: arrays that evaluations read with every sample, the same for all."""


class Metric(Protocol):
    """An entry `module:name` of `evaluate.metrics`: a function."""

    def __call__(self, output: Any, batch: Batch) -> Tensor:
        """The metric of each sample, [B]; its mean over a set is the set's.

        output: the logits of a model of this project, [B, L, vocabulary], of masked objectives [predicted, vocabulary],
        of classes and values of a text [B, classes]; of an own model the further values that its loss has returned.
        """


class Optimizer(Protocol):
    """`train.optimizer.name: module:name`; its options are the arguments of the constructor. It is called for parts of
    parameters, since ranks divide them, so an update of a part must be the part of the update."""

    slots: Sequence[str]
    """The names of the states of a parameter, each of its shape and zero at first."""

    def update(
        self,
        parameter: Tensor,
        gradient: Tensor,
        state: Mapping[str, Tensor],
        *,
        lr: float,
        weight_decay: float,
        step: int,
    ) -> None:
        """Change a parameter and its states in place, without gradients; `step` counts from 1. The gradient is clipped
        already, weight_decay is 0 for vectors."""


class Schedule(Protocol):
    """`train.optimizer.schedule: module:name`: a function, which gets its options as further arguments."""

    def __call__(self, step: int, steps: int) -> float:
        """The learning rate of update `step` (from 0) of `steps` as a share of `lr`; not asked in the warm-up."""
