"""Prompts as a user's turns, by the chat template that wrote the conversations which a model learns from."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from orchestrator.config.errors import InputError
from orchestrator.config.records import PREFERENCES
from orchestrator.data.prepare.conversations import PROBE, Template
from orchestrator.resolve.prepared_data import EARLIER, kind_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from orchestrator.config.spec import JobSpec
    from orchestrator.data.store.tokens import Tokens

TALKING = ("conversation", *PREFERENCES)
"""Objectives that learn from conversations, or may."""
LOOKED_AT = 4096
"""Tokens of the data in which a turn is looked for."""
WHERE = "data.chat_template"


class Chat:
    """Writes prompts as turns, and knows with which token an answer ends."""

    def __init__(self, template: str, tokens: Mapping[str, str], tokenizer: Tokenizer) -> None:
        """`tokens` are the special tokens that the template may name."""
        self._template = Template(template, tokens)
        self._tokenizer = tokenizer

    def row(self, prompt: str) -> list[int]:
        """The tokens of a user's turn and of what comes before the answer. Raises InputError if the template fails."""
        ids: list[int] = self._tokenizer.encode(self._written(prompt), add_special_tokens=False).ids
        return ids

    @cached_property
    def ends(self) -> frozenset[int]:
        """The first of the tokens behind an answer that is no text, if there is one."""
        try:
            ids = self._tokenizer.encode(self._template.closing(), add_special_tokens=False).ids
        except ValueError:  # of a template that takes no such conversation
            return frozenset()
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset([number for number in ids if number in added][:1])

    @property
    def teaches_to_stop(self) -> bool:
        """Whether a token that is no text closes an answer and is learnt with it; also where that cannot be told."""
        try:
            tail = self._template.predicted_closing()
        except ValueError:  # of a template that takes no such conversation
            return True
        added = self._tokenizer.get_added_tokens_decoder()
        return any(number in added for number in self._tokenizer.encode(tail, add_special_tokens=False).ids)

    def wrote(self, text: str) -> bool:
        """Whether `text` has a user's turn as the template writes it, but for spaces."""
        before = self._written(PROBE).partition(PROBE)[0].strip()
        opening = before.splitlines()[-1] if before else ""
        return bool(opening) and "".join(opening.split()) in "".join(text.split())

    def _written(self, prompt: str) -> str:
        try:
            return self._template.prompt(prompt)
        except ValueError as error:
            raise InputError(str(error), WHERE, "mend the template") from None


def unclosed(chat: Chat | None) -> list[str]:
    """What a user should know of a chat template that closes no answer."""
    if chat is None or chat.teaches_to_stop:
        return []
    line = "the chat template closes no answer with a token that is learnt, so that the model does not learn to stop"
    return [f"{line}; write {{{{ eos_token }}}} behind an answer, in a template that {WHERE} names"]


def chat_of(spec: JobSpec, tokens: Tokens) -> Chat | None:
    """How the prompts of a job are written as turns; None for a model that learns from texts. Raises InputError if the
    chat template is gone, of data that an earlier version has prepared."""
    if spec.workload.objective not in TALKING:
        return None
    kept = tokens.manifest.chat
    kind = (
        None if kept else kind_of(spec, min(tokens.manifest.format, EARLIER))
    )  # what is written so is not prepared anew
    found = kept or ({"template": kind.template, "tokens": dict(kind.tokens)} if kind else {})
    if not found.get("template"):
        return None
    chat = Chat(found["template"], found["tokens"], tokens.tokenizer())
    # the rows of preferences may be texts, beside a tokenizer with a template
    return chat if spec.workload.objective == "conversation" or chat.wrote(_beginning(tokens)) else None


def _beginning(tokens: Tokens) -> str:
    """The first tokens of the largest source as text."""
    import numpy as np

    from workloads.objectives.records import MARK

    source = max(range(tokens.sources), key=tokens.length)
    words = tokens.window(source, 0, min(LOOKED_AT, tokens.length(source))).astype(np.int64) & ~MARK
    ids = words[words < tokens.manifest.vocabulary].tolist()
    return str(tokens.tokenizer().decode(ids, skip_special_tokens=False))
