"""Samples to read: how the model of a commit continues the prompts of a job."""

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
) -> list[str]:
    """What the model says after each prompt: the text of at most `max_tokens` tokens, without the prompt.

    `read(name)` returns a tensor of the model, as a commit's reader or an engine gives it. A decoder continues the
    prompt; an encoder-decoder reads it, and its decoder speaks. With `chat` each prompt is a user's turn, and what is
    said ends with the answer. Else around the prompt are the tokens that the objective puts around a text; nothing of
    its own is hidden in it, so that `<extra_id_0>` in a prompt of T5's is filled in. With a temperature in `sampling`
    the same seed says the same for the same weights. Raises WorkloadError, see `workloads.model.generate`.
    """
    from workloads.load import with_weights

    rows = [framed(workload, tokenizer, prompt, chat) for prompt in prompts]
    if not rows:
        return []
    model = with_weights(workload, read, device)
    said = speaking(workload, chat).generate(model, rows, max_tokens, sampling or Sampling())
    return [spoken(tokenizer, row, chat) for row in said]
