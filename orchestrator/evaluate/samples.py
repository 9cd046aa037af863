"""Samples to read: how a commit's model continues the prompts of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from orchestrator.resolve.prompts import framed, speaking, spoken
from workloads.workload import Sampling

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from torch import Tensor

    from orchestrator.resolve.chat import Chat
    from workloads.model.scheme import Scheme
    from workloads.workload import Workload


def continue_prompts(
    workload: Workload,
    read: Callable[[str], Tensor],
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    max_tokens: int,
    sampling: Sampling | None = None,
    device: torch.device | None = None,
    chat: Chat | None = None,
    scheme: Scheme | None = None,
) -> list[str]:
    """Return the model's text after each prompt: at most `max_tokens` tokens, without the prompt.

    A decoder continues the prompt; an encoder-decoder reads it, and its decoder answers. With `chat`, each prompt is
    a user's message, and the text ends with the answer. Otherwise the objective's special tokens surround the prompt;
    nothing in it is masked, so T5 fills in `<extra_id_0>`. With a temperature in `sampling`, the same seed gives the
    same text for the same weights. With a `scheme`, linear layers are fake-quantised. `read(name)` returns a tensor of
    the model, from a commit's reader or an engine. Raises WorkloadError, see `workloads.model.generate`.
    """
    from workloads.inference import with_weights

    rows = [framed(workload, tokenizer, prompt, chat) for prompt in prompts]
    if not rows:
        return []
    model = with_weights(workload, read, device, scheme)
    answers = speaking(workload, chat).generate(model, rows, max_tokens, sampling or Sampling())
    return [spoken(tokenizer, row, chat) for row in answers]
