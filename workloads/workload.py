"""The contract between the trained model and the trainer.

A `Workload` is a plain single-device model with an objective. It knows no ranks: it declares what may be sharded and
how, and the trainer shards it. Everything here is deterministic: weights depend on (seed, parameter name), batches on
(seed, sample id, turn), where turn is how many times the samples have been read before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from workloads.model.inside import Shows
    from workloads.model.stored import StoredTensor

IGNORED = -100
"""The label of a position that is not predicted."""

Batch = dict[str, Tensor]
"""Named tensors. The first dimension of each is the micro-batch, so all of them are split the same way."""


class Frame(NamedTuple):
    """The special tokens that a tokenizer puts around texts: before and after one text; before, between and after two
    texts.

    typed: whether the second of two texts has token type 1.
    """

    single: tuple[tuple[int, ...], tuple[int, ...]]
    pair: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    typed: bool


@dataclass(frozen=True)
class Vocabulary:
    """The facts about the tokenizer that an objective needs. Ids that the tokenizer lacks are None.

    Attributes:
        sentinels: the ids of `<extra_id_0>`, `<extra_id_1>`, ... in that order (T5, GLM).
        reserved: ids that are never drawn as text: all special tokens, <unk> among them, and ids without an entry.
        added: all tokens from this id on were added to the tokenizer.
        frame: the special tokens that it puts around texts; None without any.
        before: the tokens before each text of the data; they are never predicted.
        source_language: the token of a source's language, if the tokenizer has one; `target_language` likewise for a
            target.
        target: the tokens before and after a target, if a pretrained folder frames it differently from the source.
        decoder_start: the token with which the folder's decoder begins.
        word_start: bool [size], whether a token begins a word. `sentence_end`, bool [size]: whether it ends a sentence.
    """

    size: int
    eos: int
    pad: int | None = None
    bos: int | None = None
    cls: int | None = None
    sep: int | None = None
    mask: int | None = None
    sentinels: tuple[int, ...] = ()
    reserved: frozenset[int] = frozenset()
    added: int = 2**62
    frame: Frame | None = None
    source_language: int | None = None
    target_language: int | None = None
    target: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    decoder_start: int | None = None
    before: tuple[int, ...] = ()
    word_start: np.ndarray | None = field(default=None, compare=False)
    sentence_end: np.ndarray | None = field(default=None, compare=False)

    @property
    def padding(self) -> int:
        """Return the id that fills the rest of a sample after its text."""
        return self.eos if self.pad is None else self.pad

    @property
    def special(self) -> frozenset[int]:
        """Return the ids that are not text. No objective may mask, replace or predict from them."""
        named = (self.eos, self.pad, self.bos, self.cls, self.sep, self.mask)
        return frozenset([i for i in named if i is not None]) | frozenset(self.sentinels)


COUNTED = "counted"
"""The batch entry that marks the rows that are samples, bool [B], where samples are compared with each other."""


@dataclass(frozen=True)
class Loss:
    """`total` is the sum (not the mean) of the loss over the `count` predicted tokens, both fp32 scalars.

    Sums add over micro-batches and ranks, so the mean over the global batch is the same number in every layout.

    Attributes:
        extra: a further loss (auxiliary router losses, z-loss), already weighted, in units of the mean loss.
        metrics: detached scalars to log, each a mean over the micro-batch.
        correct: how many predicted tokens have the label as their most probable token, if that was requested.
        sums: detached pairs of a sum and its count. Their means over the global batch are logged.
        each: [B, 2], detached: the prediction and the label of every sample, for samples with a single one.
        each_token: the loss of each label, flat, also of labels that are ignored; only of a loss over logits [B, L, V].
    """

    total: Tensor
    count: Tensor
    extra: Tensor | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    correct: Tensor | None = None
    sums: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    each: Tensor | None = None
    each_token: Tensor | None = None


@dataclass(frozen=True)
class Windowing:
    """How an objective divides the text into samples.

    Attributes:
        unit: "stream": `window` tokens every `stride`, with `vocabulary.eos` after each document; "document": a stretch
            of one document, at most `window` tokens, without its closing token; "documents": as many whole documents as
            fit `window` tokens, or the beginning of a longer one; "record": a whole record of any length; "records": as
            many whole records as fit `window` tokens.
        documents: the minimum number of documents in the text, if they are counted.
        partial: whether the objective accepts shorter windows, of at least two tokens. An evaluation then reads a
            stream to its last token.
    """

    unit: Literal["stream", "document", "documents", "record", "records"]
    window: int
    stride: int
    documents: int = 1
    partial: bool = False


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: greedily at temperature 0, else by a random draw.

    top_k: draw only among the top_k most probable tokens; 0 for all. top_p: draw only among the fewest tokens whose
    probabilities sum to at least top_p. is_race: whether tokens are drawn by a race, in which probabilities that differ
    in their last bits almost always draw the same token; see `workloads.model.answers.choose`.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    is_race: bool = False


@dataclass(frozen=True)
class Generation:
    """How a model's text continues and ends, independent of `Sampling`.

    Attributes:
        ends: the tokens that end a text.
        settings: a pretrained folder's settings, by their names in transformers' generation_config.json.
        notes: remarks for the user, one line each.
    """

    ends: tuple[int, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def ending(self, *ends: int) -> Generation:
        """Return a copy in which these tokens end a text too."""
        return replace(self, ends=tuple(dict.fromkeys((*self.ends, *ends))))


PLAIN = Generation()
"""The generation of a model without settings in a folder."""

Ended = Callable[[Sequence[int]], bool]
"""Returns whether these generated tokens contain a stop string, so that the text needs no more."""


class Text(Protocol):
    """The samples of a corpus, by number."""

    def __call__(self, sample: int, /) -> np.ndarray:
        """Return the raw tokens of a sample, int64 [window]; fewer if its unit is not a stream."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def siblings(self, sample: int, /) -> range:
        """Return the samples of the same document, if the unit is a document."""

    def companions(self, sample: int, /) -> range:
        """Return a range of samples that may be read along with this one. It includes the samples
        of the same document.
        """


