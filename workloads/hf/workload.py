"""A class of transformers that has no table here, run as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from workloads.errors import WorkloadError
from workloads.hf.hf_class import HuggingFaceModel, auto_class, blocks_of, build, training_config
from workloads.hf.hf_config import read_hf_config, root
from workloads.hf.network import HuggingFaceNetwork
from workloads.hf.weights import has_weights
from workloads.model import losses
from workloads.model.transformer import Output
from workloads.workload import Batch, Loss, Objective, Vocabulary

NETWORK = "network."


@dataclass(frozen=True)
class HuggingFaceWorkload:
    """`hf:<folder>` of any class of transformers. It cannot be cut: data parallelism and ZeRO only.

    Its first weights are those of the folder, or, where that holds a configuration only, those of the class's
    own initialisation under torch.manual_seed(seed); that one runs through the whole model in order, so
    unlike elsewhere a tensor's value depends on the model as well as on (seed, name). dropout is the rate of its
    dropout modules, see `foreign_dropout`.
    """

    name: str
    config: HuggingFaceModel
    objective: Objective
    vocabulary: Vocabulary
    dropout: float = 0.0

    def build(self) -> nn.Module:
        """The module on the current default device."""
        return self.around(build(self.config))

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
        result = of_tokens(output.logits, batch["labels"])
        if output.extra is None:
            return result
        return replace(
            result, extra=output.extra, metrics={**result.metrics, "router_loss": output.extra.detach()}
        )

    def balance(self, model: nn.Module, routed: Mapping[str, Tensor]) -> None:
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

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """See Workload.blocks: the layers that the class itself can checkpoint."""
        return blocks_of(model)

    def check_hf(self) -> None:
        """Their own class writes it."""

    def to_hf(self, read: Callable[[str], Tensor], folder: str) -> None:
        """Write config.json and the weights (fp32) as the class itself saves them."""
        theirs = self._exported()
        with torch.device("meta"):
            model = self.around(auto_class(self.config).from_config(theirs, dtype=torch.float32))
        model.to_empty(device="cpu")
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if name in self.shapes:
                    tensor.copy_(read(name))
        model.network.save_pretrained(folder)  # type: ignore[operator]

    def _exported(self) -> Any:
        """Their configuration as the folder has it, with the token that a decoder was trained to begin with."""
        theirs = read_hf_config(self.config.folder, dict(self.config.changes))
        start = getattr(self.objective, "decoder_start", None)
        if self.config.architecture == "encoder-decoder" and start is not None:
            theirs.decoder_start_token_id = start
        return theirs

    def around(self, bare: nn.Module) -> HuggingFaceNetwork:
        """A bare model of transformers as this workload runs it."""
        return HuggingFaceNetwork(bare, self._tables, self.config.architecture == "decoder", self.dropout)

    @cached_property
    def _tables(self) -> Mapping[str, Tensor]:
        """Tables that are no part of the state, as a real build computes them."""
        model = _initialised(self.config, 0)
        kept = model.state_dict().keys()
        return {name: buffer.clone() for name, buffer in model.named_buffers() if name not in kept}


@lru_cache(maxsize=1)
def _initialised(config: HuggingFaceModel, seed: int) -> nn.Module:
    """The model with its first weights, on CPU. The last one is kept, since it is read tensor by tensor."""
    folder = root(config.folder)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        if not has_weights(str(folder)):
            return build(config)
        try:
            model, found = auto_class(config).from_pretrained(
                folder, config=training_config(config), dtype=torch.float32, local_files_only=True,
                trust_remote_code=False, use_safetensors=True, output_loading_info=True,
            )  # fmt: skip
        except (RuntimeError, ValueError, OSError) as error:
            why = " ".join(str(error).split())[:200]
            raise WorkloadError(f"the checkpoint in {folder} does not fit: {why}") from error
    if missing := sorted(found["missing_keys"]):
        named = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        raise WorkloadError(
            f"the checkpoint in {folder} does not fit: it lacks {named}; "
            "remove the changes of the model or give another checkpoint"
        )
    return model
