"""The contract between what is trained and how it is trained.

A `Workload` is a plain single-device model with an objective. It knows no ranks: it declares what may be split and how,
and the trainer splits it. Everything here is deterministic: weights depend on (seed, parameter name), batches on (seed,
sample id, turn), where turn is the number of times that the samples have been read before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from workloads.model.stored import StoredTensor

Batch = dict[str, Tensor]
"""Named tensors whose first dimension is the micro-batch, so that all of them are split in the same way."""


class Frame(NamedTuple):
    """The special tokens that a tokenizer puts around texts: before and after a single one; before, between and after
    two. typed: the second of two has token type 1."""

    single: tuple[tuple[int, ...], tuple[int, ...]]
    pair: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    typed: bool


@dataclass(frozen=True)
class Vocabulary:
    """What an objective needs to know of the tokenizer. Ids that the tokenizer lacks are None.

    `sentinels` are the ids of `<extra_id_0>`, `<extra_id_1>`, ... in that order (T5, GLM). `reserved` are ids that no
    text is drawn from: all special tokens of the tokenizer, <unk> among them, and ids that it has no entry for.
    From the id `added` on, all tokens were added to the tokenizer. `frame` is what it puts around texts, None if that
    is nothing; `before` are the tokens that stand before each text of the data, and which are never predicted.
    `source_language` and `target_language` are the tokens of languages that it names for a source and for a target.
    `target` is what stands before and after the target of a source where a pretrained folder has it otherwise than
    around the source; `decoder_start` is the token with which its decoder begins.
    `word_start[id]` tells whether a token begins a word, `sentence_end[id]` whether it ends a sentence;
    both are bool arrays of shape [size].
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
        """The id that fills what a text leaves of a sample."""
        return self.eos if self.pad is None else self.pad

    @property
    def special(self) -> frozenset[int]:
        """Ids that are not text, which no objective may mask, replace or predict from."""
        named = (self.eos, self.pad, self.bos, self.cls, self.sep, self.mask)
        return frozenset([i for i in named if i is not None]) | frozenset(self.sentinels)


@dataclass(frozen=True)
class Loss:
    """`total` is the sum (not the mean) of the loss over the `count` predicted tokens, both fp32 scalars.

    Sums add over micro-batches and ranks, so the mean over the global batch is the same number in every
    layout. `extra` is a further loss (auxiliary router losses, z-loss), already weighted and in units of the mean loss.
    `metrics` are detached scalars to log, each a mean over the micro-batch. `correct` is how many of the predicted
    tokens are the most likely ones, where that was asked for. `sums` are detached, each a sum and of how many it is;
    their means over the global batch are logged. `each`, [B, 2], detached, has the prediction and the label of every
    sample, where a sample has one.
    """

    total: Tensor
    count: Tensor
    extra: Tensor | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    correct: Tensor | None = None
    sums: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    each: Tensor | None = None


