"""A class of transformers that has no table here, run as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from workloads import losses
from workloads.errors import WorkloadError
from workloads.hf.folder import ForeignModel, root, theirs_in
from workloads.hf.weights import has_weights, write
from workloads.transformer import Output
from workloads.workload import Batch, Loss, Objective, Vocabulary

ARGUMENTS = {"tokens": "input_ids", "padding": "attention_mask", "token_types": "token_type_ids",
             "positions": "position_ids", "decoder_tokens": "decoder_input_ids"}  # fmt: skip
NETWORK = "network."


class ForeignNetwork(nn.Module):
    """A model of transformers that takes a batch of ours and gives an output of ours.

    Its tensors have the prefix `network.`. What moving a model to another device would break is mended there:
    tied weights are tied again, and tables that are no part of the state (rotary frequencies) are put back.
    """

    def __init__(self, network: nn.Module, tables: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.network = network
        self._tables = tables

    def forward(self, batch: Batch) -> Output:
        """Logits [B, L, vocabulary] for the batch."""
        arguments = {theirs: batch[ours] for ours, theirs in ARGUMENTS.items() if ours in batch}
        if "attention" in batch:
            arguments["attention_mask"] = batch["attention"].unsqueeze(1)
        elif "padding" in batch:
            arguments["attention_mask"] = batch["padding"].long()
        logits = self.network(**arguments, use_cache=False).logits
        return Output(logits, logits=logits)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ForeignNetwork:
        super()._apply(fn, recurse)
        self.network.tie_weights()  # type: ignore[operator]
        for name, buffer in self.network.named_buffers():
            if name in self._tables and not buffer.is_meta:
                buffer.copy_(self._tables[name])
        return self


@dataclass(frozen=True)
class HuggingFaceWorkload:
    """`hf:<folder>` of any class of transformers. It cannot be cut: data parallelism and ZeRO only.

    Its first weights are those of the folder, or, where that holds a configuration only, those of the class's
    own initialisation under torch.manual_seed(seed); that one runs through the whole model in order, so
    unlike elsewhere a tensor's value depends on the model as well as on (seed, name).
    """

    name: str
    config: ForeignModel
    objective: Objective
    vocabulary: Vocabulary

    def build(self) -> nn.Module:
        """The module on the current default device."""
        return ForeignNetwork(network(self.config), self._tables)

    @cached_property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Shape of every canonical tensor; a tied weight has the name under which it comes first."""
        with torch.device("meta"):
            model = self.build()
        kept = model.state_dict().keys()
        named = [*model.named_parameters(), *model.named_buffers()]
        return {name: tensor.shape for name, tensor in named if name in kept}

    def initial(self, name: str, seed: int) -> Tensor:
        """The initial value of `name`, fp32 on CPU. Raises WorkloadError if the model has no such tensor."""
        if name not in self.shapes:
            raise WorkloadError(
                f"{self.name} has no tensor {name!r}; its names are those of named_parameters()"
            )
        return _initialised(self.config, seed).state_dict()[name.removeprefix(NETWORK)].float()

    def lr_scale(self, name: str) -> float:
        """Nothing is scaled here."""
        return 1.0

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Forward pass and loss of one micro-batch."""
        return self.criterion(model(batch), batch)

    def criterion(
        self, output: Output, batch: Batch, of_tokens: losses.TokenLoss = losses.token_loss
    ) -> Loss:
        """The loss of a forward pass that was already done."""
        assert output.logits is not None
        return of_tokens(output.logits, batch["labels"])

    def balance(self, model: nn.Module, reduce: Callable[[Tensor], Tensor] = lambda load: load) -> None:
        """Nothing is balanced here."""

    def routing(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Nothing is known of its routers."""
        return {}

    def sharding(self) -> Mapping[str, str]:
        """Nothing is cut."""
        return {}

    def stages(self) -> Sequence[str]:
        """No pipeline."""
        return ()

    def flops(self, sequence_length: int) -> float:
        """6 N per token; see ForeignModel."""
        return self.config.flops(sequence_length)

    def to_hf(self, read: Callable[[str], Tensor], folder: str) -> None:
        """Write config.json and model.safetensors (fp32)."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        write(((n.removeprefix(NETWORK), read(n).detach().float()) for n in self.shapes), folder)
        theirs = theirs_in(self.config.folder, dict(self.config.changes))
        theirs.architectures, theirs.dtype = [type(network(self.config, meta=True)).__name__], torch.float32
        theirs.save_pretrained(folder)

    @cached_property
    def _tables(self) -> Mapping[str, Tensor]:
        """Tables that are no part of the state, as a real build computes them."""
        model = _initialised(self.config, 0)
        kept = model.state_dict().keys()
        return {name: buffer.clone() for name, buffer in model.named_buffers() if name not in kept}


def network(config: ForeignModel, meta: bool = False) -> nn.Module:
    """The bare model of transformers, fp32, on the current default device or without memory."""
    if meta:
        with torch.device("meta"):
            return network(config)
    theirs = theirs_in(config.folder, dict(config.changes))
    return _auto(config).from_config(theirs, dtype=torch.float32)


def _auto(config: ForeignModel) -> Any:
    import transformers

    return {
        "decoder": transformers.AutoModelForCausalLM,
        "encoder": transformers.AutoModelForMaskedLM,
        "encoder-decoder": transformers.AutoModelForSeq2SeqLM,
    }[config.architecture]


@lru_cache(maxsize=1)
def _initialised(config: ForeignModel, seed: int) -> nn.Module:
    """The model with its first weights, on CPU. The last one is kept, since it is read tensor by tensor."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        if not has_weights(str(root(config.folder))):
            return network(config)
        theirs = theirs_in(config.folder, dict(config.changes))
        return _auto(config).from_pretrained(
            root(config.folder), config=theirs, dtype=torch.float32, local_files_only=True
        )
