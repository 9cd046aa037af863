"""The sizes of a model. Standard library only, like `layout`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Bias = Literal["", "distance", "disentangled", "relative_keys"]


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model on which layouts, memory and time depend.

    Attributes:
        stages: maximum number of pipeline stages that have layers; 0 for as many as layers.
        bare_ends: whether the first and the last stage of a pipeline may have no layer, only the embedding or the head.
        embedding: width of a token's embedding; 0 for hidden.
        head_dim: width of an attention head; 0 for hidden / heads.
        gated: whether a feed-forward block has two up-projections.
        causal: whether a token attends only to earlier tokens.
        tied: whether embedding and output projection share a weight.
        capped: whether attention scores are capped, which no fused kernel supports.
        biased: what positions add to attention scores: nothing, T5's bias by distance, the two products of disentangled
            attention, or the product of relative keys.
        distances: number of distances in the products of disentangled attention.
        score_share: attention scores of a mean layer, as a share of those of all pairs of tokens.
        capped_logits: whether logits are capped.
        normed, normed_heads: per token, elements that a layer normalises beyond the norms of its two blocks: in the
            residual stream, and in queries and keys.
        expert_feedforward: columns of one expert.
        generator: width of ELECTRA's generator as a share of the discriminator's; 0 for other models. generator_heads,
            generator_feedforward: its attention heads, and the columns of its feed-forward block.
        experts_per_token, shared_experts: experts to which a token is routed, and experts that all tokens use.
        expert_layers: number of layers with experts.
        no_model_split: why neither tensors nor layers can be divided between ranks; empty if they can.
        heads_split: whether tensor parallelism splits the attention heads.
        no_tensor_split, no_pipeline_split: why tensors, or layers, cannot be divided; empty if they can.
        no_context_split, no_sequence_split: why the sequence cannot be split over context-parallel or tensor-parallel
            ranks; empty if it can.
        no_recompute: why layers cannot be recomputed; empty if they can.
        uneven_vocabulary: whether the vocabulary may be split into unequal parts.
        expert_share: share of the parameters that belong to experts.
        head_share: share of a sequence's tokens whose logits over the vocabulary are computed.
        trained_share: share of the parameters that are trained.
        quantised_share: share of the parameters that are stored in 4 bits.
        relation_heads: heads into which relations within attention are divided for a teacher; 0 without.
        teacher: the sizes of the model that a distilled student learns from; None without one.
        teacher_runs: whether the teacher runs in every step.
        teacher_sharded: whether the data-parallel ranks divide the teacher's weights under any ZeRO stage.
        quantised_group: weights of a row that share a scale in training; 0 for a whole row, or without quantisation.
        chunked_head: whether the loss is computed in chunks of tokens, so that the logits never exist all at once.
        row_tokens: pairs (rows of a micro-batch, ascending; mean tokens of a row, which is cut to the longest sample of
            its micro-batch); empty if the lengths of the samples are unknown.
        embedded: parameters of the embeddings where `table` does not tell; None where it does.
        even_shares: why all data-parallel ranks must compute equally many samples; empty if they need not.
    """

    parameters: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    feedforward: int
    vocabulary: int
    sequence_length: int
    experts: int = 0
    flops_per_token: float = 0.0
    stages: int = 0
    bare_ends: bool = True
    expert_feedforward: int = 0
    no_model_split: str = ""
    no_tensor_split: str = ""
    no_pipeline_split: str = ""
    heads_split: bool = True
    no_context_split: str = ""
    no_sequence_split: str = ""
    no_recompute: str = ""
    uneven_vocabulary: bool = True
    expert_share: float = 0.0
    head_share: float = 1.0
    trained_share: float = 1.0
    quantised_share: float = 0.0
    quantised_group: int = 0
    chunked_head: bool = True
    even_shares: str = ""
    embedding: int = 0
    embedded: int | None = None
    head_dim: int = 0
    gated: bool = False
    causal: bool = True
    tied: bool = False
    capped: bool = False
    biased: Bias = ""
    distances: int = 0
    score_share: float = 1.0
    capped_logits: bool = False
    generator: float = 0.0
    generator_heads: int = 0
    generator_feedforward: int = 0
    normed: int = 0
    normed_heads: int = 0
    experts_per_token: int = 0
    shared_experts: int = 0
    expert_layers: int = 0
    relation_heads: int = 0
    teacher: ModelShape | None = None
    teacher_runs: bool = True
    teacher_sharded: bool = False
    row_tokens: tuple[tuple[int, float], ...] = ()

    @property
    def running_teacher(self) -> ModelShape | None:
        """The teacher that the ranks hold and run in every step; None without one."""
        return self.teacher if self.teacher_runs else None

    @property
    def table(self) -> int:
        """Number of elements of the embedding table."""
        return self.vocabulary * (self.embedding or self.hidden)

    @property
    def head_size(self) -> int:
        """Width of an attention head."""
        return self.head_dim or max(self.hidden // self.heads, 1)
