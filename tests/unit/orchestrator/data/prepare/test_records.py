"""Rows to records: what each objective reads of them, and what is wrong with a row, by file and line."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hf_tokenizers
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from orchestrator.config.errors import InputError
from orchestrator.config.records import problem_of
from orchestrator.data import sources
from orchestrator.data.config import Source
from orchestrator.data.encoding import tokenizer
from orchestrator.data.encoding.training import train_bytes
from orchestrator.data.prepare import records
from orchestrator.data.prepare.chat_template import Template
from orchestrator.data.prepare.records import Record, RecordKind, records_of
from orchestrator.data.sources import lines
from workloads.record_format import MARK, from_bits, unpack

WORDS = ["<|endoftext|>", "a", "good", "bad", "film", "is", "user", "assistant", ":", "|", "it", "[UNK]"]
CHATML = (
    "{% for m in messages %}{{ m.role }} : {{ m.content }} | {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ m.role }} : {% if m.role == 'assistant' %}{% generation %}{{ m.content }} |"
    "{% endgeneration %}{% else %}{{ m.content }} |{% endif %} {% endfor %}"
)
TALK = [
    {"role": "user", "content": "a film"},
    {"role": "assistant", "content": "is good"},
    {"role": "user", "content": "it"},
    {"role": "assistant", "content": "is bad"},
]


@pytest.fixture(scope="module")
def encoder() -> Tokenizer:
    found = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer.encoder(found.to_str())


def read(
    path: Path, kind: RecordKind, columns: dict[str, str], encoder: Tokenizer, parts: int = 1
) -> list[Record]:
    files = sources.resolve([Source(uri=str(path), field=columns)])
    cut = sources.cut(files, max(1, -(-files[0].size // parts)))
    return [record for part in cut for span in part for record in records_of(span, kind, encoder, 0)]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


KIND = RecordKind("sequence_classification", ("bad", "good"))
COLUMNS = {"text": "review", "label": "stars"}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".csv"])
def test_every_kind_of_file_gives_the_same_records(suffix: str, encoder: Tokenizer, tmp_path: Path) -> None:
    rows = [{"review": f"a film\n{'is good ' * n}", "stars": "good" if n % 2 else "0"} for n in range(9)]
    found = read(written(tmp_path / f"rows{suffix}", rows), KIND, COLUMNS, encoder, parts=3)
    assert len(found) == 9
    for n, record in enumerate(found):
        text, pair, label = unpack(record.words)
        assert text.tolist() == [1, 4, *[5, 2] * n]
        assert (pair.tolist(), label.tolist()) == ([], [n % 2])
        assert record.tokens.tolist() == text.tolist()


def one(
    row: dict[str, Any], kind: RecordKind, columns: dict[str, str], encoder: Tokenizer, folder: Path
) -> np.ndarray:
    (found,) = read(written(folder / "one.jsonl", [row]), kind, columns, encoder)
    return found.words


def test_numbers_words_and_spans(encoder: Tokenizer, tmp_path: Path) -> None:
    _, _, label = unpack(
        one({"t": "a", "l": -1.25}, RecordKind("regression"), {"text": "t", "label": "l"}, encoder, tmp_path)
    )
    assert from_bits(int(label[0])) == -1.25
    columns = {"words": "w", "labels": "l"}
    kind = RecordKind("token_classification", ("O", "B"))
    text, marks = unpack(
        one({"w": ["a", "good|film", "is"], "l": ["O", "B", 0]}, kind, columns, encoder, tmp_path)
    )
    assert (text.tolist(), marks.tolist()) == ([1, 2, 9, 4, 5], [1, 2, 0, 0, 1])
    columns = {"question": "q", "context": "c", "answer": "a.text.0", "start": "a.at.0"}
    row = {"q": "is it", "c": "a good film", "a": {"text": ["good film"], "at": [2]}}
    _, context, place = unpack(one(row, RecordKind("span_extraction"), columns, encoder, tmp_path))
    assert (context.tolist(), place.tolist()) == ([1, 2, 4], [2, 3])
    row["a"] = {"text": [], "at": []}
    assert unpack(one(row, RecordKind("span_extraction"), columns, encoder, tmp_path))[2].tolist() == [0, 0]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["by prompts", "marked"])
def test_only_answers_are_predicted(template: str, encoder: Tokenizer, tmp_path: Path) -> None:
    kind = RecordKind("conversation", (), template)
    words = one({"m": TALK}, kind, {"messages": "m"}, encoder, tmp_path).astype(np.int64)
    said = [WORDS[word & ~MARK] for word in words if word & MARK]
    assert said == ["is", "good", "|", "is", "bad", "|"]
    everything = " ".join(f"{m['role']} : {m['content']} |" for m in TALK).split()
    assert [WORDS[word & ~MARK] for word in words] == everything


SHAREGPT = {"user": "human", "assistant": "gpt"}


def as_sharegpt(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"from": SHAREGPT[each["role"]], "value": each["content"]} for each in messages]


def test_messages_in_the_manner_of_sharegpt_are_the_same(encoder: Tokenizer, tmp_path: Path) -> None:
    kind = RecordKind("conversation", (), CHATML)
    words = [
        one({"m": talk}, kind, {"messages": "m"}, encoder, tmp_path) for talk in (TALK, as_sharegpt(TALK))
    ]
    assert words[0].tolist() == words[1].tolist()
    pairs = []
    for talk in (TALK, as_sharegpt(TALK)):
        row = {"p": talk[:3], "c": talk[3:], "r": talk[1]}  # one message may stand alone
        pairs.append(one(row, RecordKind("dpo", (), CHATML), PAIR, encoder, tmp_path).tolist())
    assert pairs[0] == pairs[1]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"i": "a film", "x": "", "o": "is good"}, "user : a film | assistant : is good |"),
        ({"i": "a film", "x": "is bad", "o": "it"}, "user : a film is bad | assistant : it |"),
        ({"i": TALK[:1], "o": "is good"}, "user : a film | assistant : is good |"),
        ({"i": TALK[:3], "o": "it"}, "user : a film | assistant : is good | user : it | assistant : it |"),
    ],
    ids=["text", "text below another", "a message", "messages"],
)  # fmt: skip
def test_two_columns_are_a_conversation_whose_answer_is_predicted(
    row: dict[str, Any], said: str, encoder: Tokenizer, tmp_path: Path
) -> None:
    columns = {"prompt": "i" if isinstance(row["i"], list) else "{i}\n\n{x}", "completion": "o"}
    written: list[str] = []

    class Kept(Template):
        def render(self, messages: Any, tools: Any = None) -> Any:
            written.extend(each["content"] for each in messages)
            return super().render(messages, tools)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "Template", Kept)
        words = one(row, RecordKind("conversation", (), CHATML), columns, encoder, tmp_path)
    assert said_in(words) == (said, f"{row['o']} |")
    assert [text for text in written if text != text.strip()] == []


def test_a_template_is_rendered_as_transformers_does(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    theirs.chat_template = "{{ bos_token }}" + CHATML
    theirs.bos_token = "<s>"
    assert Template(theirs.chat_template, {"bos_token": "<s>"}).render(TALK)[0] == theirs.apply_chat_template(
        TALK, tokenize=False
    )


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_calls_of_tools_are_the_same_from_lines_and_from_a_table(
    suffix: str, encoder: Tokenizer, tmp_path: Path
) -> None:
    """A table gives a message the keys of all others, and a call the arguments of all others, with null."""
    template = (
        "{% for t in tools or [] %}{{ t.function.name }} | {% endfor %}{% for m in messages %}{{ m.role }} : "
        "{% if 'tool_calls' in m %}{% for c in m.tool_calls %}{{ c.function.name }} {% for k, v in "
        "c.function.arguments | items %}{{ k }} {{ v }}{% endfor %}{% endfor %}"
        "{% else %}{{ m.content }}{% endif %} | {% endfor %}"
        "{% if add_generation_prompt %}assistant : {% endif %}"
    )

    def row(name: str) -> dict[str, Any]:
        call = {"function": {"name": name, "arguments": {name: "film"}}}
        said = {"role": "assistant", "tool_calls": [call]}
        return {"m": [TALK[0], said, *TALK[2:]], "t": [{"function": {"name": name}}]}

    columns = {"messages": "m", "tools": "t"}
    path = written(tmp_path / f"rows{suffix}", [row("good"), row("bad"), {"m": TALK, "t": None}])
    found = read(path, RecordKind("conversation", (), template), columns, encoder)
    assert [said_in(record.words) for record in found] == [
        (
            "good | user : a film | assistant : good good film | user : it | assistant : is bad |",
            "good good film | is bad |",
        ),
        (
            "bad | user : a film | assistant : bad bad film | user : it | assistant : is bad |",
            "bad bad film | is bad |",
        ),
        ("user : a film | assistant : is good | user : it | assistant : is bad |", "is good | is bad |"),
    ]


OTHERWISE = (
    "{% for m in messages %}{{ m.role }} : {{ m.content }} "
    "{{ 'film' if loop.last and m.role == 'assistant' else '|' }} {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)
"""Writes another end of the last message."""


def test_a_conversation_is_several_records_where_its_template_writes_earlier_answers_otherwise(
    encoder: Tokenizer, tmp_path: Path
) -> None:
    kind, columns = RecordKind("conversation", (), OTHERWISE), {"messages": "m"}
    path = written(tmp_path / "rows.jsonl", [{"m": TALK}, {"m": TALK[:2]}, {"m": TALK[2:]}])
    found = read(path, kind, columns, encoder)
    assert [said_in(record.words) for record in found] == [
        ("user : a film | assistant : is good film", "is good film"),
        ("user : a film | assistant : is good | user : it | assistant : is bad film", "is bad film"),
        ("user : a film | assistant : is good film", "is good film"),
        ("user : it | assistant : is bad film", "is bad film"),
    ]
    assert [record.goes_on for record in found] == [True, False, False, False]
    assert len({record.text for record in found}) == 3  # a row is held out whole
    columns = {"prompt": "p", "completion": "c"}
    path = written(tmp_path / "columns.jsonl", [{"p": TALK[:1], "c": TALK[1:]}])
    assert [said_in(record.words)[1] for record in read(path, kind, columns, encoder)] == [
        "is good film",
        "is bad film",
    ]


def test_the_key_of_records_is_that_of_earlier_versions_unless_there_is_a_template_for_tools() -> None:
    plain, tools = RecordKind("dpo", (), "a", (("b", "c"),)), RecordKind("dpo", (), "a", (("b", "c"),), "d")
    before = {"objective": "dpo", "labels": (), "template": "a", "tokens": (("b", "c"),)}
    assert plain.to_json() == tools.to_json(5) == before
    assert tools.to_json() == {**before, "tool_template": "d"}
    for each in (plain, tools):
        assert RecordKind.from_json(json.loads(json.dumps(each.to_json()))) == each


def wrong() -> Iterator[tuple[str, RecordKind, dict[str, str], dict[str, Any], str]]:
    talk = RecordKind("conversation", (), CHATML)
    span = {"question": "q", "context": "c", "answer": "a", "start": "s"}
    number, spans = RecordKind("regression"), RecordKind("span_extraction")
    words, pairs = RecordKind("token_classification", ("O", "B")), {"words": "w", "labels": "l"}
    yield "label", KIND, COLUMNS, {"review": "a", "stars": 2}, "its label 2 is not among 0 to 1"
    yield "name", KIND, COLUMNS, {"review": "a", "stars": "fine"}, "its label 'fine' is not one of bad, good"
    yield "column", KIND, COLUMNS, {"review": "a"}, "has no 'stars'"
    yield "text", KIND, COLUMNS, {"review": 7, "stars": 1}, "its text is int, not a text"
    yield (
        "number",
        number,
        COLUMNS,
        {"review": "a", "stars": "x"},
        "its label 'x' is not a number",
    )
    yield (
        "nan",
        number,
        COLUMNS,
        {"review": "a", "stars": float("nan")},
        "its label nan is not finite",
    )
    yield (
        "many",
        words,
        pairs,
        {"w": ["a"], "l": []},
        "1 words",
    )
    yield (
        "span",
        spans,
        span,
        {"q": "a", "c": "a film", "a": "film", "s": 3},
        "is not at character",
    )
    yield (
        "role",
        talk,
        {"messages": "m"},
        {"m": [{"role": "me", "content": "a"}]},
        "the role 'me' of its message 1",
    )
    yield "none", talk, {"messages": "m"}, {"m": TALK[:1]}, "it has no answer of the assistant"
    yield "empty", talk, {"messages": "m"}, {"m": []}, "not a list of messages"
    silent = [*TALK[:3], {"role": "assistant", "content": ""}]
    yield "silent", talk, {"messages": "m"}, {"m": silent}, "its message 4, of the assistant, is empty"
    bad = RecordKind("conversation", (), "{{ raise_exception('roles must alternate') }}")
    yield "template", bad, {"messages": "m"}, {"m": TALK}, "the chat template fails: roles must alternate"
    sly = RecordKind("conversation", (), "{{ ''.__class__.__mro__[1].__subclasses__() }}")
    yield "sandbox", sly, {"messages": "m"}, {"m": TALK}, "the chat template fails: .*unsafe"


@pytest.mark.parametrize(
    ("kind", "columns", "row", "says"), [case[1:] for case in wrong()], ids=[case[0] for case in wrong()]
)
def test_a_wrong_row_is_named_with_its_line(
    kind: RecordKind,
    columns: dict[str, str],
    row: dict[str, Any],
    says: str,
    encoder: Tokenizer,
    tmp_path: Path,
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n\n" + json.dumps(row) + "\n")
    with pytest.raises(InputError, match=f"rows.jsonl: line 3, at byte [0-9]+: .*{says}") as error:
        read(path, kind, columns, encoder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("objective", "field", "says"),
    [
        ("sequence_classification", "text", "give {text: <column>, label: <column>}"),
        ("sequence_classification", {"text": "a"}, "lacks label"),
        ("seq2seq", {"source": "a", "target": "b", "label": "c"}, "has label, which seq2seq does not read"),
        ("causal_lm", {"text": "a"}, "causal_lm reads text"),
        ("regression", {"text": "a", "label": "b", "pair": "c"}, ""),
        ("conversation", "text", "give {messages: <column>} or {prompt: <column>, completion: <column>}"),
        ("conversation", {"prompt": "a"}, "lacks completion"),
        ("conversation", {"prompt": "a", "completion": "b", "tools": "c"}, ""),
        ("conversation", {"prompt": "a", "completion": "b", "messages": "c"}, "has messages, which"),
    ],
)
def test_columns_that_do_not_fit_the_objective(objective: str, field: Any, says: str) -> None:
    found = problem_of(objective, field)
    assert says in found
    assert bool(found) == bool(says)


def test_a_line_without_end_is_refused(
    encoder: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "LINE_BYTES", 2**20)
    path = tmp_path / "rows.jsonl"
    path.write_text(
        json.dumps({"t": "a film", "l": 0}) + "\n" + json.dumps({"t": "a" * 2**20, "l": 0}) + "\n"
    )
    with pytest.raises(InputError, match=r"line 2, at byte [0-9]+: is longer than 1 MiB"):
        read(path, RecordKind("sequence_classification", ("bad",)), {"text": "t", "label": "l"}, encoder)


PAIR = {"prompt": "p", "chosen": "c", "rejected": "r"}


def said_in(words: np.ndarray) -> tuple[str, str]:
    """All words of an answer with its prompt, and those that are predicted."""
    words = words.astype(np.int64)
    everything = [WORDS[word & ~MARK] for word in words]
    return " ".join(everything), " ".join(WORDS[word & ~MARK] for word in words if word & MARK)


def test_pairs_of_texts_end_and_those_of_messages_are_written_by_the_template(
    encoder: Tokenizer, tmp_path: Path
) -> None:
    row = {"p": "a film ", "c": "is good", "r": "is bad"}
    first, second = unpack(one(row, RecordKind("dpo"), PAIR, encoder, tmp_path))
    assert said_in(first) == ("a film is good <|endoftext|>", "is good <|endoftext|>")
    assert said_in(second) == ("a film is bad <|endoftext|>", "is bad <|endoftext|>")
    wanted = ("user : a film | assistant : is good | user : it | assistant : is bad |", "is bad |")
    for template in (CHATML, MARKED):
        kind = RecordKind("dpo", (), template)
        good = [{"role": "assistant", "content": "good"}]
        for row in (
            {"p": TALK[:3], "c": good, "r": TALK[3:]},
            {"p": TALK[:3], "c": "good", "r": "is bad"},
            {"c": [*TALK[:3], *good], "r": TALK},
        ):
            columns = PAIR if "p" in row else {"chosen": "c", "rejected": "r"}
            first, second = unpack(one(row, kind, columns, encoder, tmp_path))
            assert said_in(second) == wanted
            assert said_in(first)[1] == "good |"


def test_a_judged_answer(encoder: Tokenizer, tmp_path: Path) -> None:
    columns = {"prompt": "p", "completion": "c", "label": "l"}
    words, label = unpack(
        one({"p": "a ", "c": "film", "l": False}, RecordKind("kto"), columns, encoder, tmp_path)
    )
    assert said_in(words) == ("a film <|endoftext|>", "film <|endoftext|>")
    assert label.tolist() == [0]
    with pytest.raises(
        InputError, match=r"line 1, at byte 0: its label 1 is not true or false; fix or remove it"
    ):
        one({"p": "a", "c": "film", "l": 1}, RecordKind("kto"), columns, encoder, tmp_path)


def test_the_last_message_of_a_conversation_is_judged(encoder: Tokenizer, tmp_path: Path) -> None:
    """As LLaMA-Factory writes rows for KTO."""
    kind = RecordKind("kto", (), CHATML)
    row = {"m": TALK, "p": TALK[:3], "c": TALK[3], "l": True}
    apart = {"prompt": "p", "completion": "c", "label": "l"}
    columns = {"messages": "m", "label": "l"}
    assert [problem_of("kto", each) for each in (apart, columns)] == ["", ""]
    assert "lacks label, which kto reads" in problem_of("kto", {"messages": "m"})
    assert "has completion, which kto does not read" in problem_of("kto", {**columns, "completion": "c"})
    words = [one(row, kind, each, encoder, tmp_path).tolist() for each in (columns, apart)]
    assert words[0] == words[1]
    for wrong, says in (
        (TALK[3:], "its messages are not a list of a prompt and an answer"),
        ("film", "its messages are not a list"),
        (TALK[:3], "it has no answer of the assistant"),
    ):
        with pytest.raises(InputError, match=says):
            one({**row, "m": wrong}, kind, columns, encoder, tmp_path)


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"p": "a", "c": "film", "r": "film"}, "its chosen and its rejected answer are equal"),
        ({"p": "a", "c": "film"}, "has no 'r'; map the columns"),
        ({"c": "a film", "r": "a bad"}, "it has no prompt, and its answers are not conversations"),
        ({"p": TALK[:1], "c": "film", "r": "it"}, "the tokenizer has no chat template; name one in data.chat_template"),
        ({"p": "a", "c": TALK[1:2], "r": "it"}, "its prompt is a text but its chosen is not"),
        ({"p": 3, "c": "a", "r": "it"}, "its prompt is int, not a text or a list of messages"),
        ({"p": "", "c": "", "r": "it"}, "its chosen is empty"),
        ({"p": "a", "c": "", "r": "it"}, "its chosen is empty"),
        ({"p": TALK[:1], "c": "\ud83d", "r": "it"}, "has an unpaired surrogate in its message 2"),
        ({"p": [{"role": "judge", "content": "a"}], "c": "it", "r": "a"}, "the role 'judge' of its message 1"),
        ({"p": TALK[:1], "c": TALK[:1], "r": "it"}, "it has no answer of the assistant"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_pair(
    row: dict[str, Any], what: str, encoder: Tokenizer, tmp_path: Path
) -> None:
    kind = RecordKind("dpo", (), "" if "template" in what else CHATML)
    with pytest.raises(InputError, match=what) as found:
        one(row, kind, PAIR, encoder, tmp_path)
    assert "line 1, at byte 0: " in str(found.value)
    assert "\n" not in str(found.value)


@pytest.fixture(scope="module")
def joining() -> Tokenizer:
    """Of bytes, which joins the space before a word to it, as GPT-2's does."""
    return tokenizer.encoder(train_bytes(["Q: capital? A: Paris\nQ: capital? A: London\n"] * 50, 300, ()))


