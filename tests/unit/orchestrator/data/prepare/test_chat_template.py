"""What chat templates write, compared with transformers: tools, parts of text, and the day."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import hf_tokenizers
import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from orchestrator.config.errors import InputError
from orchestrator.data.prepare.answers import Answers, unmarked
from orchestrator.data.prepare.chat_template import (
    TOOL_USE,
    Template,
    check_tokens,
    dated,
    find_template,
    find_tool_template,
    templates_in,
)
from orchestrator.data.store.data_folder import DataFolder
from workloads.record_format import MARK

TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}]
ARGUMENTS = {"a": 1, "b": 2}
CALL = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}],
}
TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "What is 1 + 2?"},
    CALL,
    {"role": "tool", "name": "add", "content": "3"},
    {"role": "assistant", "content": "Thr\u00e9e."},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "Welcome"},
]
HEAD = "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}{% for m in messages %}"
TAIL = "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
SAID = (
    "{{ m.content if m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}<end>"
)
PLAIN = f"{HEAD}<{{{{ m.role }}}}>{SAID}{TAIL}"
MARKED = (
    f"{HEAD}<{{{{ m.role }}}}>{{% if m.role == 'assistant' %}}{{% generation %}}{SAID}{{% endgeneration %}}"
    f"{{% else %}}{{{{ m.content }}}}<end>{{% endif %}}{TAIL}"
)
TWICE = MARKED.replace("{% for c in", "{% endgeneration %}{% generation %}{% for c in")
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for p in m.content | selectattr('type', 'equalto', 'text') %}"
    "{{ p.text }}{% endfor %}<end>" + TAIL
)
ASKS = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}{# strftime_now #}" + PLAIN


@pytest.fixture(scope="module")
def of_bytes() -> Tokenizer:
    return hf_tokenizers.of_bytes()


def spoken(answers: Answers, words: np.ndarray) -> str:
    """What is predicted."""
    return str(answers.encoder.decode([int(word) & ~MARK for word in words.astype(np.int64) if word & MARK]))


@pytest.mark.parametrize("template", [PLAIN, MARKED, TWICE], ids=["by prompts", "marked", "marked twice"])
def test_calls_of_tools_are_written_and_predicted_as_transformers_does(
    template: str, of_bytes: Tokenizer
) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=of_bytes)
    wanted = theirs.apply_chat_template(
        TALK, TOOLS, chat_template=template, return_dict=True, return_assistant_tokens_mask=template != PLAIN
    )
    as_text = {"type": "function", "function": {"name": "add", "arguments": json.dumps(ARGUMENTS)}}
    given = [*TALK[:2], {"role": "assistant", "content": None, "tool_calls": [as_text]}, *TALK[3:]]
    answers = Answers(of_bytes, Template(template, {}), 0)
    for tools in (TOOLS, json.dumps(TOOLS)):
        (words,) = answers.conversation(given, tools)
        assert unmarked(words).tolist() == wanted["input_ids"]
        assert spoken(answers, words) == '<call>add{"a": 1, "b": 2}<end>Thr\u00e9e.<end>Welcome<end>'
        if template != PLAIN:
            assert ((words & MARK) > 0).astype(int).tolist() == wanted["assistant_masks"]


@pytest.mark.parametrize("template", [PLAIN, MARKED, TWICE], ids=["by prompts", "marked", "marked twice"])
def test_of_a_preference_only_what_follows_the_prompt_is_predicted(
    template: str, of_bytes: Tokenizer
) -> None:
    answers = Answers(of_bytes, Template(template, {}), 0)
    words = answers.after(TALK[:6], "No", "chosen", TOOLS)
    assert spoken(answers, words) == "No<end>"
    words = answers.after(TALK[:2], TALK[2:5], "chosen", TOOLS)
    assert spoken(answers, words) == '<call>add{"a": 1, "b": 2}<end>Thr\u00e9e.<end>'


@pytest.mark.parametrize("template", [PLAIN, MARKED, TWICE], ids=["by prompts", "marked", "marked twice"])
def test_an_answer_of_weight_0_is_read_and_not_predicted(template: str, of_bytes: Tokenizer) -> None:
    """As OpenAI's format has it: 1 is as if it were not there."""
    answers = Answers(of_bytes, Template(template, {}), 0)
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "one", "weight": 0},
        {"role": "user", "content": "b"},
        {**CALL, "weight": 0},
        {"role": "tool", "content": "c"},
        {"role": "assistant", "content": "two", "weight": 1},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "three", "weight": 0},
    ]
    (words,) = answers.conversation(talk)
    call = '<call>add{"a": 1, "b": 2}<end>'
    read = f"<user>a<end><assistant>one<end><user>b<end><assistant>{call}<tool>c<end><assistant>"
    behind = "<user>d<end><assistant>three<end>"
    assert of_bytes.decode(unmarked(words)) == f"{read}two<end>{behind}"
    mask = [False] * len(read) + [True] * len("two<end>") + [False] * len(behind)
    assert ((words & MARK) > 0).tolist() == mask
    # A preference after such a conversation: only its own answer.
    assert spoken(answers, answers.after(talk[:-1], "four", "chosen")) == "four<end>"


@pytest.mark.parametrize("template", [PLAIN, PARTS], ids=["reads texts", "reads parts"])
def test_content_reaches_a_template_as_it_reads_it(template: str, of_bytes: Tokenizer) -> None:
    """Of content in the other form a template writes nothing, or what Python prints of a list."""
    answers = Answers(of_bytes, Template(template, {}), 0)
    plain: list[dict[str, Any]] = [
        {"role": "user", "content": "1 + 2"},
        {"role": "assistant", "content": "3"},
    ]
    parts = [{"type": "text", "text": "1 "}, {"type": "text", "text": "+ 2"}]
    for talk in (plain, [{"role": "user", "content": parts}, plain[1]]):
        (words,) = answers.conversation(talk)
        assert of_bytes.decode(unmarked(words)) == "<user>1 + 2<end><assistant>3<end>"
        assert spoken(answers, words) == "3<end>"


