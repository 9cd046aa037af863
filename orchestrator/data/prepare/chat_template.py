"""Conversations as text, by a tokenizer's chat template, with the positions of the assistant's answers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.data.config import SHIPPED
from orchestrator.data.encoding.tokenizer import special_tokens_of
from orchestrator.data.prepare.messages import Message, text_of
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.data.store.manifest import RECORDS_FORMAT

MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
CLOCK = "strftime_now"
"""The function that a template calls for the current time."""
_ASKS = re.compile(rf"""{CLOCK}\(\s*(?:format\s*=\s*)?(?P<quote>['"])(?P<format>.*?)(?P=quote)\s*\)""")
_NO_CALL = re.compile(rf"\{{#.*?#\}}|{CLOCK}\s+is\s+(not\s+)?defined", re.DOTALL)

TOOL_USE = "tool_use"
"""transformers' name for the template for conversations with tools."""
MORE_TEMPLATES = "additional_chat_templates"
"""The folder of the templates besides the default one."""
PROBE = "probe"
"""A content that shows what a template reads."""

NamedTemplate = tuple[str, tuple[tuple[str, str], ...]]
"""A chat template, and the special tokens that it may name."""


def find_template(
    location: str, reference: str | None, data_format: int = RECORDS_FORMAT
) -> NamedTemplate | None:
    """Return the chat template that the job names by `reference`, else the one next to the tokenizer at `location`.

    None if neither exists. It is read as prepared data of `data_format` does. Raises InputError if the file is missing.
    """
    folder = _folder_of(location)
    tokens = tuple(sorted(special_tokens_of(location, data_format).items()))
    text = named_template(reference) if reference else templates_in(folder).get("default")
    if text is None and reference:
        raise InputError("there is no such file", f"data.chat_template {reference}", "give a Jinja file")
    return None if text is None else (text, tokens)


def find_tool_template(location: str, reference: str | None) -> str:
    """Return the template next to the tokenizer at `location` for conversations with tools.

    Empty if the default template also writes tools, or if the job names a template by `reference`.
    """
    return "" if reference else templates_in(_folder_of(location)).get(TOOL_USE, "")


def named_template(reference: str) -> str | None:
    """Return the chat template that a job names: a shipped one, or the text of a file; None if that file is missing.

    Raises InputError for a name that is not shipped.
    """
    if not reference.startswith(SHIPPED):
        path, _, file = reference.rpartition("/")
        text = DataFolder(path or ".").read(file)
        return None if text is None else text.decode()
    name = reference.removeprefix(SHIPPED)
    shipped = {path.stem: path for path in (Path(__file__).parent / "chat_templates").glob("*.jinja")}
    if name not in shipped:
        problem = f"no chat template is shipped for {name}"
        raise InputError(
            problem, f"data.chat_template {reference}", f"take one of {', '.join(sorted(shipped))}"
        )
    return shipped[name].read_text()


def templates_in(folder: DataFolder) -> dict[str, str]:
    """Return the chat templates in a folder by name, in the order transformers looks for them: files first, else
    tokenizer_config.json.

    Most folders have one, "default". "tool_use" is for conversations with tools.
    """
    templates = {} if (text := folder.read("chat_template.jinja")) is None else {"default": text.decode()}
    for file in folder.sizes(MORE_TEMPLATES):
        if file.endswith(".jinja") and "/" not in file:
            templates[file.removesuffix(".jinja")] = (folder.read(f"{MORE_TEMPLATES}/{file}") or b"").decode()
    if templates:
        return templates
    entry = (folder.read_json("tokenizer_config.json") or {}).get("chat_template")
    if isinstance(entry, str):
        return {"default": entry}
    return {template["name"]: template["template"] for template in entry or ()}


def _folder_of(location: str) -> DataFolder:
    """Return the folder of a tokenizer, which is given by its folder or its file."""
    head, _, tail = location.rpartition("/")
    return DataFolder(head or ".") if tail.endswith(".json") else DataFolder(location)


def asks_for_day(text: str) -> bool:
    """Return whether a template asks for the time."""
    return CLOCK in _NO_CALL.sub("", text)


def check_tokens(template: NamedTemplate, location: str) -> None:
    """Raise InputError if a template names a special token that the tokenizer at `location` lacks, because it would
    write nothing there.
    """
    text, tokens = template
    if missing := _undefined(text, dict(tokens)):
        problem = (
            f"the chat template uses {missing}, which the tokenizer does not have, so it would write nothing"
        )
        hint = f"name {missing} in a tokenizer_config.json there, or write the token in data.chat_template"
        raise InputError(problem, f"data.tokenizer {location}", hint)


def _undefined(text: str, tokens: Mapping[str, str]) -> str:
    """Return a special token that a template uses unconditionally but that is missing from `tokens`; empty if all are
    there.
    """
    from jinja2 import TemplateError, meta, nodes
    from transformers.utils import chat_template_utils

    compiled: Any = chat_template_utils._compile_jinja_template
    try:
        environment = compiled(text).environment
        tree = environment.parse(text)
    except TemplateError:  # rendering reports the error
        return ""
    conditions: list[Any] = [branch.test for branch in tree.find_all((nodes.If, nodes.CondExpr))]
    conditions += tree.find_all(nodes.Test)
    conditions += [node for node in tree.find_all(nodes.Filter) if node.name in ("default", "d")]
    conditional = {
        name.name
        for condition in conditions
        for name in (condition, *condition.find_all(nodes.Name))
        if isinstance(name, nodes.Name)
    }
    named = {name for name in meta.find_undeclared_variables(tree) if name.endswith("_token")}
    return min(named - conditional - tokens.keys(), default="")


def dated(template: NamedTemplate, day: date | None) -> NamedTemplate:
    """Return the template with `day` instead of today's date, so that its output does not depend on the clock.

    Raises InputError if the template asks for the date and `day` is None, or the other way round.
    """
    text, tokens = template
    if not asks_for_day(text):
        if day is not None:
            raise InputError("the chat template does not ask for a date", "data.chat_date", "leave it out")
        return template
    if day is None:
        problem = "the chat template asks for today's date, but prepared data must not depend on the day"
        raise InputError(problem, "data.chat_date", f"set it, as in chat_date: {date.today()}")
    text_of_day = _ASKS.sub(lambda call: call["quote"] + day.strftime(call["format"]) + call["quote"], text)
    if asks_for_day(text_of_day):
        problem = f"the chat template calls {CLOCK} with more than a format in quotes"
        raise InputError(problem, "data.chat_template", "name a template that writes the date itself")
    return text_of_day, tokens


class Template:
    """A Jinja chat template, rendered in transformers' sandbox, as `apply_chat_template` does."""

    def __init__(self, text: str, tokens: Mapping[str, str]) -> None:
        """`tokens` are the special tokens that the template may name, for example bos_token."""
        self._text = text
        self._tokens = dict(tokens)

    @property
    def marks_answers(self) -> bool:
        """Whether the template marks generated text."""
        return bool(MARKS_ANSWERS.search(self._text))

    def write(
        self, messages: list[Message], tools: list[Any] | None, prompt: bool = False, **variables: Any
    ) -> str:
        """Return the conversation as text. Raises a one-line ValueError.

        Args:
            messages: the conversation.
            tools: the tools that it may call.
            prompt: end with the prompt for an answer.
            variables: more variables for the template, for example enable_thinking.
        """
        return self._render(messages, tools, prompt, **variables)[0]

    def marked(self, messages: list[Message], tools: list[Any] | None) -> tuple[str, list[tuple[int, int]]]:
        """Return the conversation as text, and the positions that the template marks as generated. Raises a one-line
        ValueError.
        """
        text, spans = self._render(messages, tools, marked=True)
        return text, [(int(start), int(stop)) for start, stop in spans]

    def render(
        self, messages: list[Message], tools: list[Any] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the conversation as text, and the positions of the answers in it, for data in a format before 6.

        These are the positions that the template marks as generated. If it marks nothing, an answer is what each
        assistant message adds after the prompt for it. Later formats use `turns`.

        Raises a one-line ValueError.
        """
        if self.marks_answers:
            return self.marked(messages, tools)
        text = self._render(messages, tools)[0]
        answers = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:number], tools, prompt=True)[0]
            after = self._render(messages[: number + 1], tools)[0]
            if not (after.startswith(before) and text.startswith(after)):
                raise ValueError(
                    f"the chat template writes message {number + 1} differently when others follow, so its answer "
                    "cannot be distinguished from the rest; mark answers in the template by {% generation %}"
                )
            answers.append((len(before), len(after)))
        return text, answers

    def prompt(self, text: str) -> str:
        """Return what the template writes for a user's `text`, up to where the answer begins. Raises a one-line
        ValueError.
        """
        return self._render(self.as_read([{"role": "user", "content": text}]), None, prompt=True)[0]

    def opening(self, messages: list[Message], tools: list[Any] | None) -> str:
        """Return what the template writes for messages, up to where the answer begins. Raises a one-line ValueError."""
        return self._render(messages, tools, prompt=True)[0]

    def closing(self) -> str:
        """Return what the template writes after an answer. Raises a one-line ValueError."""
        talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]
        return self._render(self.as_read(talk), None)[0].rpartition(PROBE)[2]

    def predicted_closing(self) -> str:
        """Return what the template writes after an answer and what is predicted with it. Raises a one-line
        ValueError.
        """
        talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]
        text, answers = self.render(self.as_read(talk))
        return text[: answers[-1][1]].rpartition(PROBE)[2] if answers else ""

    def as_read(self, messages: list[Message]) -> list[Message]:
        """Return the messages with content in the form that the template reads: a text, or a list of parts."""
        strings, parts = self._reads

        def content(value: str | list[Message]) -> str | list[Message]:
            if isinstance(value, str):
                return [{"type": "text", "text": value}] if parts and not strings else value
            return value if parts else text_of(value)

        return [
            {**message, "content": content(message["content"])} if "content" in message else message
            for message in messages
        ]

    def calls_as_read(self, messages: list[Message]) -> list[Message]:
        """Return the messages with tool calls in the form that the template reads, see `_reads_calls`."""
        as_text, content_field = self._reads_calls

        def call(tool_call: Message) -> Message:
            function = tool_call.get("function", tool_call)
            result = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
            return {**tool_call, "function": result} if "function" in tool_call else result

        def read(message: Message) -> Message:
            if "tool_calls" not in message:
                return message
            calls = (
                [call(tool_call) for tool_call in message["tool_calls"]] if as_text else message["tool_calls"]
            )
            return {**content_field, **message, "tool_calls": calls}

        return [read(message) for message in messages]

    @cached_property
    def _reads_calls(self) -> tuple[bool, Message]:
        """Return whether the template takes a call's arguments as JSON instead of a mapping, and the content to add to
        messages that have calls but no content. Some templates join strings without a check for None.
        """
        arguments = {PROBE: "it's"}
        talk = [{"role": "user", "content": "?"}]
        for content_field in ({}, {"content": ""}, {"content": None}):
            for as_text in (False, True):
                written_arguments = json.dumps(arguments) if as_text else arguments
                call = {
                    "type": "function",
                    "function": {"name": f"{PROBE}_call", "arguments": written_arguments},
                }
                answer = {"role": "assistant", **content_field, "tool_calls": [call]}
                try:
                    text = self._render([*talk, answer], None)[0]
                except ValueError:
                    continue
                printed_by_python = f"{{'{PROBE}'" in text
                if f"{PROBE}_call" in text and not printed_by_python:
                    return as_text, content_field
        return False, {}

    @cached_property
    def _reads(self) -> tuple[bool, bool]:
        """Whether the template writes content given as a text, and content given as parts. Many support only one form
        and write nothing, or Python's form of a list, for the other.
        """
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
        **variables: Any,
    ) -> tuple[str, Any]:
        from transformers.utils import chat_template_utils

        render: Any = chat_template_utils.render_jinja_template
        try:
            texts, spans = render(
                [messages],
                tools=tools,
                chat_template=self._text,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=marked,
                **self._tokens,
                **variables,
            )
        except Exception as error:  # a template may raise any exception
            raise ValueError(f"the chat template fails: {' '.join(str(error).split())[:200]}") from None
        return texts[0], spans[0] if marked else []