def test_a_token_that_begins_before_an_answer_is_the_answers(joining: Tokenizer, tmp_path: Path) -> None:
    """A prompt that ends with a space, the usual slip: of an answer of one word nothing but the end was predicted."""
    row = {"p": "Q: capital? A: ", "c": "Paris", "r": "London"}
    path = written(tmp_path / "rows.jsonl", [row])
    (span,) = sources.cut(sources.resolve([Source(uri=str(path), field=PAIR)]), 2**20)[0]

    def predicted(data_format: int) -> list[list[str]]:
        (record,) = records_of(span, RecordKind("dpo"), joining, 0, data_format=data_format)
        return [
            [joining.decode([int(word) & ~MARK]) for word in answer.astype(np.int64) if word & MARK]
            for answer in unpack(record.words)
        ]

    assert "".join(predicted(4)[0][:-1]) == " Paris"
    assert "".join(predicted(4)[1][:-1]) == " London"
    assert [len(answer) for answer in predicted(3)] == [len(answer) - 1 for answer in predicted(4)]


def test_half_a_surrogate_pair_among_words_is_told(encoder: Tokenizer, tmp_path: Path) -> None:
    kind, columns = RecordKind("token_classification", ("x",)), {"words": "w", "labels": "l"}
    with pytest.raises(InputError, match="line 1, at byte 0: has an unpaired surrogate in its words"):
        one({"w": ["a", "\ud83d"], "l": ["x", "x"]}, kind, columns, encoder, tmp_path)


