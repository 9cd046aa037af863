"""Which tokens of a conversation are predicted, for every chat template of TRL, compared with what transformers writes,
and with what TRL's own templates for training mark."""

from __future__ import annotations

import json
import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import trl
from hf_tokenizers import of_bytes
from jinja2 import TemplateError
from thin import every
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl_models import a_tokenizer, model_of

from orchestrator.data.prepare.answers import Answers, unmarked, written
from orchestrator.data.prepare.chat_template import CLOCK, Template, dated
from workloads.record_format import MARK

FOLDER = Path(trl.__file__).parent / "chat_templates"
PUBLIC = sorted(path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training"))
TOKENS = {"bos_token": "<BOS>", "eos_token": "<EOS>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "tells the weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "where"}},
                "required": ["city"],
            },
        },
    }
]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(name: str = "get_weather", **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "name": "get_weather", "content": text}


ONE = [user("qone"), answer("aone")]
TWO = [*ONE, user("qtwo"), answer("atwo")]
CALLS = [
    user("qone"),
    answer("", tool_calls=[call(city="rome"), call(city="oslo")]),
    *(result("18"), result("33"), answer("aone")),
]
THOUGHT = [user("qone"), answer("aone", reasoning_content="hmmm")]
TALKS: dict[str, list[dict[str, Any]]] = {"one": ONE, "two": TWO, "calls": CALLS, "thought": THOUGHT}


BYTES = of_bytes()
"""What is a text's is told from its tokens."""
THEIRS = PreTrainedTokenizerFast(tokenizer_object=BYTES)
ASSISTANT, SENTENCE_ENDS = "<\uff5cAssistant\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
"""What DeepSeek's templates write."""
IN_PARTS = ("idefics3", "smolvlm", "llava_next")
"""Templates that read content in parts alone."""


def template_of(name: str) -> str:
    text = (FOLDER / f"{name}.jinja").read_text()
    return dated((text, ()), date(2026, 1, 1))[0] if CLOCK in text else text


def ours(text: str, talk: list[dict[str, Any]]) -> list[list[int]]:
    answers = Answers(BYTES, Template(text, TOKENS), 0)
    found = answers.conversation(json.loads(json.dumps(talk)), TOOLS if talk is CALLS else None)
    return [words.tolist() for words in found]


def by_theirs(name: str, talk: list[dict[str, Any]], tools: Any, **more: Any) -> Any:
    """What transformers makes of a conversation by the template of that name."""
    if name.startswith(IN_PARTS):
        talk = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in talk]
    return THEIRS.apply_chat_template(talk, tools, chat_template=template_of(name), **TOKENS, **more)


def written_by_theirs(name: str, talk: list[dict[str, Any]], tools: Any, **more: Any) -> str:
    return str(by_theirs(name, talk, tools, tokenize=False, **more))


def why_refused(name: str, talk: list[dict[str, Any]]) -> str:
    """Why a conversation cannot be learnt, told by what transformers writes of it; empty if it can."""
    tools = TOOLS if talk is CALLS else None
    if tools and "tells the weather" not in written_by_theirs(name, talk[:1], tools):
        return "the chat template writes no tools"
    try:
        whole = written_by_theirs(name, talk, tools)
    except TemplateError as error:
        return f"the chat template fails: {re.escape(' '.join(str(error).split()))}"
    if talk is THOUGHT and "hmmm" not in whole:
        return "the chat template leaves out the reasoning in message 2"
    if tools and not ("rome" in whole and "oslo" in whole):
        return "the chat template leaves out a call of get_weather in message 2"
    return ""


def answers_in(words: list[int]) -> list[tuple[str, str]]:
    """What is read before each answer, and the answer, as texts."""
    marks = [bool(word & MARK) for word in words] + [False]
    ids = [word & ~MARK for word in words]
    found, begin = [], None
    for place, marked in enumerate(marks):
        if marked and begin is None:
            begin = place
        elif not marked and begin is not None:
            found.append((BYTES.decode(ids[:begin]), BYTES.decode(ids[begin:place])))
            begin = None
    return found


