"""A loaded model that answers: prompts as token ids in, text out as it is generated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from orchestrator.config.errors import InputError
from orchestrator.resolve.chat import Chat
from orchestrator.resolve.prompts import framed, speaking
from orchestrator.resolve.resolved_job import wrong_input
from workloads.workload import Ended, Sampling

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

    from workloads.model.scheme import Scheme
    from workloads.workload import Workload

UNFINISHED = "�"
"""The character that a tokenizer returns for incomplete UTF-8."""

Generate = Callable[[Sequence[Sequence[int]], int, Sampling, Ended | None], list[list[int]]]
"""Like `Workload.generate` with a model."""


@dataclass(frozen=True)
class GeneratedAnswer:
    """An answer.

    Attributes:
        text: the answer, without the token that ended it and without a stop string.
        finish: stop, if the model or a stop string ended it; length, if there was no more room.
        prompt_tokens: tokens that were read.
        tokens: tokens that were generated.
    """

    text: str
    finish: Literal["stop", "length"]
    prompt_tokens: int
    tokens: int


@dataclass(frozen=True)
class Speaker:
    """A model in memory.

    Attributes:
        name: the run or the folder.
        generate: continues rows of token ids.
        tokenizer: its tokenizer.
        chat: writes conversations; None for a model that learnt from texts.
        frame: returns the token ids of a bare text, open at its end.
        ends: tokens that end a text.
    """

    name: str
    generate: Generate
    tokenizer: Tokenizer
    chat: Chat | None
    frame: Callable[[str], list[int]]
    ends: frozenset[int]

    def conversation(self, messages: list[Mapping[str, Any]]) -> list[int]:
        """Return the token ids of messages, up to where the answer begins. Raises InputError without a template."""
        if self.chat is None:
            hint = "`orchestrator generate` and /v1/completions continue text"
            raise InputError("learnt from texts and has no chat template", self.name, hint)
        return self.chat.conversation([dict(message) for message in messages])

    def say(
        self,
        row: Sequence[int],
        max_tokens: int,
        sampling: Sampling,
        on_piece: Callable[[str], object] = lambda _: None,
        stop: Sequence[str] = (),
    ) -> GeneratedAnswer:
        """Continue token ids by at most `max_tokens` tokens.

        Args:
            row: the prompt.
            max_tokens: generate no more tokens than this.
            sampling: how tokens are chosen.
            on_piece: gets each further piece of the text as soon as it cannot change. What it raises ends the text.
            stop: strings that end the text. They are not part of it.

        Raises InputError if the model cannot continue the prompt.
        """
        pieces = _Pieces(self.tokenizer, on_piece, stop)
        with wrong_input(self.name):
            (ids,) = self.generate([row], max_tokens, sampling, pieces.more)
        ended = bool(ids) and ids[-1] in self.ends
        text, stopped = pieces.last(ids[:-1] if ended else ids)
        return GeneratedAnswer(text, "stop" if ended or stopped else "length", len(row), len(ids))


class _Pieces:
    """Passes generated text to a callback while it grows, without characters that may still change."""

    def __init__(self, tokenizer: Tokenizer, on_piece: Callable[[str], object], stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._on_piece = on_piece
        self._stop = [each for each in stop if each]
        # A stop string may have begun in so many of the last characters.
        self._back = max(map(len, self._stop), default=1) - 1
        self._handed = 0

    def more(self, ids: Sequence[int]) -> bool:
        """Pass on the text that later tokens cannot change. Return whether it contains a stop string."""
        text = self._text(ids)
        if self._cut(text) is not None:
            return True
        self._hand(text.rstrip(UNFINISHED)[: max(0, len(text) - self._back)])
        return False

    def last(self, ids: Sequence[int]) -> tuple[str, bool]:
        """Pass on the rest of the text. Return the whole text, and whether a stop string ended it."""
        text = self._text(ids)
        at = self._cut(text)
        text_before_stop = text if at is None else text[:at]
        self._hand(text_before_stop)
        return text_before_stop, at is not None

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _cut(self, text: str) -> int | None:
        stop_positions = [at for each in self._stop if (at := text.find(each)) >= 0]
        return min(stop_positions, default=None)

    def _hand(self, certain: str) -> None:
        if len(certain) > self._handed:
            piece = certain[self._handed :]
            self._handed = len(certain)
            self._on_piece(piece)


def speaker_of(
    name: str,
    workload: Workload,
    read: Callable[[str], Tensor],
    tokenizer: Tokenizer,
    chat: Chat | None,
    scheme: Scheme | None = None,
) -> Speaker:
    """Return a workload's model with its weights, on a GPU if there is one.

    Args:
        name: the run or the folder, for messages.
        workload: the model.
        read: returns a tensor of the model by its name.
        tokenizer: its tokenizer.
        chat: how conversations are written; None for a model that learnt from texts.
        scheme: how its linear layers are quantised.

    Raises InputError if the model generates no text, before its weights are read.
    """
    import torch

    from workloads.inference import with_weights
    from workloads.model.generate import check_generates

    ours = workload.config.as_transformer
    if ours is not None:  # other classes answer when they are asked to generate
        with wrong_input(name):
            check_generates(ours)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = with_weights(workload, read, device, scheme)
    spoken = speaking(workload, chat)

    def generate(
        rows: Sequence[Sequence[int]], max_tokens: int, sampling: Sampling, ended: Ended | None
    ) -> list[list[int]]:
        result: list[list[int]] = spoken.generate(model, rows, max_tokens, sampling, ended)
        return result

    ends = frozenset({*spoken.generation.ends, workload.vocabulary.eos})
    return Speaker(
        name,
        generate,
        tokenizer,
        chat=chat,
        frame=lambda text: framed(workload, tokenizer, text),
        ends=ends,
    )


def speaker_of_export(folder: str) -> Speaker:
    """Return the model in a folder in the Hugging Face format. Raises InputError."""
    from orchestrator.evaluate.of_export import (
        chat_of_export,
        spec_of_export,
        tokenizer_of_export,
        workload_of_export,
    )

    spec, _ = spec_of_export(folder, {})
    workload, tokenizer = workload_of_export(spec), tokenizer_of_export(spec.data, spec.workload)
    chat = chat_of_export(spec.data, spec.workload, tokenizer)
    scheme = spec.quantize.scheme if spec.quantize else None
    return speaker_of(
        folder, workload, lambda name: workload.initial(name, spec.seed), tokenizer, chat, scheme=scheme
    )