def tokens_of(
    words: list[str], encoder: Tokenizer, folder: Path, data_format: int = 6
) -> tuple[list[int], list[int]]:
    """The tokens of a row of words and, of those that are predicted, the places."""
    path = written(folder / "words.jsonl", [{"w": words, "l": ["x"] * len(words)}])
    (span,) = sources.cut(
        sources.resolve([Source(uri=str(path), field={"words": "w", "labels": "l"})]), 2**20
    )[0]
    kind = RecordKind("token_classification", ("x",))
    (record,) = records_of(span, kind, encoder, 0, data_format=data_format)
    ids, marks = unpack(record.words)
    return ids.tolist(), np.flatnonzero(marks).tolist()


SENTENCES = ["the quick brown fox", "EU rejects German call , 7 am .", "naïve 北京 x\u0301 \U0001f600 end"]


@pytest.mark.parametrize("kind", ["gpt2", "bert", "unigram", "with_bos"])
def test_words_have_the_tokens_of_running_text(kind: str, tmp_path: Path) -> None:
    """What is served is running text: a byte-level tokenizer spells a word otherwise without the space before it."""
    getattr(hf_tokenizers, kind)(tmp_path)
    plain = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    plain.no_padding()
    plain.no_truncation()
    encoder = tokenizer.encoder(plain.to_str())
    theirs = PreTrainedTokenizerFast(tokenizer_object=prefixed(plain.to_str()))
    for sentence in SENTENCES:
        words = sentence.split()
        ids, places = tokens_of(words, encoder, tmp_path)
        assert ids == plain.encode(sentence, add_special_tokens=False).ids
        split = theirs(words, is_split_into_words=True, add_special_tokens=False)
        begins = [n for n, word in enumerate(split.word_ids()) if word not in split.word_ids()[:n]]
        assert len(places) == len(words) == len(begins)
        # but for the first word, to which transformers gives a space too
        assert ids[places[1] :] == split["input_ids"][begins[1] :]
        assert [place - places[1] for place in places[1:]] == [begin - begins[1] for begin in begins[1:]]


