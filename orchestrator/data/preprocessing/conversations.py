"""Conversations as text, by the chat template of a tokenizer, with the places of the assistant's answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from orchestrator.data.encoding.tokenizer import named_tokens
from orchestrator.data.prepared.data_folder import DataFolder
from orchestrator.data.sources.repair import is_unicode
from orchestrator.job.errors import InputError

ROLES = ("system", "user", "assistant", "tool", "developer")
MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\s*-?%\}")


NamedTemplate = tuple[str, tuple[tuple[str, str], ...]]
"""A chat template, and the special tokens that it may name."""


def template_of(location: str, given: str | None) -> NamedTemplate:
    """The chat template in the file `given`, or else beside the tokenizer at `location`. Raises InputError if there is
    none."""
    found = find_template(location, given)
    if found is None:
        where = "data.chat_template" if given else f"data.tokenizer {location}"
        raise InputError("has no chat template", where, "name a Jinja file in data.chat_template")
    return found


def find_template(location: str, given: str | None) -> NamedTemplate | None:
    """As `template_of`; None if there is none, and none was `given`. Raises InputError for a file that is missing."""
    head, _, tail = location.rpartition("/")
    folder = DataFolder(head or ".") if tail.endswith(".json") else DataFolder(location)
    config = folder.read_json("tokenizer_config.json") or {}
    tokens = tuple(sorted((f"{role}_token", token) for role, token in named_tokens(config).items()))
    if given:
        path, _, name = given.rpartition("/")
        text = DataFolder(path or ".").read(name)
    else:
        text = folder.read("chat_template.jinja")
    if text is None and not given:
        found = config.get("chat_template")
        several = found if isinstance(found, list) else []
        found = next((each["template"] for each in several if each.get("name") == "default"), found)
        text = found.encode() if isinstance(found, str) else None
    if text is None and given:
        raise InputError("there is no such file", f"data.chat_template {given}", "give a Jinja file")
    return None if text is None else (text.decode(), tokens)


class Template:
    """A chat template in Jinja, rendered in transformers' sandbox, as `apply_chat_template` does."""

    def __init__(self, text: str, tokens: Mapping[str, str]) -> None:
        """`tokens` are the special tokens that it may name, as in bos_token."""
        self._text, self._tokens = text, dict(tokens)

    def render(self, messages: Any) -> tuple[str, list[tuple[int, int]]]:
        """The conversation as text, and where in it the answers stand: what the template marks as generated or, where
        it marks nothing, what each message of the assistant adds behind the prompt for one.

        Raises ValueError in one line.
        """
        _check(messages)
        if MARKS_ANSWERS.search(self._text):
            text, places = self._render(messages, marked=True)
            return text, [(int(start), int(stop)) for start, stop in places]
        text, answers = self._render(messages)[0], []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:number], prompt=True)[0]
            after = self._render(messages[: number + 1])[0]
            if not (after.startswith(before) and text.startswith(after)):
                raise ValueError(
                    f"the chat template writes message {number + 1} otherwise when others follow, so that its answer "
                    "cannot be told from the rest; mark answers in the template by {% generation %}"
                )
            answers.append((len(before), len(after)))
        return text, answers

    def _render(self, messages: Any, prompt: bool = False, marked: bool = False) -> tuple[str, Any]:
        from transformers.utils import chat_template_utils

        render: Any = chat_template_utils.render_jinja_template
        try:
            texts, places = render(
                [messages],
                chat_template=self._text,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=marked,
                **self._tokens,
            )
        except Exception as error:  # a template may fail in any way
            raise ValueError(f"the chat template fails: {' '.join(str(error).split())[:200]}") from None
        return texts[0], places[0] if marked else []


def _check(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise ValueError("its messages are no list of messages")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ValueError(f"its message {number} has no content of text")
        if not is_unicode(message["content"]):
            raise ValueError(f"has half a surrogate pair in its message {number}")
        if message.get("role") not in ROLES:
            raise ValueError(
                f"the role {message.get('role')!r} of its message {number} is none of {', '.join(ROLES)}"
            )
