"""Prompts as a user's turns: by which template, for which data, and with which token an answer ends."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import job
from letters import TEMPLATE, WORDS, write_tokenizer
from prepared import prepare_here
from tokenizers import Tokenizer, models, pre_tokenizers

from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec, parse
from orchestrator.data.store.tokens import Tokens
from orchestrator.resolve.chat import Chat, chat_of, unclosed
from orchestrator.resolve.prompts import prompts_of, speaking, spoken
from orchestrator.resolve.resolved_job import resolve
from orchestrator.resolve.training_inputs import workload_of
from workloads.hf.check.compare import load as load_theirs
from workloads.inference import with_weights
from workloads.workload import Sampling

TURNS = TEMPLATE.replace("<|endoftext|>", "[SEP]")
ASKED, ANSWER = {"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}
TALK = {"messages": [ASKED, ANSWER]}
COMPARED = {"prompt": [ASKED], "chosen": [ANSWER], "rejected": [{"role": "assistant", "content": "e"}]}
TEXTS = {"prompt": "a b", "chosen": " c d", "rejected": " e"}


def ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def prepared(
    folder: Path, objective: str, row: dict[str, Any], template: str = TURNS
) -> tuple[JobSpec, Tokens]:
    """A job on twenty such rows, and its prepared data."""
    (folder / "rows.jsonl").write_text((json.dumps(row) + "\n") * 20)
    write_tokenizer(folder, False)
    (folder / "chat_template.jinja").write_text(template)
    document = job(str(folder / "rows.jsonl"))
    document["workload"]["objective"] = objective
    document["data"]["sources"][0]["field"] = {name: name for name in row}
    document["data"]["tokenizer"] = str(folder)
    document["data"] |= {"chat_date": date(2026, 11, 28)} if "strftime_now" in template else {}
    document["evaluate"] = {"samples": {"prompts": ["a b", "c"], "tokens": 4}}
    spec = parse(document)
    return spec, Tokens.open(prepare_here(spec, str(folder / "cache")))


def test_a_prompt_is_a_turn_as_the_data_has_it(tmp_path: Path) -> None:
    spec, tokens = prepared(tmp_path, "conversation", TALK)
    found = prompts_of(
        resolve(spec), workload_of(spec.workload, spec.data, spec.train, spec.seed, tokens), tokens
    )
    assert found is not None
    assert found.rows == [ids("user : a b [SEP] assistant :"), ids("user : c [SEP] assistant :")]
    assert {*found.generation.ends} == {WORDS.index("[SEP]"), WORDS.index("<|endoftext|>")}
    assert found.decode(ids("c d [SEP]")) == "c d"
    assert (tokens.window(0, 0, 7) & 0xFFFF).tolist() == found.rows[0]


def test_an_exported_chat_model_ends_its_turn_in_transformers(tmp_path: Path) -> None:
    """Of what is most probable the end of a turn comes first, else the text would run on."""
    spec, tokens = prepared(tmp_path, "conversation", TALK)
    turn, eos = WORDS.index("[SEP]"), WORDS.index("<|endoftext|>")
    workload = speaking(
        workload_of(spec.workload, spec.data, spec.train, spec.seed, tokens),
        chat_of(spec.data, spec.workload.objective, tokens),
    )
    likely = {"sequence_bias": [[[turn], 1000.0]]}
    workload = replace(workload, generation=replace(workload.generation, settings=likely))
    workload.to_hf(lambda name: workload.initial(name, 0), str(tmp_path / "out"))
    model = load_theirs(str(tmp_path / "out"))
    assert model.config.eos_token_id == model.generation_config.eos_token_id == [eos, turn]
    prompt = ids("user : a b [SEP] assistant :")
    given = torch.tensor([prompt])
    said = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=5, do_sample=False)
    ours = workload.generate(
        with_weights(workload, lambda name: workload.initial(name, 0)), [prompt], 5, Sampling()
    )
    assert said[0, len(prompt) :].tolist() == ours[0] == [turn]


def test_the_template_is_that_of_the_data_even_if_its_file_is_gone(tmp_path: Path) -> None:
    """A run is moved; of data that an earlier version prepared the file is needed."""
    spec, tokens = prepared(tmp_path, "conversation", TALK, "{{ strftime_now('%j') }} " + TURNS)
    before = {name: Path(tmp_path, name).read_text() for name in ("chat_template.jinja", "tokenizer.json")}
    Path(tmp_path, "chat_template.jinja").unlink()
    chat = chat_of(spec.data, spec.workload.objective, tokens)
    assert chat is not None
    unknown = WORDS.index("[UNK]")  # the day is not a word of this tokenizer
    assert chat.row("a") == [unknown, *ids("user : a [SEP] assistant :")]
    tokens.manifest.chat.clear()
    with pytest.raises(InputError, match="has no chat template"):
        chat_of(spec.data, spec.workload.objective, tokens)
    Path(tmp_path, "chat_template.jinja").write_text(before["chat_template.jinja"])
    again = chat_of(spec.data, spec.workload.objective, tokens)
    assert again is not None
    assert again.row("a") == chat.row("a")


@pytest.mark.parametrize(
    ("objective", "row", "talks"),
    [("dpo", COMPARED, True), ("dpo", TEXTS, False), ("causal_lm", {"text": "a b"}, False)],
    ids=["messages", "texts", "text"],
)
def test_preferences_are_turns_where_their_rows_are_messages(
    tmp_path: Path, objective: str, row: dict[str, Any], talks: bool
) -> None:
    if objective == "causal_lm":
        spec, tokens = prepared(tmp_path, "conversation", TALK)
        spec = spec.model_copy(update={"workload": spec.workload.model_copy(update={"objective": objective})})
    else:
        spec, tokens = prepared(tmp_path, objective, row)
    assert (chat_of(spec.data, spec.workload.objective, tokens) is not None) == talks


def test_an_answer_ends_at_the_token_behind_it(tmp_path: Path) -> None:
    _, tokens = prepared(tmp_path, "conversation", TALK)
    tokenizer = tokens.tokenizer()
    assert Chat(TURNS, {}, tokenizer).ends == {WORDS.index("[SEP]")}
    named = TEMPLATE.replace("<|endoftext|>", "{{ eos_token }}")
    assert Chat(named, {"eos_token": "[CLS]"}, tokenizer).ends == {WORDS.index("[CLS]")}
    assert Chat(TEMPLATE.replace("<|endoftext|>", ":"), {}, tokenizer).ends == frozenset()
    failing = Chat("{{ raise_exception('no turns') }}", {}, tokenizer)
    assert failing.ends == frozenset()
    with pytest.raises(
        InputError, match=r"cannot write a user message .the chat template fails: no turns.; fix"
    ):
        failing.row("a")
    assert spoken(tokenizer, ids("c d"), failing) == "c d"


@pytest.mark.parametrize(
    ("file", "teaches"),
    [
        ("glm4moe", False),
        ("glm4moe_training", True),
        ("qwen2_5", True),
        ("qwen2_5_training", True),
        ("phi3", True),
    ],
)
def test_it_is_said_where_no_answer_is_closed(file: str, teaches: bool) -> None:
    """Of GLM 4 MoE's own template nothing closes the last answer."""
    import trl

    text = (Path(trl.__file__).parent / "chat_templates" / f"{file}.jinja").read_text()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens([*dict.fromkeys(re.findall(r"<\|\w+\|>", text)), "<|endoftext|>"])
    chat = Chat(text, {"eos_token": "<|endoftext|>"}, made)
    assert chat.teaches_to_stop == teaches
    assert ["the model does not learn to stop" in line for line in unclosed(chat)] == [True] * (not teaches)
    assert unclosed(None) == []


def test_an_end_that_is_not_marked_is_not_learnt(tmp_path: Path) -> None:
    whole = (
        "{% for m in messages %}{{ m.role }} : {% if m.role == 'assistant' %}{% generation %}{{ m.content }} [SEP]"
        "{% endgeneration %}{% else %}{{ m.content }} [SEP] {% endif %}{% endfor %}"
    )
    outside = whole.replace(" [SEP]{% endgeneration %}", "{% endgeneration %} [SEP]")
    write_tokenizer(tmp_path, False)
    made = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    found = [Chat(text, {}, made).teaches_to_stop for text in (whole, outside)]
    assert found == [True, False]