def prefixed(text: str) -> Tokenizer:
    """The tokenizer with add_prefix_space, which transformers asks for where words are given."""
    found = Tokenizer.from_str(text)
    if isinstance(found.pre_tokenizer, pre_tokenizers.ByteLevel):
        found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return found


def test_words_that_are_empty_or_white_get_no_space_of_their_own(joining: Tokenizer, tmp_path: Path) -> None:
    plain, places = tokens_of(["Q:", "capital?"], joining, tmp_path)
    for words in (["Q:", "", "capital?"], ["Q: ", " capital?"], ["", "Q:", "capital?", ""]):
        assert tokens_of(words, joining, tmp_path) == (plain, places)
    lines, of_lines = tokens_of(["Q:", "\n", "Q:"], joining, tmp_path)
    assert joining.decode(lines) == "Q:\nQ:"
    assert len(of_lines) == 3
    before, _ = tokens_of(["Q:", "capital?"], joining, tmp_path, data_format=5)
    assert joining.decode(before) == "Q:capital?"


def test_an_empty_text_is_refused_where_nothing_stands_around_it(encoder: Tokenizer, tmp_path: Path) -> None:
    """A decoder's classifier reads the last token, which would be padding."""
    columns, row = {"text": "t", "label": "l"}, {"t": "", "l": 1}
    for kind in (RecordKind("sequence_classification", ("bad", "good")), RecordKind("regression")):
        with pytest.raises(InputError, match="line 1, at byte 0: its text has no token and this tokenizer"):
            one(row, kind, columns, encoder, tmp_path)
        framed = tokenizer.encoder(train_bytes((), 300, ()))  # it has <cls> and <sep>
        assert unpack(one(row, kind, columns, framed, tmp_path))[0].tolist() == []
    pair = {"text": "t", "pair": "p", "label": "l"}
    assert len(unpack(one({**row, "p": "a"}, KIND, pair, encoder, tmp_path))[1]) == 1