@pytest.mark.contract
@pytest.mark.parametrize("talk", TALKS.values(), ids=TALKS)
@pytest.mark.parametrize("name", every(3, PUBLIC))
def test_each_answer_stands_behind_what_a_server_shows(name: str, talk: list[dict[str, Any]]) -> None:
    text, tools = template_of(name), TOOLS if talk is CALLS else None
    if reason := why_refused(name, talk):
        with pytest.raises(ValueError, match=reason):
            ours(text, talk)
        return
    found = ours(text, talk)
    if Template(text, {}).marks_answers:  # which is taken at its word
        wanted = by_theirs(name, talk, tools, return_dict=True, return_assistant_tokens_mask=True)
        (words,) = found
        assert [word & ~MARK for word in words] == wanted["input_ids"]
        assert [int(bool(word & MARK)) for word in words] == wanted["assistant_masks"]
        return
    said = [each for words in found for each in answers_in(words)]
    numbers = [number for number, message in enumerate(talk) if message["role"] == "assistant"]
    assert len(said) == len(numbers)
    for number, (shown, answered) in zip(numbers, said, strict=True):
        more = {"enable_thinking": True} if (name, talk) == ("qwen3_5_nothink", THOUGHT) else {}
        asked = written_by_theirs(name, talk[:number], tools, add_generation_prompt=True, **more)
        assert shown == asked
        whole = written_by_theirs(name, talk[: number + 1], tools)
        if name.startswith("deepseek"):  # the template opens a thought where it asks, and never writes one
            assert shown.endswith("<think>\n")
            assert answered == f"</think>\n\n{talk[number]['content']}{SENTENCE_ENDS}"
        elif whole.startswith(shown):
            assert shown + answered == whole
        else:  # so does this one, and writes an empty one
            assert name.startswith("nemotron")
            assert shown.endswith("<think>\n")
            assert shown.removesuffix("\n") + answered == whole
    if len(found) == 1 and not name.startswith(("deepseek", "nemotron")):
        ids = by_theirs(name, talk, tools, return_dict=True)["input_ids"]
        assert [word & ~MARK for word in found[0]] == ids