def test_templates_of_a_folder_are_those_that_transformers_takes(of_bytes: Tokenizer, tmp_path: Path) -> None:
    """A list in tokenizer_config.json, files instead of it, and both."""
    with_tools = PLAIN.replace("<end>", "<done>")
    several = {"default": PLAIN, TOOL_USE: with_tools, "rag": "r"}
    listed, in_files, both = (tmp_path / name for name in ("listed", "files", "both"))
    theirs = PreTrainedTokenizerFast(tokenizer_object=of_bytes, chat_template=several)
    theirs.save_pretrained(listed, save_jinja_files=False)
    theirs.save_pretrained(in_files)
    theirs.save_pretrained(both, save_jinja_files=False)
    (both / "chat_template.jinja").write_text(MARKED)
    assert not (listed / "additional_chat_templates").exists()
    assert (in_files / "additional_chat_templates").is_dir()
    for folder in (listed, in_files, both):
        loaded = PreTrainedTokenizerFast.from_pretrained(folder).chat_template
        wanted = loaded if isinstance(loaded, dict) else {"default": loaded}
        assert templates_in(DataFolder(str(folder))) == wanted
        for location in (str(folder), f"{folder}/tokenizer.json"):
            assert (find_template(location, None) or ("",))[0] == wanted["default"]
            assert find_tool_template(location, None) == wanted.get(TOOL_USE, "")
    mine = tmp_path / "mine.jinja"
    mine.write_text(MARKED)
    assert find_tool_template(str(listed), str(mine)) == ""
    assert (find_template(str(listed), str(mine)) or ("",))[0] == MARKED


def test_a_conversation_with_tools_is_written_by_the_template_for_them(of_bytes: Tokenizer) -> None:
    several = {"default": PLAIN, TOOL_USE: PLAIN.replace("<end>", "<done>")}
    theirs = PreTrainedTokenizerFast(tokenizer_object=of_bytes, chat_template=several)
    answers = Answers(
        of_bytes, Template(several["default"], {}), 0, tool_template=Template(several[TOOL_USE], {})
    )
    for tools in (None, TOOLS):
        (words,) = answers.conversation(TALK, tools)
        wanted = theirs.apply_chat_template(TALK, tools, return_dict=True)["input_ids"]
        assert unmarked(words).tolist() == wanted
        words = answers.after(TALK[:-1], TALK[-1], "chosen", tools)
        assert unmarked(words).tolist() == wanted
    assert str(of_bytes.decode(unmarked(words))).count("<done>") == len(TALK)


def test_runs_of_earlier_versions_keep_what_their_template_wrote(of_bytes: Tokenizer) -> None:
    talk = [{"role": "user", "content": "1", "name": None}, {"role": "assistant", "content": ""}]
    template = Template("{% for m in messages %}<{{ m.role }}>{{ m.name }}{{ m.content }}|" + TAIL, {})
    (words,) = Answers(of_bytes, template, 0, data_format=4).conversation(talk)
    assert of_bytes.decode(unmarked(words)) == "<user>None1|<assistant>|"


def test_a_template_is_told_a_fixed_day() -> None:
    day = date(2024, 7, 26)
    text, tokens = dated((ASKS, (("eos_token", "<e>"),)), day)
    assert Template(text, dict(tokens)).render(TALK[:2])[0].startswith("26 Jul 2024<system>")
    assert dated((PLAIN, ()), None) == (PLAIN, ())


@pytest.mark.parametrize(
    ("text", "day", "says"),
    [
        (
            ASKS,
            None,
            r"data\.chat_date: the chat template asks for today's date, .*; set it, as in chat_date: 20",
        ),
        (
            PLAIN,
            date(2024, 7, 26),
            r"data\.chat_date: the chat template does not ask for a date; leave it out",
        ),
        (
            "{{ strftime_now(form) }}",
            date(2024, 7, 26),
            r"data\.chat_template: the chat template calls strftime_now",
        ),
    ],
)
def test_a_day_that_is_missing_or_of_no_use(text: str, day: date | None, says: str) -> None:
    with pytest.raises(InputError, match=says):
        dated((text, ()), day)


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", "eos_token"),
        ("{{ bos_token + messages[0].content }}", "bos_token"),
        ("{% if bos_token is defined %}{{ bos_token }}{% endif %}{{ messages }}", ""),
        ("{{ bos_token | default('') }}{{ messages }}", ""),
        ("{% if bos_token %}{{ bos_token }}{% endif %}{{ (eos_token if eos_token else '') }}", ""),
        ("{{ eos_token | trim }}", "eos_token"),
        ("{% set end_token = '<end>' %}{{ end_token }}", ""),
        ("{{ messages }}{{ pad_token }}", ""),
    ],
)
def test_a_template_that_names_a_token_that_is_not_there_is_refused(text: str, missing: str) -> None:
    found = (text, (("pad_token", "<pad>"),))
    if not missing:
        return check_tokens(found, "base")
    with pytest.raises(InputError, match=f"uses {missing}, which the tokenizer does not have") as told:
        check_tokens(found, "base")
    assert told.value.where == "data.tokenizer base"
    return None


def test_a_template_is_given_the_tokens_of_the_map(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}")
    now, before = (find_template(str(tmp_path), None, number) for number in (6, 5))
    assert (now, before) == (
        ("{{ eos_token }}", (("eos_token", "<|im_end|>"),)),
        ("{{ eos_token }}", (("eos_token", "</s>"),)),
    )
