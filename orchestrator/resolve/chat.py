"""Prompts as a user's messages, written by the chat template of the training conversations."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from orchestrator.config.errors import InputError
from orchestrator.config.records import TALKING
from orchestrator.data.config import DataSpec
from orchestrator.data.prepare.chat_template import PROBE, Template
from orchestrator.data.prepare.messages import Message
from orchestrator.data.prepare.record_kind import EARLIER, kind_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from orchestrator.data.store.tokens import Tokens

LOOKED_AT = 4096
"""Number of tokens of the data in which to search for a message."""
WHERE = "data.chat_template"


class Chat:
    """Writes prompts as messages, and knows the token that ends an answer."""

    def __init__(self, template: str, tokens: Mapping[str, str], tokenizer: Tokenizer) -> None:
        """`tokens` are the special tokens that the template may use."""
        self._template = Template(template, tokens)
        self._tokenizer = tokenizer

    def row(self, prompt: str) -> list[int]:
        """Return the tokens of a user's message, up to the answer. Raises InputError if the template fails."""
        ids: list[int] = self._tokenizer.encode(self._written(prompt), add_special_tokens=False).ids
        return ids

    def conversation(self, messages: list[Message]) -> list[int]:
        """Return the tokens of messages, up to the next answer. Raises InputError if the template fails."""
        try:
            text = self._template.opening(self._template.as_read(messages), None)
        except ValueError as error:
            raise InputError(str(error), WHERE, "change the messages or the template") from None
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    @cached_property
    def ends(self) -> frozenset[int]:
        """Return the first special token after an answer, as a set; empty without one."""
        try:
            ids = self._tokenizer.encode(self._template.closing(), add_special_tokens=False).ids
        except ValueError:  # the template does not accept such a conversation
            return frozenset()
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset([number for number in ids if number in added][:1])

    @property
    def teaches_to_stop(self) -> bool:
        """Return whether the model learns a special token that ends an answer. True if this is unknown."""
        try:
            tail = self._template.predicted_closing()
        except ValueError:  # the template does not accept such a conversation
            return True
        added = self._tokenizer.get_added_tokens_decoder()
        return any(number in added for number in self._tokenizer.encode(tail, add_special_tokens=False).ids)

    def wrote(self, text: str) -> bool:
        """Return whether `text` contains a user's message as the template writes it, ignoring whitespace."""
        before = self._written(PROBE).partition(PROBE)[0].strip()
        opening = before.splitlines()[-1] if before else ""
        return bool(opening) and "".join(opening.split()) in "".join(text.split())

    def _written(self, prompt: str) -> str:
        try:
            return self._template.prompt(prompt)
        except ValueError as error:
            raise InputError(
                f"cannot write a user message ({error})", WHERE, "fix this Jinja template"
            ) from None


def unclosed(chat: Chat | None) -> list[str]:
    """Return a note for a chat template that does not end answers."""
    if chat is None or chat.teaches_to_stop:
        return []
    line = "the chat template ends no answer with a learnt token, so the model does not learn to stop"
    return [f"{line}; write {{{{ eos_token }}}} after an answer, in a template that {WHERE} names"]


def chat_of(data: DataSpec, objective: str, tokens: Tokens) -> Chat | None:
    """Return how to write a job's prompts as messages; None for a model that learns from texts.

    Raises InputError if the chat template is missing, for data of an earlier version.
    """
    if objective not in TALKING:
        return None
    stored_chat = tokens.manifest.chat
    kind = (
        None if stored_chat else kind_of(data, objective, min(tokens.manifest.format, EARLIER))
    )  # data that an earlier version wrote so is not prepared again
    kept_template = stored_chat or ({"template": kind.template, "tokens": dict(kind.tokens)} if kind else {})
    if not kept_template.get("template"):
        return None
    chat = Chat(kept_template["template"], kept_template["tokens"], tokens.tokenizer())
    # rows of preferences may be plain texts even if the tokenizer has a template
    return chat if objective == "conversation" or chat.wrote(_beginning(tokens)) else None


def _beginning(tokens: Tokens) -> str:
    """Return the first tokens of the largest source as text."""
    import numpy as np

    from workloads.record_format import MARK

    source = max(range(tokens.sources), key=tokens.length)
    words = tokens.window(source, 0, min(LOOKED_AT, tokens.length(source))).astype(np.int64) & ~MARK
    ids = words[words < tokens.manifest.vocabulary].tolist()
    return str(tokens.tokenizer().decode(ids, skip_special_tokens=False))
