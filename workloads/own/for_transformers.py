"""Classes with which transformers loads an own model (`trust_remote_code=True`).

`checkpoint export --form hf` copies this file into the folder of the model, beside the model's own code, so it imports
nothing of the project that trained the model.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

Network: Any = None  # the export writes the import of the model's class here


class OwnConfig(PreTrainedConfig):
    """The arguments of the model's constructor, and the size of its vocabulary."""

    model_type = "own"

    def __init__(self, options: dict[str, Any] | None = None, vocab_size: int = 1, **more: Any) -> None:
        self.options = options or {}
        self.vocab_size = vocab_size
        super().__init__(**more)


class OwnModel(PreTrainedModel):
    """The model as `network`. It is called as its own `forward` is; `network.loss(batch)` is its loss."""

    config_class = OwnConfig
    base_model_prefix = ""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        options = dict(config.options)
        if "vocabulary_size" in inspect.signature(Network).parameters:
            options.setdefault("vocabulary_size", config.vocab_size)
        self.network: nn.Module = Network(**options)
        for module in self.network.modules():  # the file has every buffer
            module._non_persistent_buffers_set.clear()
        self._tied_weights_keys = _tied(self)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Keep the weights that the constructor made."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the network."""
        return self.network(*inputs, **named)


class OwnForCausalLM(OwnModel, GenerationMixin):
    """A model with `logits(batch)`, as a language model."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **more: Any,
    ) -> CausalLMOutput:
        """Run the network.

        A row with padding is computed alone, without its padding, because the network knows no padding. Logits of
        padding are 0.

        Args:
            input_ids: int64 [B, L].
            attention_mask: [B, L], 0 at padding; None without padding.
            labels: int64 [B, L], for the mean loss of the next tokens.

        Returns:
            The logits, [B, L, vocabulary], and the loss if there are labels.
        """
        if attention_mask is None or attention_mask.all():
            logits = self._logits(input_ids)
        else:
            real = attention_mask.bool()
            rows = [self._logits(row[kept][None])[0] for row, kept in zip(input_ids, real, strict=True)]
            empty = rows[0].new_zeros(*input_ids.shape, rows[0].shape[-1])
            logits = empty.masked_scatter(real[..., None], torch.cat(rows))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1])
        return CausalLMOutput(loss=loss, logits=logits)

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **more: Any
    ) -> dict[str, Any]:
        """Return all tokens for each further one: the network has no cache."""
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def _logits(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        batch = {"tokens": tokens, "positions": positions, "segments": torch.zeros_like(tokens)}
        logits: Tensor = self.network.logits(batch)  # type: ignore[operator]
        return logits


def _tied(model: nn.Module) -> dict[str, str]:
    """Return the further names of each shared parameter, with the name that the file has."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
    return tied


if TYPE_CHECKING:
    ...  # the export writes the imports of further files here, which transformers then copies