def marked_by_trl(name: str, talk: list[dict[str, Any]], tools: Any) -> str:
    """What TRL's template for training marks of the last message."""
    name = f"{name}_training"
    found = by_theirs(name, talk, tools, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = found["input_ids"], found["assistant_masks"]
    before = BYTES.encode(str(talk[-2]["content"])).ids
    last = max(at for at in range(len(ids)) if ids[at : at + len(before)] == before)
    return str(BYTES.decode([one for at, one in enumerate(ids) if mask[at] and at > last]))


UNLIKE = {
    ("glm4moe", "*"): "TRL writes the token of the next turn, which ends an answer; the template itself none",
    ("diffusion_gemma", "calls"): "TRL leaves out what the template writes around a tool's result",
}


@pytest.mark.contract
@pytest.mark.parametrize("talk", TALKS.values(), ids=TALKS)
@pytest.mark.parametrize("name", [name for name in PUBLIC if (FOLDER / f"{name}_training.jinja").exists()])
def test_what_is_predicted_is_what_trl_marks_without_what_a_server_shows(
    name: str, talk: list[dict[str, Any]]
) -> None:
    kind = next(key for key, value in TALKS.items() if value is talk)
    text, tools = template_of(name), TOOLS if talk is CALLS else None
    if why_refused(name, talk) or {(name, kind), (name, "*")} & UNLIKE.keys():
        return
    said = [each for words in ours(text, talk) for each in answers_in(words)]
    numbers = [number for number, message in enumerate(talk) if message["role"] == "assistant"]
    for number, (shown, answered) in zip(numbers, said, strict=True):
        theirs = marked_by_trl(name, talk[: number + 1], tools)
        cue = next(n for n in range(len(theirs), -1, -1) if shown.endswith(theirs[:n]))
        if name.startswith("nemotron") and talk is not THOUGHT:
            assert theirs == f"<think>{answered}"
        elif name.startswith("deepseek"):
            assert answered.removeprefix("</think>\n\n") == theirs.removeprefix(ASSISTANT)
        else:
            assert answered.rstrip() == theirs[cue:].rstrip()


CHATML = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content and loop.last %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}</>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Writes a thought before the last answer alone."""


def test_answers_stand_together_as_long_as_the_template_leaves_them_as_they_are() -> None:
    thinks = answer("b", reasoning_content="hm")
    talk = [user("1"), answer("a"), user("2"), thinks, user("3"), answer("c"), user("4")]
    first, second = written(Template(CHATML, {}), talk, None)
    assert first.text == "<user>1</><assistant>a</><user>2</><assistant>(hm)b</>"
    assert [first.text[slice(*place)] for place in first.answers] == ["a</>", "(hm)b</>"]
    assert (
        second.text == "<user>1</><assistant>a</><user>2</><assistant>b</><user>3</><assistant>c</><user>4</>"
    )
    assert [second.text[slice(*place)] for place in second.answers] == ["c</>"]
    # What only is read needs no text of its own.
    talk[3] = {**thinks, "weight": 0}
    (alone,) = written(Template(CHATML, {}), talk, None)
    assert alone.text == second.text
    assert [alone.text[slice(*place)] for place in alone.answers] == ["a</>", "c</>"]


def test_of_a_preference_one_answer_is_learnt() -> None:
    answers = Answers(BYTES, Template(CHATML, {}), 0)
    thinks = answer("b", reasoning_content="hm")
    talk = [user("1"), answer("a", reasoning_content="so"), user("2")]
    words = answers.after(talk, [thinks], "chosen").tolist()
    assert answers_in(words) == [("<user>1</><assistant>a</><user>2</><assistant>", "(hm)b</>")]
    says = "its chosen has 2 answers that the chat template does not write as one text; give one of them"
    with pytest.raises(ValueError, match=says):
        answers.after([user("0")], [talk[1], user("2"), thinks], "chosen")


FIRST_CALL = CHATML.replace("in m.tool_calls or []", "in (m.tool_calls or [])[:1]")
BARE_CALL = CHATML.replace(" {{ c.function.arguments | tojson }}", "")
NO_TOOLS = CHATML.replace("tools | tojson", "'tools'")
NO_RESULT = CHATML.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' }}")
NO_THOUGHT = CHATML.replace("{% if m.reasoning_content and loop.last %}", "{% if false %}")
MARKED = CHATML.replace("{{ m.content }}", "{% generation %}{{ m.content }}").replace(
    "</>{% endfor %}", "</>{% endgeneration %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "talk", "says"),
    [
        (FIRST_CALL, CALLS, "leaves out a call of get_weather in message 2; name one that writes it"),
        (BARE_CALL, CALLS, "leaves out a call of get_weather in message 2"),
        (NO_TOOLS, CALLS, "writes no tools; name one that does in data.chat_template"),
        (NO_RESULT, CALLS, "leaves out the content in message 3"),
        (NO_THOUGHT, THOUGHT, "leaves out the reasoning in message 2"),
        (NO_THOUGHT, [user("hmmm?"), answer("", reasoning_content="hmmm")], "leaves out the reasoning in message 2"),
        (MARKED, THOUGHT, "leaves out the reasoning in message 2"),  # it is written, and not marked
    ],
    ids=["first call", "arguments", "tools", "result", "thought", "thought alone", "marked"],
)  # fmt: skip
def test_what_a_template_leaves_out_is_refused_though_it_stands_elsewhere(
    template: str, talk: list[dict[str, Any]], says: str
) -> None:
    tools = TOOLS if talk is CALLS else None
    with pytest.raises(ValueError, match=says):
        Answers(BYTES, Template(template, {}), 0).conversation(talk, tools)


@pytest.mark.parametrize(
    "arguments",
    [
        {"city": 'L\'Aquila "x"\n\\n'},
        {"city": "Z\u00fcrich <&> \u6771\u4eac"},
        {"days": 3, "wind": 1e-7, "much": 10**20, "less": -2.5},
        {"yes": True, "no": False, "none": None},
        {"deep": {"list": [1, "two", {"three": None}], "empty": {}}, "texts": ["a", "b c"]},
        {},
        {"city": ""},
    ],
    ids=["quotes", "letters", "numbers", "truth", "deep", "none", "empty"],
)
@pytest.mark.parametrize(
    "name", ["qwen3", "glm4moe", "gemma4", "lfm2_v2", "lfm2_2_5", "muse_glimmer", "qwen3_6"]
)
def test_arguments_are_found_in_whatever_form_a_template_writes_them(
    name: str, arguments: dict[str, Any]
) -> None:
    talk = [
        user("q"),
        answer("", tool_calls=[call(**arguments)]),
        result('{"t": "18 °C"}'),
        answer("It's <18>\n"),
    ]
    found = written(Template(template_of(name), TOKENS), talk, TOOLS)
    assert sum(len(each.answers) for each in found) == 2


AS_TEXT = CHATML.replace("{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}")


@pytest.mark.parametrize("given", [{"city": "rome"}, '{"city": "rome"}'], ids=["mapping", "text"])
def test_a_template_that_joins_texts_is_given_arguments_as_text(given: Any) -> None:
    """DeepSeek V3's does, and would fail as it does in transformers for a mapping."""
    said = {"type": "function", "function": {"name": "get_weather", "arguments": given}}
    talk = [user("q"), {"role": "assistant", "content": None, "tool_calls": [said]}]
    template = AS_TEXT.replace("{{ m.content }}", "{{ m.content + '' }}")
    (words,) = Answers(BYTES, Template(template, {}), 0).conversation(talk, None)
    assert answers_in(words.tolist()) == [("<user>q</><assistant>", '[get_weather {"city": "rome"}]</>')]
    (words,) = Answers(BYTES, Template(template_of("deepseekv3"), TOKENS), 0).conversation(talk, None)
    said["function"] = {"name": "get_weather", "arguments": '{"city": "rome"}'}
    theirs = written_by_theirs("deepseekv3", [talk[0], answer("", tool_calls=[said])], None)
    ((_, answered),) = answers_in(words.tolist())
    assert answered == f"</think>\n\n{theirs.rpartition(ASSISTANT)[2]}"


