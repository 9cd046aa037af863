"""Answers after prompts as marked tokens: texts, or messages that a chat template writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from orchestrator.data.preprocessing.conversations import Template
from workloads.objectives.records import MARK


def marked(
    text: str, answers: Sequence[tuple[int, int]], encoder: Tokenizer, special: bool = True
) -> np.ndarray:
    """The tokens of a text, uint32, with MARK on those within the answers at these characters. The names of special
    tokens are read as such if they are `special`, as in what a chat template writes."""
    encoder.encode_special_tokens = not special
    found: Encoding = encoder.encode(text, add_special_tokens=False)
    ids = np.array(found.ids, dtype=np.int64)
    starts, stops = (np.array([pair[side] for pair in found.offsets], dtype=np.int64) for side in (0, 1))
    predicted = np.zeros(len(ids), dtype=bool)
    for begin, end in answers:
        predicted |= (starts >= begin) & (starts < end) & (stops <= end) & (stops > starts)
    return (ids | np.where(predicted, MARK, 0)).astype(np.uint32)


def unmarked(words: np.ndarray) -> np.ndarray:
    """The token ids of marked tokens, int64."""
    return np.asarray(words, dtype=np.int64) & ~MARK


def paired(
    values: Mapping[str, Any], encoder: Tokenizer, template: Template | None, eos: int
) -> tuple[np.ndarray, np.ndarray]:
    """Both answers of a row, each after the prompt, as marked tokens. Raises ValueError in one line."""
    chosen, rejected, prompt = values["chosen"], values["rejected"], values.get("prompt")
    if chosen == rejected:
        raise ValueError("its chosen and its rejected answer are equal")
    if prompt is None:
        prompt, chosen, rejected = _without_prompt(chosen, rejected)
    return (
        answered(prompt, chosen, "chosen", encoder, template, eos),
        answered(prompt, rejected, "rejected", encoder, template, eos),
    )


def answered(
    prompt: Any, answer: Any, name: str, encoder: Tokenizer, template: Template | None, eos: int
) -> np.ndarray:
    """A prompt and the answer to it as marked tokens, of which only the answer is predicted.

    Both are texts, which the end of a document follows; or the prompt is a list of messages, and the answer one more or
    the text of one. `name` is that of the answer's column. Raises ValueError in one line.
    """
    if isinstance(prompt, str):
        if not isinstance(answer, str):
            raise ValueError(
                f"its prompt is a text, and its {name} is none; give both as texts or as messages"
            )
        _check_text(prompt, "prompt")
        _check_text(answer, name)
        found = marked(prompt + answer, [(len(prompt), len(prompt) + len(answer))], encoder, special=False)
        found = np.append(found, np.uint32(eos | MARK))
    elif isinstance(prompt, list):
        found = _spoken(prompt, _messages(answer, name), encoder, template)
    else:
        raise ValueError(f"its prompt is {type(prompt).__name__}, not a text or a list of messages")
    if not (found[1:] & MARK).any():
        raise ValueError(f"its {name} is empty")
    return found


def _spoken(prompt: list[Any], said: list[Any], encoder: Tokenizer, template: Template | None) -> np.ndarray:
    if template is None:
        raise ValueError(
            "it holds messages, and the tokenizer has no chat template; name one in data.chat_template"
        )
    text, answers = template.render([*prompt, *said])
    count = sum(message["role"] == "assistant" for message in said)
    if not count:
        raise ValueError("it has no answer of the assistant")
    return marked(text, answers[-count:], encoder)


def _messages(answer: Any, name: str) -> list[Any]:
    if isinstance(answer, str):
        return [{"role": "assistant", "content": answer}]
    if not isinstance(answer, list):
        raise ValueError(f"its {name} is {type(answer).__name__}, not a text or a list of messages")
    return answer


def _without_prompt(chosen: Any, rejected: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Two conversations that begin alike as the prompt, which that is, and what follows in each."""
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        raise ValueError("it has no prompt, and its answers are no conversations that begin with one")
    alike = 0
    while alike < min(len(chosen), len(rejected)) and chosen[alike] == rejected[alike]:
        alike += 1
    if not alike:
        raise ValueError("it has no prompt, and its chosen and rejected conversations do not begin alike")
    return chosen[:alike], chosen[alike:], rejected[alike:]


def _check_text(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"has half a surrogate pair in its {name}") from None
