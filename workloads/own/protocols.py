"""The protocols of the user's own code, by the key of the job file that names it.

Everything is checked before a run starts. All functions must depend only on their arguments, so that a run draws the
same numbers under every layout and after every restart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from workloads.workload import Batch


class Model(Protocol):
    """`workload.model: module:name`: a `torch.nn.Module`. The keys of `workload.changes` are its constructor's
    arguments.

    If the constructor has an argument `vocabulary_size`, it gets the number of the tokenizer's ids. It runs under
    `torch.manual_seed(job.seed)` for the initial weights, and on the meta device for the structure, so it must not read
    values of tensors. Non-persistent buffers, which no checkpoint stores, are those of seed 0 in every run and export.

    The model may contain any layers, and `forward` is free. Random numbers for training come from the samples, see
    `Samples`. Dropout and other random layers are refused, and so is everything that makes the loss of one sample
    depend on others (batch normalisation), because neither is the same under another layout.
    """

    def loss(self, batch: Batch) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss of each sample, [B], not their mean.

        batch: the stacked arrays of the samples, [B, ...] each, floats as float32, integers as int64. For text it is
        the objective's batch, and the loss has the shape of `batch["labels"]`; positions with label -100 do not count.

        It may also return other values by name, [B] each. Their means are in the rows of training and evaluations. NaN
        marks a missing value, which does not count.
        """

    def check(self, batch: Batch, limits: Mapping[str, int]) -> None:
        """Optional: raise ValueError if samples do not fit the model.

        It is called before a run, with the first samples and with the exclusive upper bounds of all samples' integers,
        see `Samples.limits`.
        """

    def logits(self, batch: Batch) -> Tensor:
        """Optional, for language models: return the logits of the token after each, [B, L, vocabulary].

        It makes `generate`, `chat` and `serve-model` work, `evaluate.samples` and `evaluate.tasks`, and `generate` of
        an exported folder. The batch has `tokens`, int64 [B, L], without padding, `positions` (0, 1, ...) and
        `segments` (zeros). A token's logits depend on the tokens up to it alone.
        """

    def blocks(self) -> Sequence[nn.Module]:
        """Optional: return the layers in the order of the forward pass.

        Each is recomputed, compiled and sharded (ZeRO 2 and 3) as a unit. `layer_decay` and Muon count them.
        """

    def stages(self) -> Sequence[nn.Module]:
        """Optional, for pipelines: return the modules of the forward pass in order, at least two.

        The first module is called with the batch, every other with its predecessor's result and the batch. The last
        returns what `loss` returns; a model with stages needs no `loss`.

        A module returns a float tensor, or a tuple of them, which becomes fp32. These modules contain all tensors of
        the model; a parameter may be in several. A pipeline cuts between any two of them, into as many equal parts as
        it has stages.
        """

    def sharding(self) -> Mapping[str, str]:
        """Optional, for tensor parallelism: map fnmatch patterns of module names to styles. The first match counts.

        column: an nn.Linear whose outputs are sharded over ranks, so the next module sees a part of them. row: an
        nn.Linear whose inputs are such a part, and whose outputs are complete again. vocabulary: an nn.Embedding whose
        rows are sharded, or an nn.Linear whose outputs are sharded and gathered. shared: a module between column and
        row that is replicated on every rank (a norm inside of heads).
        """

    def to_hf(self, tensors: Mapping[str, Tensor]) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
        """Optional, for classes that transformers has too: return its configuration as JSON and its tensors.

        The export is then a folder for transformers. `from_hf(tensors)` is the inverse. `difference_to(theirs)` returns
        the largest difference of the outputs to those of transformers' model, and is used to check the export.
        """

    heads: int
    """Optional: the number of attention heads (of keys, if those are fewer), if column-sharded layers produce heads. A
    head is never split between ranks.
    """