def test_what_comes_before_an_answer_is_what_a_server_shows_though_the_answer_changes_it() -> None:
    """gpt-oss forgets the thoughts before a call as soon as there is a final answer."""
    talk = [
        user("q"),
        answer("", reasoning_content="I ask", tool_calls=[call(city="rome")]),
        result("18"),
        answer("It is 18", reasoning_content="I tell"),
    ]
    (found,) = ours(template_of("gptoss"), talk)
    (_, first), (shown, second) = answers_in(found)
    assert first.startswith("<|channel|>analysis<|message|>I ask<|end|>")
    assert shown == written_by_theirs("gptoss", talk[:3], None, add_generation_prompt=True)
    assert second == (
        "<|channel|>analysis<|message|>I tell<|end|><|start|>assistant<|channel|>final<|message|>It is 18<|return|>"
    )


def test_thoughts_that_stand_in_the_content_are_learnt_or_missed() -> None:
    talk = [user("q"), answer("<think>\nhm\n</think>\n\nok"), user("p"), answer("<think>so</think>yes")]
    found = [answers_in(words) for words in ours(template_of("qwen3"), talk)]
    assert [[said for _, said in each] for each in found] == [
        ["<think>\nhm\n</think>\n\nok<|im_end|>\n"],
        ["<think>\nso\n</think>\n\nyes<|im_end|>\n"],
    ]
    with pytest.raises(ValueError, match="leaves out the reasoning in message 2"):
        ours(template_of("deepseek_r1_distill"), talk)


