"""Conversations as text, by the chat template of a tokenizer, with the places of the assistant's answers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

from orchestrator.config.data import SHIPPED
from orchestrator.config.errors import InputError
from orchestrator.data.encoding.tokenizer import special_tokens_of
from orchestrator.data.prepare.messages import Message, text_of
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.data.store.manifest import RECORDS_FORMAT

MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
CLOCK = "strftime_now"
"""The function by which a template asks for the time."""
_ASKS = re.compile(rf"""{CLOCK}\(\s*(?:format\s*=\s*)?(?P<quote>['"])(?P<format>.*?)(?P=quote)\s*\)""")
_NO_CALL = re.compile(rf"\{{#.*?#\}}|{CLOCK}\s+is\s+(not\s+)?defined", re.DOTALL)

TOOL_USE = "tool_use"
"""The name of the template that transformers takes for a conversation with tools."""
MORE_TEMPLATES = "additional_chat_templates"
"""The folder of the templates beside the one that is used by default."""
PROBE = "probe"
"""A content by which it is told what a template reads."""

NamedTemplate = tuple[str, tuple[tuple[str, str], ...]]
"""A chat template, and the special tokens that it may name."""


def find_template(
    location: str, given: str | None, data_format: int = RECORDS_FORMAT
) -> NamedTemplate | None:
    """The chat template in the file `given`, or else beside the tokenizer at `location`; None if there is none. It is
    read as for prepared data of `data_format`. Raises InputError for a file that is missing."""
    folder = _folder_of(location)
    tokens = tuple(sorted(special_tokens_of(location, data_format).items()))
    text = named_template(given) if given else templates_in(folder).get("default")
    if text is None and given:
        raise InputError("there is no such file", f"data.chat_template {given}", "give a Jinja file")
    return None if text is None else (text, tokens)


def find_tool_template(location: str, given: str | None) -> str:
    """The chat template beside the tokenizer at `location` that writes conversations with tools; empty if the one that
    writes the others does, or the job has `given` one."""
    return "" if given else templates_in(_folder_of(location)).get(TOOL_USE, "")


def named_template(given: str) -> str | None:
    """The chat template that a job names: one that is shipped, or the text of a file; None if there is no such file.
    Raises InputError for a name that is not shipped."""
    if not given.startswith(SHIPPED):
        path, _, file = given.rpartition("/")
        text = DataFolder(path or ".").read(file)
        return None if text is None else text.decode()
    name = given.removeprefix(SHIPPED)
    shipped = {path.stem: path for path in (Path(__file__).parent / "chat_templates").glob("*.jinja")}
    if name not in shipped:
        what = f"no chat template is shipped for {name}"
        raise InputError(what, f"data.chat_template {given}", f"take one of {', '.join(sorted(shipped))}")
    return shipped[name].read_text()


def templates_in(folder: DataFolder) -> dict[str, str]:
    """The chat templates in a folder by name, as transformers takes them: those in files, else those in
    tokenizer_config.json. Most folders have one, "default"; "tool_use" is for conversations with tools."""
    found = {} if (text := folder.read("chat_template.jinja")) is None else {"default": text.decode()}
    for file in folder.sizes(MORE_TEMPLATES):
        if file.endswith(".jinja") and "/" not in file:
            found[file.removesuffix(".jinja")] = (folder.read(f"{MORE_TEMPLATES}/{file}") or b"").decode()
    if found:
        return found
    given = (folder.read_json("tokenizer_config.json") or {}).get("chat_template")
    if isinstance(given, str):
        return {"default": given}
    return {each["name"]: each["template"] for each in given or ()}


def _folder_of(location: str) -> DataFolder:
    """The folder of a tokenizer, which is named by its folder or its file."""
    head, _, tail = location.rpartition("/")
    return DataFolder(head or ".") if tail.endswith(".json") else DataFolder(location)


def asks_for_day(text: str) -> bool:
    """Whether a template asks for the time."""
    return CLOCK in _NO_CALL.sub("", text)


def check_tokens(found: NamedTemplate, location: str) -> None:
    """Raise InputError if a template names a special token that the tokenizer at `location` does not have: nothing
    would be written for it."""
    text, tokens = found
    if missing := _undefined(text, dict(tokens)):
        what = (
            f"the chat template names {missing}, which the tokenizer does not have, and would write nothing"
        )
        hint = f"name {missing} in a tokenizer_config.json there, or write the token in data.chat_template"
        raise InputError(what, f"data.tokenizer {location}", hint)


def _undefined(text: str, tokens: Mapping[str, str]) -> str:
    """The first special token that a template names and does not ask for whether it is defined, of those that are not
    among `tokens`; empty if there is none."""
    from jinja2 import TemplateError, meta, nodes
    from transformers.utils import chat_template_utils

    compiled: Any = chat_template_utils._compile_jinja_template
    try:
        environment = compiled(text).environment
        tree = environment.parse(text)
    except TemplateError:  # which rendering tells
        return ""
    conditions: list[Any] = [each.test for each in tree.find_all((nodes.If, nodes.CondExpr))]
    conditions += tree.find_all(nodes.Test)
    conditions += [each for each in tree.find_all(nodes.Filter) if each.name in ("default", "d")]
    asked = {
        name.name
        for each in conditions
        for name in (each, *each.find_all(nodes.Name))
        if isinstance(name, nodes.Name)
    }
    named = {name for name in meta.find_undeclared_variables(tree) if name.endswith("_token")}
    return min(named - asked - tokens.keys(), default="")


def dated(found: NamedTemplate, day: date | None) -> NamedTemplate:
    """The template with `day` in place of today's date: what it writes does not depend on the clock. Raises InputError
    if it asks for the date and there is no `day`, or the other way round."""
    text, tokens = found
    if not asks_for_day(text):
        if day is not None:
            raise InputError("the chat template asks for no date", "data.chat_date", "leave it out")
        return found
    if day is None:
        what = "the chat template asks for today's date, and prepared data does not depend on the day"
        raise InputError(what, "data.chat_date", f"set it, as in chat_date: {date.today()}")
    said = _ASKS.sub(lambda call: call["quote"] + day.strftime(call["format"]) + call["quote"], text)
    if asks_for_day(said):
        what = f"the chat template calls {CLOCK} with more than a format in quotes"
        raise InputError(what, "data.chat_template", "name a template that writes the date itself")
    return said, tokens


class Template:
    """A chat template in Jinja, rendered in transformers' sandbox, as `apply_chat_template` does."""

    def __init__(self, text: str, tokens: Mapping[str, str]) -> None:
        """`tokens` are the special tokens that it may name, as in bos_token."""
        self._text, self._tokens = text, dict(tokens)

    @property
    def marks_answers(self) -> bool:
        """Whether the template marks what is generated."""
        return bool(MARKS_ANSWERS.search(self._text))

    def write(
        self, messages: list[Message], tools: list[Any] | None, prompt: bool = False, **said: Any
    ) -> str:
        """The conversation as text, with a `prompt` for an answer at its end; the template is told what is `said`, as
        in enable_thinking. Raises ValueError in one line."""
        return self._render(messages, tools, prompt, **said)[0]

    def marked(self, messages: list[Message], tools: list[Any] | None) -> tuple[str, list[tuple[int, int]]]:
        """The conversation as text, and the places in it that the template marks as generated. Raises ValueError in
        one line."""
        text, places = self._render(messages, tools, marked=True)
        return text, [(int(start), int(stop)) for start, stop in places]

    def render(
        self, messages: list[Message], tools: list[Any] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The conversation as text, and where in it the answers stand, for data in a format before 6: what the template
        marks as generated or, where it marks nothing, what each message of the assistant adds behind the prompt for
        one. `turns` says what is learnt since.

        Raises ValueError in one line.
        """
        if self.marks_answers:
            return self.marked(messages, tools)
        text, answers = self._render(messages, tools)[0], []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:number], tools, prompt=True)[0]
            after = self._render(messages[: number + 1], tools)[0]
            if not (after.startswith(before) and text.startswith(after)):
                raise ValueError(
                    f"the chat template writes message {number + 1} otherwise when others follow, so that its answer "
                    "cannot be told from the rest; mark answers in the template by {% generation %}"
                )
            answers.append((len(before), len(after)))
        return text, answers

    def prompt(self, text: str) -> str:
        """What is written of a user's `text` and of what comes before the answer to it. Raises ValueError in one
        line."""
        return self._render(self.as_read([{"role": "user", "content": text}]), None, prompt=True)[0]

    def closing(self) -> str:
        """What is written behind an answer. Raises ValueError in one line."""
        talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]
        return self._render(self.as_read(talk), None)[0].rpartition(PROBE)[2]

    def predicted_closing(self) -> str:
        """What is written behind an answer and predicted with it. Raises ValueError in one line."""
        talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]
        text, answers = self.render(self.as_read(talk))
        return text[: answers[-1][1]].rpartition(PROBE)[2] if answers else ""

    def as_read(self, messages: list[Message]) -> list[Message]:
        """The messages with the content of each as the template reads it: as text, or in parts."""
        strings, parts = self._reads

        def content(given: str | list[Message]) -> str | list[Message]:
            if isinstance(given, str):
                return [{"type": "text", "text": given}] if parts and not strings else given
            return given if parts else text_of(given)

        return [
            {**message, "content": content(message["content"])} if "content" in message else message
            for message in messages
        ]

    def calls_as_read(self, messages: list[Message]) -> list[Message]:
        """The messages with what is called as the template reads it, see `_reads_calls`."""
        as_text, beside = self._reads_calls

        def call(given: Message) -> Message:
            function = given.get("function", given)
            found = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
            return {**given, "function": found} if "function" in given else found

        def read(message: Message) -> Message:
            if "tool_calls" not in message:
                return message
            calls = [call(each) for each in message["tool_calls"]] if as_text else message["tool_calls"]
            return {**beside, **message, "tool_calls": calls}

        return [read(message) for message in messages]

    @cached_property
    def _reads_calls(self) -> tuple[bool, Message]:
        """Whether the template takes the arguments of a call as JSON instead of a mapping, and what it takes beside
        calls where there is no content: some join strings without asking what they are given."""
        arguments = {PROBE: "it's"}
        talk = [{"role": "user", "content": "?"}]
        for beside in ({}, {"content": ""}, {"content": None}):
            for as_text in (False, True):
                given = json.dumps(arguments) if as_text else arguments
                call = {"type": "function", "function": {"name": f"{PROBE}_call", "arguments": given}}
                answer = {"role": "assistant", **beside, "tool_calls": [call]}
                try:
                    text = self._render([*talk, answer], None)[0]
                except ValueError:
                    continue
                printed_by_python = f"{{'{PROBE}'" in text
                if f"{PROBE}_call" in text and not printed_by_python:
                    return as_text, beside
        return False, {}

    @cached_property
    def _reads(self) -> tuple[bool, bool]:
        """Whether the template writes content that is a text, and content in parts: many write only the one, and of
        the other nothing, or what Python prints of a list."""
        written = []
        for content in (PROBE, [{"type": "text", "text": PROBE}]):
            try:
                written.append(self._render([{"role": "user", "content": content}], None)[0])
            except ValueError:
                written.append("")
        strings, parts = (PROBE in text for text in written)
        return strings, parts and (not strings or written[0] == written[1])

    def _render(
        self,
        messages: list[Message],
        tools: list[Any] | None,
        prompt: bool = False,
        marked: bool = False,
        **said: Any,
    ) -> tuple[str, Any]:
        from transformers.utils import chat_template_utils

        render: Any = chat_template_utils.render_jinja_template
        try:
            texts, places = render(
                [messages],
                tools=tools,
                chat_template=self._text,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=marked,
                **self._tokens,
                **said,
            )
        except Exception as error:  # a template may fail in any way
            raise ValueError(f"the chat template fails: {' '.join(str(error).split())[:200]}") from None
        return texts[0], places[0] if marked else []
