"""Chat templates that are shipped: what they write and predict, compared with those of TRL and of their families."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest
import trl
from transformers.utils.chat_template_utils import render_jinja_template

from orchestrator.config.errors import InputError
from orchestrator.data.config import SHIPPED
from orchestrator.data.prepare.answers import written
from orchestrator.data.prepare.chat_template import Template, asks_for_day, dated, named_template
from workloads.hf.tables.families import FAMILIES

THEIRS = Path(trl.__file__).parent / "chat_templates"
TOKENS = {"bos_token": "<BOS>", "eos_token": "<EOS>"}
OF_TRL = {
    "llama3": ["llama3"],
    "qwen2.5": ["qwen2_5"],
    "qwen3": ["qwen3"],
    "phi3": ["phi3", "phi3_5"],
    "gemma": ["gemma"],
    "gemma3": ["gemma3"],
    "gpt-oss": ["gptoss"],
    "deepseek": ["deepseek_r1_distill", "deepseekv3"],
}
OTHERS = ("llama2", "mistral", "olmo2")
OF_FAMILY = {
    "llama": ("llama2", "llama3"), "qwen2": ("qwen2.5",), "qwen2-moe": ("qwen2.5",), "qwen3": ("qwen3",),
    "qwen3-moe": ("qwen3",), "mistral": ("mistral",), "mixtral": ("mistral",), "phi3": ("phi3",), "olmo2": ("olmo2",),
    "gemma2": ("gemma",), "gemma3": ("gemma3",), "gpt-oss": ("gpt-oss",), "deepseek-v3": ("deepseek",),
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def calls(*sums: int) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": "add", "arguments": {"a": each, "b": "x y"}}}
        for each in sums
    ]


SYSTEM = {"role": "system", "content": "Be kind."}
TURNS = [user("a"), answer("one"), user(" b "), answer("two\n\n2")]
THOUGHTS = [
    user("a"),
    answer("one", reasoning_content="hm"),
    user("b"),
    answer("<think>\nso\n</think>\n\ntwo"),
]
CALLED = [
    user("a"), answer("", tool_calls=calls(1, 2)), {"role": "tool", "content": "3"}, {"role": "tool", "content": "4"},
    answer("I add.", tool_calls=calls(5)), {"role": "tool", "content": "6"}, answer("six"),
]  # fmt: skip
CASES: dict[str, tuple[list[dict[str, Any]], list[Any] | None]] = {
    "one": (TURNS[:2], None), "two": (TURNS, None), "system": ([SYSTEM, *TURNS], None), "thoughts": (THOUGHTS, None),
    "called": (CALLED, TOOLS), "called by a system": ([SYSTEM, *CALLED], TOOLS),
}  # fmt: skip
ASKS = {"qwen2.5": "\n", "gpt-oss": "<|start|>assistant", "deepseek": "<\uff5cAssistant\uff5c>"}
"""What TRL's templates mark although a server writes it before an answer."""
WITHOUT = {"gemma": ("system",)}
THINKING, CALLING = ("qwen3", "gpt-oss", "deepseek"), ("qwen2.5", "qwen3")


def text_of(name: str) -> str:
    text = named_template(SHIPPED + name) or ""
    return on_a_day(text)


def on_a_day(text: str) -> str:
    return dated((text, ()), date(2026, 1, 1))[0] if asks_for_day(text) else text


def rendered(text: str, talk: list[dict[str, Any]], tools: Any, marked: bool = False, **more: Any) -> Any:
    texts, places = render_jinja_template(
        [talk], tools=tools, chat_template=text, return_assistant_tokens_mask=marked, **TOKENS, **more
    )
    return texts[0], [texts[0][start:stop] for start, stop in places[0]] if marked else []


def test_every_family_with_conversations_has_one() -> None:
    shipped = {name for names in OF_FAMILY.values() for name in names}
    assert shipped == {*OF_TRL, *OTHERS}
    decoders = {name for name, family in FAMILIES.items() if family.base.architecture == "decoder"}
    assert decoders - OF_FAMILY.keys() <= {"gpt2", "xlnet"}  # which never talked
    with pytest.raises(
        InputError, match="no chat template is shipped for qwen9; take one of deepseek, gemma, "
    ):
        named_template("shipped:qwen9")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("name", "theirs"), [(name, each) for name, several in OF_TRL.items() for each in several]
)
def test_what_is_written_and_predicted_is_that_of_trl(name: str, theirs: str, case: str) -> None:
    talk, tools = CASES[case]
    if (
        case in WITHOUT.get(name, ())
        or (tools and name not in CALLING)
        or (case == "thoughts" and name not in THINKING)
    ):
        return
    reference = on_a_day((THEIRS / f"{theirs}_training.jinja").read_text())
    wanted, marked = rendered(reference, talk, tools, marked=True)
    found, ours = rendered(text_of(name), talk, tools, marked=True)
    if name == "deepseek":  # TRL's has no thought where a server opens one
        if case == "thoughts":
            return
        found = found.replace("<think>\n</think>\n\n", "")
        ours = [part.removeprefix("</think>\n\n") for part in ours]
    assert found == wanted
    assert ours == [part.removeprefix(ASKS.get(name, "")) for part in marked]


@pytest.mark.parametrize("name", [*OF_TRL, *OTHERS])
def test_an_answer_is_asked_for_as_its_family_does_and_learnt_whole(name: str) -> None:
    template = Template(text_of(name), TOKENS)
    talk = TURNS
    if name in OF_TRL:
        own = on_a_day((THEIRS / f"{OF_TRL[name][0]}.jinja").read_text())
        asked = rendered(own, talk[:1], None, add_generation_prompt=True)[0]
        assert template.write(talk[:1], None, prompt=True) == asked
    (found,) = written(template, talk, None)
    whole = template.write(talk[:1], None, prompt=True)
    assert found.text.startswith(whole)
    places = found.answers
    assert "".join(found.text[start:stop] for start, stop in places).count("one") == 1
    if name in THINKING:
        texts = written(template, THOUGHTS, None)
        said = "".join(each.text[start:stop] for each in texts for start, stop in each.answers)
        assert "hm" in said
        assert "so" in said
    if name in CALLING:
        (found,) = written(template, CALLED, TOOLS)
        assert len(found.answers) == 3


def test_formats_of_families_that_trl_has_not() -> None:
    """As their model cards write them."""
    talk = [SYSTEM, *TURNS[:2], user("b")]
    assert Template(text_of("llama2"), TOKENS).write(talk, None, prompt=True) == (
        "<BOS>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\na [/INST] one <EOS><BOS>[INST] b [/INST]"
    )
    assert Template(text_of("mistral"), TOKENS).write(talk, None, prompt=True) == (
        "<BOS>[INST] a[/INST] one<EOS>[INST] Be kind.\n\nb[/INST]"
    )
    assert Template(text_of("olmo2"), TOKENS).write(talk, None, prompt=True) == (
        "<BOS><|system|>\nBe kind.\n<|user|>\na\n<|assistant|>\none<EOS>\n<|user|>\nb\n<|assistant|>\n"
    )