def test_a_run_of_an_earlier_version_keeps_what_it_asked_of_a_template() -> None:
    answers = Answers(BYTES, Template(NO_THOUGHT, {}), 0, data_format=5)
    (words,) = answers.conversation(THOUGHT)
    assert answers_in(words.tolist()) == [("<user>qone</><assistant>", "aone</>")]
    with pytest.raises(ValueError, match="writes message 2 differently when others follow"):
        Answers(BYTES, Template(template_of("qwen3"), TOKENS), 0, data_format=5).conversation(TWO)


@pytest.mark.parametrize("name", ["qwen3_5_think", "qwen3_6", "qwen3_8"])
def test_the_tokens_before_an_answer_are_those_that_a_server_has(name: str) -> None:
    """An answer without a thought begins with the end of a line, which this tokenizer would join to that of the prompt:
    the model would never have seen what it is asked with."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate([*letters, "\u010a\u010a"])}
    joins = Tokenizer(models.BPE(words, [("\u010a", "\u010a")]))
    joins.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    joins.decoder = decoders.ByteLevel()
    (words_of,) = Answers(joins, Template(template_of(name), TOKENS), 0).conversation(ONE)
    asked = written_by_theirs(name, ONE[:1], None, add_generation_prompt=True)
    prompt = joins.encode(asked).ids
    ids, marks = unmarked(words_of).tolist(), ((words_of & MARK) > 0).tolist()
    assert asked.endswith("<think>\n")
    assert ids[: len(prompt)] == prompt
    assert marks == [False] * len(prompt) + [True] * (len(ids) - len(prompt))
    assert joins.decode(ids) == written_by_theirs(name, ONE, None)
    assert joins.encode(joins.decode(ids)).ids[: len(prompt)] != prompt


def test_a_tokenizer_that_adds_a_space_where_a_text_begins_reads_the_whole() -> None:
    words = {"[UNK]": 0, "\u2581": 1, "\u2581a": 2, "a": 3, "\n": 4, "\n\n": 5, "<": 6, ">": 7}
    found = Tokenizer(models.BPE(words, [("\u2581", "a"), ("\n", "\n")], unk_token="[UNK]"))
    found.pre_tokenizer, found.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    template = (
        "{% for m in messages %}<{{ m.content }}>\n{% endfor %}{% if add_generation_prompt %}<\n{% endif %}"
    )
    template = template.replace("<{{ m.content }}", "<{{ '\n\n' if m.role == 'assistant' }}{{ m.content }}")
    talk = [user("a"), answer("a")]
    (words_of,) = Answers(found, Template(template, {}), 0).conversation(talk)
    text = Template(template, {}).write(talk, None)
    assert unmarked(words_of).tolist() == found.encode(text).ids


SPOKEN = (
    "{% for m in messages %}{{ 'w8 ' if m.role == 'user' else 'w9 ' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{% endgeneration %} {% else %}{{ m.content }} {% endif %}{% endfor %}"
)


def test_trl_trains_all_of_a_conversation_by_default_and_here_the_answers_alone(tmp_path: Path) -> None:
    """TRL asks for `assistant_only_loss`; of a prompt with a completion it trains the completion."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model, words = model_of(tmp_path / "model", "LlamaForCausalLM"), a_tokenizer(tmp_path)
    words.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.chat_template = SPOKEN
    talk = [user("w40 w41"), answer("w50 w51")]

    def trained(row: dict[str, Any], **options: Any) -> list[int]:
        args = SFTConfig(output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False, **options)
        trainer = SFTTrainer(
            model=model, args=args, train_dataset=Dataset.from_list([row]), processing_class=words
        )
        (labels,) = trainer.data_collator([trainer.train_dataset[0]])["labels"].tolist()
        return [label for label in labels if label != -100]

    assert trained({"messages": talk}) == [8, 40, 41, 9, 50, 51]
    assert trained({"messages": talk}, assistant_only_loss=True) == [50, 51]
    assert trained({"prompt": talk[:1], "completion": talk[1:]})[-2:] == [50, 51]
    (ours,) = Answers(words.backend_tokenizer, Template(SPOKEN, {}), 0).conversation(talk)
    assert [word & ~MARK for word in ours.tolist() if word & MARK] == [50, 51]