class Objective(Protocol):
    """A training objective: token windows in, a batch out. Pure in (seed, sample id, turn)."""

    name: str
    begins: str
    ends: str
    """The roles of the tokens around each text that the model reads ("cls", "sep"); empty for none."""

    @property
    def around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tokens before and after a text that the model reads."""

    def window(self, sequence_length: int) -> int:
        """Return how many tokens of raw text a sample reads, so that its model input has `sequence_length` tokens."""

    @property
    def windowing(self) -> Windowing:
        """Return how the objective divides the text into samples."""

    def collate(self, read: Text, ids: Sequence[int], turn: int) -> Batch:
        """Return a batch of samples. It may read other samples too (a random next sentence).

        Args:
            read: returns the tokens of a sample by its id.
            ids: the ids of the samples.
            turn: how many times these samples have been read before.

        Returns:
            The arrays by name, [B, ...] each. Positions that are not predicted have the label -100.
        """

    def is_cut(self, record: np.ndarray, /) -> bool:
        """Return whether a record is longer than a sample, so that a part of it is not read."""

    def is_lost(self, record: np.ndarray, /) -> bool:
        """Return whether cutting a record removes everything that is predicted."""


class Workload(Protocol):
    """A model and an objective, as the trainer sees them."""

    @property
    def name(self) -> str:
        """Return the preset's name, or hf:<folder>."""

    @property
    def config(self) -> Any:
        """Return the model's configuration: a `TransformerConfig`, or a `HuggingFaceModel` for a class that runs
        unchanged.
        """

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Return the shape of every canonical tensor, parameters and buffers."""

    @property
    def frozen(self) -> frozenset[str]:
        """Return the parameters that are not trained. Checkpoints leave them out, because `initial` restores them."""

    @property
    def thawed_after(self) -> Mapping[str, int]:
        """Return, for parameters that are frozen at first and trained later, the step after which they are trained."""

    @property
    def quantised(self) -> frozenset[str]:
        """Return the frozen parameters whose values are already rounded to 4 bits, so that a rank may store them in 4
        bits.
        """

    @property
    def objective(self) -> Objective:
        """Return the training objective."""

    @property
    def vocabulary(self) -> Vocabulary:
        """Return the tokenizer's vocabulary."""

    def build(self) -> nn.Module:
        """Return a plain module on the current default device (meta included), with uninitialised weights.

        Layers are in named containers (`layers.0`, ...), so that a pipeline may split between them, and keep their
        original numbers in every stage. `state_dict()` names are the canonical tensor names. A tied weight appears once
        in `named_parameters()`.
        """

    def showing(self, shows: Shows) -> Workload:
        """Return this workload with a model whose outputs contain what its layers show.

        Raises WorkloadError if its layers are not known.
        """

    def initial(self, name: str, seed: int) -> Tensor:
        """Return an initial value, fp32 on CPU. It depends on (seed, name) alone.

        Args:
            name: the name of a parameter or buffer.
            seed: the seed of the run.
        """

    def stored(self, name: str, seed: int) -> StoredTensor | None:
        """Return a tensor that can be read in parts, with the same values as `initial`.

        Args:
            name: the name of a parameter or buffer.
            seed: the seed of the run.

        Returns:
            A stored initial weight or a random tensor. None if only `initial` provides the values.
        """

    @property
    def notes(self) -> Sequence[str]:
        """Return remarks for the user about the initial weights, one line each."""

    def lr_scale(self, name: str) -> float:
        """Return the learning-rate factor of the parameter `name` (muP, see `workloads.model.mup`)."""

    def depth(self, name: str) -> int:
        """Return the distance of the parameter `name` from the output, in layers.

        It is 0 for heads, 1 for the last layer, and the number of layers plus one for embeddings.
        """

    @property
    def embeddings(self) -> frozenset[str]:
        """Return the parameters before the first layer, and all tables of which a token reads a row."""

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Run the forward pass and return the loss of one micro-batch.

        Args:
            model: the module that `build` returned, or a divided copy of it.
            batch: the arrays of the micro-batch by name, [B, ...] each.
        """

    def criterion(self, output: Any, batch: Batch, of_tokens: Callable[[Tensor, Tensor], Loss] = ...) -> Loss:
        """Return the loss of a forward pass's output.

        Args:
            output: what the model returned for the batch.
            batch: the arrays of the micro-batch by name, [B, ...] each.
            of_tokens: computes the token loss from (logits, labels); replaced where logits are sharded over the
                vocabulary.
        """

    def balance(self, model: nn.Module, routed: Mapping[str, Tensor]) -> None:
        """Update the biases of routers after an optimizer step.

        Args:
            model: the module.
            routed: the result of `routing`, summed over all ranks.
        """

    def routing(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Return the routers' statistics since the last call, by the name of each router's weight.

        float64 [experts + 3]: dropped choices, choices of each expert, summed entropy of the tokens' scores in nats,
        number of tokens. Ranks sum them, and only their ratios are meaningful.
        """

    def sharding(self) -> Mapping[str, str]:
        """Map fnmatch patterns of module names to sharding styles. Modules that no pattern matches are replicated.

        column: a weight [out, in] is sharded over out. row: over in. vocab: an embedding or head is sharded over the
        vocabulary. sequence: a norm that may run on a shard of the sequence. heads: a norm inside a head. expert: a
        stack of experts is sharded over its first dimension among the ranks of the expert group.

        For unchanged classes only: stack: like expert, but over the tensor-parallel ranks, all of which have all
        tokens. joined: like column, followed by a gather of the outputs. own: the module's own parameters are sharded
        over their first dimension. latent: a replicated layer some of whose outputs the heads of all ranks read.
        """

    @property
    def stacks(self) -> frozenset[str]:
        """Return the parameters that are stacks of experts. Each slice is a matrix or vector of its own."""

    def stages(self) -> Sequence[str]:
        """Return the names of the modules before which a pipeline may split, in the order of the forward pass."""

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the layers of a model, or of a pipeline stage of it, in order. They are the units of recomputation and
        compilation.
        """

    @property
    def decoder_start(self) -> int | None:
        """Return the token with which an encoder-decoder's decoder begins; None if the vocabulary has no such token."""

    @property
    def generation(self) -> Generation:
        """Return how generated text continues, and which tokens besides the vocabulary's eos end it."""

    def asking_logits(self, batch: Batch) -> Batch:
        """Return the batch of texts for which the output of the model has `logits`, whatever it returns in training."""

    def generate(
        self,
        model: nn.Module,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        sampling: Sampling,
        ended: Ended | None = None,
    ) -> list[list[int]]:
        """Generate at most `max_tokens` ids after each prompt of token ids, with the settings of `generation`.

        A text ends with the first token that ends a text, or when `ended` returns True for it. Raises WorkloadError if
        the model cannot generate; see `workloads.model.generate`.
        """

    @property
    def compares(self) -> bool:
        """Return whether a sample's loss depends on the features of the whole global batch."""

    def compared(self, features: Tensor, counted: Tensor) -> Tensor:
        """Return the losses of compared samples, [G]. Only for a workload that `compares`.

        Args:
            features: the features of the global batch, fp32 [G, E].
            counted: bool [G]; False for rows that only fill up a batch.
        """

    @property
    def tables(self) -> frozenset[str]:
        """Return the tensors with one row per token that get rows for added tokens."""

    @property
    def begun_tables(self) -> Mapping[str, Sequence[int]]:
        """Return the shapes of `tables` in the weights that training begins with; empty if they begin anew."""

    @property
    def has_own_values(self) -> bool:
        """Return whether an evaluation reports the values that the loss returns, by their names. If not, it computes
        the metrics of the objective.
        """

    def check_form(self, form: str) -> None:
        """Raise WorkloadError if checkpoints of this kind of model are not exported in the form `form`."""

    def hf_config(self) -> Mapping[str, Any]:
        """Return transformers' configuration of the exported model. Raises WorkloadError without one."""

    def hf_tensors(self) -> Collection[str]:
        """Return the names of the exported model's tensors in transformers. Raises WorkloadError without one."""

    def hf_weights(self, chosen: Collection[str]) -> Mapping[str, Sequence[str]]:
        """Return transformers' names of the matrices that consist of our weights `chosen`, with the weights of each.

        Raises WorkloadError if it joins them with others, or has no names for them.
        """

    def check_hf(self) -> None:
        """Raise WorkloadError if `to_hf` could not write this model, whatever its weights."""

    def to_hf(self, read: Callable[[str], Tensor], folder: str) -> None:
        """Write config.json and model.safetensors in transformers' format.

        Args:
            read: returns a tensor of the model by its name.
            folder: a local folder.

        Raises:
            WorkloadError: transformers has no such model.
        """
