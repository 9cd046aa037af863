"""Generation by an unchanged transformers class, with its own `generate` and our choice of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from workloads.errors import WorkloadError
from workloads.hf.as_they_are.hf_class import HuggingFaceModel
from workloads.model.generate import choose, evaluating
from workloads.model.processors import Change, change_of
from workloads.workload import Ended, Generation, Sampling


class _Chosen:
    """A logits processor that keeps one token: the one that `choose` chooses."""

    def __init__(self, sampling: Sampling, prompt: int, change: Change | None) -> None:
        self._sampling = sampling
        self._prompt = prompt
        self._change = change
        self._place = 0

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """See transformers. Scores [1, vocabulary]."""
        changed = ([self._change], input_ids.tolist())
        token = choose(scores, self._sampling, [self._place], self._prompt, changed)
        self._place += 1
        return torch.full_like(scores, -torch.inf).index_fill_(1, token, 0.0)


class _Stopped:
    """A stopping criterion: the only text has ended."""

    def __init__(self, ended: Ended, before: int) -> None:
        self._ended = ended
        self._before = before

    def __call__(self, input_ids: Any, scores: Any, **more: Any) -> Any:
        """See transformers. Return whether each row has ended, bool [1]."""
        return torch.tensor([self._ended(input_ids[0, self._before :].tolist())], device=input_ids.device)


@torch.inference_mode()
def generate(
    network: Any,
    config: HuggingFaceModel,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    generation: Generation,
    start: int | None,
    sampling: Sampling,
    ended: Ended | None = None,
) -> list[list[int]]:
    """Like `workloads.model.generate.generate`. Prompts are processed one by one, because not every class supports
    padding.
    """
    if not network.can_generate():
        raise WorkloadError(f"the class of {config.folder} generates no text; use one with a language head")
    pair = config.architecture == "encoder-decoder"
    with evaluating(network):
        texts = []
        for number, prompt in enumerate(prompts):
            room = min(max_tokens, config.max_positions - (0 if pair else len(prompt)))
            if not prompt or room < 1:
                raise WorkloadError(
                    f"prompt {number} has {len(prompt)} tokens, but the model {config.max_positions} positions; "
                    "give one token at least, and leave room for one"
                )
            begin = start if pair else None
            change = change_of(generation, prompt, begin, room, network.device)
            chosen = _Chosen(sampling, number, change)
            texts.append(
                _said(
                    network, prompt, room=room, ends=generation.ends, start=begin, chosen=chosen, ended=ended
                )
            )
    return texts


def _said(
    network: Any,
    prompt: Sequence[int],
    room: int,
    ends: Sequence[int],
    start: int | None,
    chosen: _Chosen,
    ended: Ended | None,
) -> list[int]:
    from transformers import (  # takes a second and is not needed by ranks
        GenerationConfig,
        LogitsProcessorList,
        StoppingCriteriaList,
    )

    tokens: Tensor = torch.tensor([list(prompt)], device=network.device)
    before = len(prompt) if start is None else 1
    settings = GenerationConfig(
        max_new_tokens=room, do_sample=False, num_beams=1, eos_token_id=list(ends), pad_token_id=ends[0],
        use_cache=True, decoder_start_token_id=start,
    )  # fmt: skip
    network.generation_config = settings  # otherwise the class's defaults would be added
    made = network.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        generation_config=settings,
        logits_processor=LogitsProcessorList([chosen]),
        stopping_criteria=StoppingCriteriaList([] if ended is None else [_Stopped(ended, before)]),
    )
    return [int(token) for token in made[0, before:]]