@dataclass(frozen=True)
class Reading:
    """How an objective divides the text into samples.

    unit: "stream", `window` tokens every `stride`, in which documents end with `vocabulary.eos`; "document", a
    stretch of one document, at most `window` tokens, without its closing token; "documents", as many whole documents
    as `window` tokens hold, and of one that is longer the beginning; "record", a whole record, however long; "records",
    as many whole ones as `window` tokens hold. documents: how many the text must have at least,
    where they are counted. partial: whether the objective also takes a shorter window, of two tokens at least: an
    evaluation then reads a stream to its last token.
    """

    unit: Literal["stream", "document", "documents", "record", "records"]
    window: int
    stride: int
    documents: int = 1
    partial: bool = False


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: the most probable one without a temperature, else drawn.

    top_k: only so many of the most probable ones, 0 for all. top_p: only the fewest that have that share together.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Generation:
    """How the text of a model goes on and ends, whatever chooses its tokens.

    ends: the tokens after which there is no further one. settings: those of a pretrained folder, by their names in
    transformers' generation_config.json. notes: what a user should know of them, a line each.
    """

    ends: tuple[int, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def ending(self, *ends: int) -> Generation:
        """The same, and these tokens end a text too."""
        return replace(self, ends=tuple(dict.fromkeys((*self.ends, *ends))))


PLAIN = Generation()
"""That of a model which no folder says anything of."""

Ended = Callable[[Sequence[int]], bool]
"""Whether a text that begins with these generated tokens needs no further ones, since a stop string came."""


class Text(Protocol):
    """The samples of a corpus, by number."""

    def __call__(self, sample: int, /) -> np.ndarray:
        """The raw tokens of a sample, int64 [window], or fewer where its unit is not a stream."""

    def __len__(self) -> int:
        """How many samples there are."""

    def siblings(self, sample: int, /) -> range:
        """The samples of the same document, where the unit is a document."""

    def companions(self, sample: int, /) -> range:
        """The samples, those of the same document among them, of which one may be read along with this one."""


class Objective(Protocol):
    """A pre-training recipe: token windows in, a batch out. Pure in (seed, sample id, turn)."""

    name: str
    begins: str
    ends: str
    """Roles of the tokens around each text that the model reads ("cls", "sep"), empty for none."""

    @property
    def around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens before and after a text that the model reads."""

    def window(self, sequence_length: int) -> int:
        """Tokens of raw text that one sample reads, so that its model input is `sequence_length` long."""

    @property
    def reading(self) -> Reading:
        """How it divides the text into samples."""

    def collate(self, read: Text, ids: Sequence[int], turn: int) -> Batch:
        """A batch of the samples `ids`, read by `read(id)`; others may be read too (a random next sentence).

        `turn` is the number of times that these samples have been read before. Labels that are not predicted are -100.
        """

    def is_cut(self, record: np.ndarray, /) -> bool:
        """Whether a record is longer than a sample, so that not all of it is read."""

    def is_lost(self, record: np.ndarray, /) -> bool:
        """Whether nothing of what is to be predicted is left of a record that is cut."""


class Workload(Protocol):
    """A model and an objective, as the trainer sees them."""

    @property
    def name(self) -> str:
        """The preset's name, or hf:<folder>."""

    @property
    def config(self) -> Any:
        """The model's configuration: a `TransformerConfig`, or a `HuggingFaceModel` for a class run as it is."""

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Shape of every canonical tensor, parameters and buffers."""

    @property
    def frozen(self) -> frozenset[str]:
        """The parameters that are not trained: no commit has them, since `initial` gives them."""

    @property
    def thawed_after(self) -> Mapping[str, int]:
        """Of parameters that were frozen at first and are trained later, after how many steps."""

    @property
    def quantised(self) -> frozenset[str]:
        """Those of the frozen parameters whose values are such as 4 bits have, and which a rank may keep so."""

    @property
    def objective(self) -> Objective:
        """The pre-training objective."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer's vocabulary."""

    def build(self) -> nn.Module:
        """A plain module on the current default device (meta included), weights not initialised.

        Layers are in named containers (`layers.0`, ...), so that a pipeline may split between them, and keep their
        original numbers in every stage. `state_dict()` names are the canonical tensor names; a tied weight appears
        once in `named_parameters()`.
        """

    def initial(self, name: str, seed: int) -> Tensor:
        """The initial value of the parameter or buffer `name` in fp32 on CPU, from (seed, name) alone."""

    def stored(self, name: str, seed: int) -> StoredTensor | None:
        """The tensor `name`, which may be read in parts: in the weights that the model begins with, or drawn; None if
        there are none but those of `initial`, whose values it has."""

    @property
    def notes(self) -> Sequence[str]:
        """What a user should know of the weights that the model begins with, a line each."""

    def lr_scale(self, name: str) -> float:
        """Factor of the learning rate of the parameter `name` (muP, see `workloads.model.mup`)."""

    def depth(self, name: str) -> int:
        """How far the parameter `name` is from the output, in layers: 0 for heads, 1 for the last layer, one more than
        the number of layers for embeddings."""

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Forward pass and loss of one micro-batch."""

    def criterion(self, output: Any, batch: Batch, of_tokens: Callable[[Tensor, Tensor], Loss] = ...) -> Loss:
        """The loss of the output of a forward pass; `of_tokens(logits, labels)` computes the token loss."""

    def balance(self, model: nn.Module, routed: Mapping[str, Tensor]) -> None:
        """Update the routers' biases after an optimiser step; `routed` is what `routing` returned, summed over all
        ranks."""

    def routing(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Statistics of the routers since the last call, by the name of each router's weight.

        float64 [experts + 3]: choices dropped, choices of each expert, sum of the entropies of the tokens' scores in
        nats, number of tokens. They are summed over ranks; only their ratios are meaningful.
        """

    def sharding(self) -> Mapping[str, str]:
        """fnmatch pattern of a module name -> 'column', 'row', 'vocab', 'sequence', 'heads' or 'expert', and of classes
        that are run as they are 'joined', 'stack', 'own' or 'latent'.

        column: weight [out, in] is split over out; row: over in; vocab: embedding or head over the
        vocabulary; sequence: a norm that may run on a slice of the sequence; heads: a norm inside a head;
        expert: a stack of experts split over its first dimension, among the ranks of the expert group; stack: the same
        among tensor-parallel ranks, which all have all tokens. joined: as column, and the outputs are joined again;
        own: what the module itself holds is split over its first dimension; latent: a layer that is whole, some of
        whose outputs the heads of all ranks read. What no pattern names is replicated.
        """

    @property
    def stacks(self) -> frozenset[str]:
        """The parameters that are stacks of experts, each of whose slices is a matrix or a vector of its own."""

    def stages(self) -> Sequence[str]:
        """Names of the modules before which a pipeline may split, in the order of the forward pass."""

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The layers of a model of this workload, or of a pipeline stage of it, in order: the units of recomputation
        and compilation."""

    @property
    def decoder_start(self) -> int | None:
        """The token with which the decoder of an encoder-decoder begins; None if the vocabulary has none for it."""

    @property
    def generation(self) -> Generation:
        """How its text goes on, and with which tokens besides the vocabulary's eos it ends."""

    def generate(
        self,
        model: nn.Module,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        sampling: Sampling,
        ended: Ended | None = None,
    ) -> list[list[int]]:
        """What a model of this workload says after each prompt of token ids, by the settings of its `generation`: at
        most `max_tokens` ids, a token that ends a text the last where it comes before, and none after those that have
        `ended`. Raises WorkloadError if it cannot; see `workloads.model.generate`."""

    def check_hf(self) -> None:
        """Raise WorkloadError if `to_hf` could not write this model, whatever its weights."""

    def to_hf(self, read: Callable[[str], Tensor], folder: str) -> None:
        """Write config.json and model.safetensors that transformers loads. `read(name)` returns a tensor."""