class ComparingModel(Protocol):
    """A model whose sample loss depends on all samples of the global batch (contrastive losses).

    These two methods replace `loss`. The result is exact under data parallelism, ZeRO and gradient accumulation: the
    embeddings of the global batch are gathered, and their gradients flow back through each micro-batch (Gao et al.,
    2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup"). With several micro-batches in a
    step, each has two forward passes.
    """

    def embed(self, batch: Batch) -> Tensor | tuple[Tensor, Mapping[str, Tensor]]:
        """Return each sample's features for the loss, [B, E], and other values as in `Model.loss`."""

    def compare(self, features: Tensor, counted: Tensor) -> Tensor:
        """Return the loss of each sample, [G], from the features of all samples of the global batch.

        Use no parameters here: make a learned temperature one of the features.

        Args:
            features: what `embed` returned, fp32 [G, E].
            counted: bool [G]; False for rows that only fill up a batch.
        """


class Samples(Protocol):
    """`data.samples: module:name`: a dataset by number. `data.samples.options` are the constructor's arguments.

    Every rank makes one, so it should read its files lazily.
    """

    def __len__(self) -> int:
        """Return the number of samples."""

    def sample(self, number: int, rng: np.random.Generator) -> Mapping[str, Any]:
        """Return the arrays of a sample. Names and shapes are the same for all samples.

        Args:
            number: the number of the sample, from 0.
            rng: the source of all random numbers (noise, crops, masks). It depends only on (seed, number, pass), where
                the pass counts how many times the sample has been read before.
        """

    def prepare(self, folder: str, most: int | None) -> Mapping[str, Any]:
        """Optional: write the data of the samples into a local folder, from which it is read afterwards.

        It is called once, in the data stage; `open` is called in every process after it. A dataset with this method has
        a `fingerprint`, which together with its options names the folder.

        Args:
            folder: a local folder.
            most: maximum number of samples to write; None for all.

        Returns:
            `count`, the number of samples, and `rejected`, the numbers of rejected ones by action and by kind.
        """

    def open(self, folder: str) -> None:
        """Read from a folder that `prepare` has written. Before this call, the dataset has no length and no samples."""

    def limits(self) -> Mapping[str, int]:
        """Optional: return the exclusive upper bound of an array's integers over all samples, by its name: a vocabulary
        size.
        """

    def export(self, prepared: str, folder: str) -> None:
        """Optional: write the tools that make such samples from raw data: a tokenizer, an image processor.

        Args:
            prepared: the folder that `prepare` wrote, or the run's copy of it.
            folder: the local folder of the export.
        """

    def fingerprint(self) -> str:
        """Optional: return a checksum of the files that are read.

        A run refuses data with another checksum. Without this method, the first samples are hashed instead.
        """

    def held_out(self, number: int, rng: np.random.Generator) -> Mapping[str, Any]:
        """Optional: return the sample as evaluations read it, if that differs from training (no augmentation).

        Args:
            number: the number of the sample, from 0.
            rng: as for `sample`.
        """

    def of_set(self) -> Mapping[str, Any]:
        """Optional: return arrays that evaluations read with every sample."""


class Metric(Protocol):
    """An entry `module:name` of `evaluate.metrics`: a function."""

    def __call__(self, output: Any, batch: Batch) -> Tensor:
        """Return the metric of each sample, [B]. The metric of a set is their mean.

        output: for a model of this project the logits, [B, L, vocabulary], for masked objectives [predicted,
        vocabulary], for classes and values of a text [B, classes]; for an own model the other values that its loss
        returned.
        """


class Optimizer(Protocol):
    """`train.optimizer.name: module:name`. Its options are the constructor's arguments.

    It is called for parts of parameters, because ranks shard them, so it must update elements independently of the rest
    of the parameter.
    """

    slots: Sequence[str]
    """The names of a parameter's states. Each has the parameter's shape and starts at zero."""

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
        """Update a parameter and its states in place, without autograd.

        Args:
            parameter: the part of a parameter that this rank holds, fp32.
            gradient: its gradient, already clipped, of the same shape.
            state: its states by slot, of the same shape.
            lr: the learning rate of this update.
            weight_decay: the weight decay; 0 for vectors.
            step: number of this update, from 1.
        """


class Schedule(Protocol):
    """`train.optimizer.schedule: module:name`: a function. Its options are further arguments."""

    def __call__(self, step: int, steps: int) -> float:
        """Return the learning rate of update `step` (from 0) of `steps` as a share of `lr`. Not called during the
        warm-up.
        """
