"""Apply the generation settings of a pretrained folder to the next token's logits, with transformers' own code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from workloads.errors import WorkloadError
from workloads.workload import Generation

Change = Callable[[Sequence[int], Tensor], Tensor]
"""Maps the tokens that the decoder has read and the logits [vocabulary] of the next one to the changed logits."""

APPLIED: Mapping[str, Any] = {
    "sequence_bias": None, "encoder_repetition_penalty": 1.0, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None, "min_length": 0, "min_new_tokens": 0,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "exponential_decay_length_penalty": None,
    "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
"""The settings that are applied, each with its neutral value, in transformers' order."""
DRAWING: Mapping[str, Any] = {
    "do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None, "top_h": None, "typical_p": 1.0,
    "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
}  # fmt: skip
"""The settings for drawing tokens, which `Sampling` replaces."""
OTHER: Mapping[str, Any] = {
    "num_beams": 1, "num_beam_groups": 1, "penalty_alpha": None, "dola_layers": None, "constraints": None,
    "force_words_ids": None, "guidance_scale": 1, "stop_strings": None, "max_time": None, "token_healing": False,
    "watermarking_config": None, "remove_invalid_values": False, "forced_decoder_ids": None,
}  # fmt: skip
"""The settings that affect the generated text and are not applied here."""


def non_neutral(settings: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `known` settings that differ from their neutral values, in the order of `known`.

    Args:
        settings: those of a folder.
        known: each with its neutral value.
    """
    return {name: settings[name] for name in known if settings.get(name) not in (None, [], known[name])}


def not_applied(generation: Generation) -> str:
    """Return one line that names the settings of a pretrained folder that are not applied; empty without any."""
    names = [*non_neutral(generation.settings, DRAWING), *non_neutral(generation.settings, OTHER)]
    if not names:
        return ""
    return (
        f"generation_config.json says {', '.join(names)}, which are not applied: each next token is the most probable "
        "one, or drawn at the temperature that is asked for"
    )


def change_of(
    generation: Generation,
    prompt: Sequence[int],
    start: int | None,
    room: int,
    device: torch.device,
) -> Change | None:
    """Return the function that the settings apply to the logits after one prompt; None if they change nothing.

    `start` is the token with which an encoder-decoder's decoder begins; None for a decoder, which continues the prompt.
    `room` is the maximum number of tokens. Raises WorkloadError for settings that transformers rejects.

    Args:
        generation: the settings of a folder.
        prompt: token ids.
        start: the first token of a decoder that has an encoder; None for a decoder alone.
        room: maximum number of generated tokens.
        device: of the logits.
    """
    applied = non_neutral(generation.settings, APPLIED)
    if not applied:
        return None
    begun = len(prompt) if start is None else 1
    try:
        processors = _processors(
            applied, list(generation.ends), prompt=list(prompt), begun=begun, room=room, device=device
        )
    except (TypeError, ValueError) as error:
        line = " ".join(str(error).split())[:200]
        raise WorkloadError(
            f"transformers does not take the generation settings {applied}: {line}"
        ) from error

    def change(read: Sequence[int], logits: Tensor) -> Tensor:
        tokens = torch.tensor([list(read)], device=device)
        changed = logits.float().unsqueeze(0)
        for processor in processors:
            changed = processor(tokens, changed)
        return changed[0]

    return change


def _processors(
    applied: Mapping[str, Any],
    ends: list[int],
    prompt: list[int],
    begun: int,
    room: int,
    device: torch.device,
) -> list[Any]:
    """Return the processors as `GenerationMixin._get_logits_processor` makes them, for a decoder that has read `begun`
    tokens.
    """
    from transformers.generation import logits_process  # imports for seconds, and few folders need it

    theirs: Any = logits_process  # its annotations are narrower than what it accepts
    source = torch.tensor([prompt], device=device)
    last = torch.tensor(ends, device=device)
    at_first = begun + 1 if begun == 1 and "forced_bos_token_id" in applied else begun
    constructors: dict[str, Callable[[Any], Any]] = {
        "sequence_bias": theirs.SequenceBiasLogitsProcessor,
        "encoder_repetition_penalty": lambda x: theirs.EncoderRepetitionPenaltyLogitsProcessor(x, source),
        "repetition_penalty": theirs.RepetitionPenaltyLogitsProcessor,
        "no_repeat_ngram_size": theirs.NoRepeatNGramLogitsProcessor,
        "encoder_no_repeat_ngram_size": lambda x: theirs.EncoderNoRepeatNGramLogitsProcessor(x, source),
        "bad_words_ids": lambda x: theirs.NoBadWordsLogitsProcessor(x, last),
        "min_length": lambda x: theirs.MinLengthLogitsProcessor(x, last, device=device),
        "min_new_tokens": lambda x: theirs.MinNewTokensLengthLogitsProcessor(begun, x, last, device=device),
        "forced_bos_token_id": theirs.ForcedBOSTokenLogitsProcessor,
        "forced_eos_token_id": lambda x: theirs.ForcedEOSTokenLogitsProcessor(begun + room, x, device=device),
        "exponential_decay_length_penalty": lambda x: theirs.ExponentialDecayLengthPenalty(x, last, begun),
        "suppress_tokens": lambda x: theirs.SuppressTokensLogitsProcessor(x, device=device),
        "begin_suppress_tokens": lambda x: theirs.SuppressTokensAtBeginLogitsProcessor(
            x, at_first, device=device
        ),
    }
    return [constructors[name](value) for name, value in applied.items()]
