"""The data that the examples of a chat model and of sums make, and the model that the example of baselines counts."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import yaml
from jobs import job, write_text
from prepared import prepare_here
from tokenizers import Tokenizer

from orchestrator.config.spec import dump, parse
from orchestrator.data.prepare.chat_template import Template
from orchestrator.storage.run_directory import RunDir

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec
    assert spec.loader
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module")
def chat() -> ModuleType:
    return example("chat")


def test_questions_about_functions_and_which_answer_is_right(
    chat: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "PACKAGES", ("made_up",))
    made = [(f"made_up.f{number}", f"Does what is number {number}.") for number in range(60)]
    monkeypatch.setattr(chat, "functions", lambda package: iter(made))
    chat.main(str(tmp_path), 40)
    rows = {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in tmp_path.iterdir()
    }
    trained = {row["messages"][0]["content"] for row in rows["train"]}
    asked = {row["messages"][0]["content"] for row in rows["test"]}
    assert len(rows["train"]) + len(rows["test"]) == 80
    assert asked
    assert not asked & trained
    answers = {row["messages"][1]["content"] for row in rows["train"]}
    assert {row["messages"][1]["content"] for row in rows["test"]} <= answers
    assert all(row["chosen"] != row["rejected"] for row in rows["pairs"] + rows["pairs_test"])
    assert all(row["choices"][row["label"]] == row["answer"] for row in rows["quiz"])
    text, places = Template((EXAMPLES / "chat.jinja").read_text(), {}).render(rows["test"][0]["messages"])
    quiz = next(row for row in rows["quiz"] if text.startswith(row["question"]))
    assert [text[start:stop] for start, stop in places] == [quiz["answer"] + "<|endoftext|>"]


def test_sums_are_wrong_by_a_carry_and_held_out_ones_are_nowhere_else(tmp_path: Path) -> None:
    sums = example("sums")
    sums.main(str(tmp_path))
    rows = {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()]
        for path in tmp_path.glob("*.jsonl")
    }
    held_out, prompts = ({row["question"] for row in rows[name]} for name in ("held_out", "prompts"))
    read = [row["text"].partition("=") for row in rows["text"]]
    assert len(held_out) == 200
    assert not held_out & (prompts | {first + "=" for first, _, _ in read})
    wrong = carries = 0
    for first, _, result in read:
        a, b = map(int, first.split("+"))
        carries += a % 10 + b % 10 >= 10
        wrong += int(result) != a + b
        assert int(result) in (a + b, sums.without_carry(a, b))
    assert sums.without_carry(17, 25) == 32
    assert carries / len(read) == pytest.approx(2 / 3, abs=0.02)
    assert wrong / carries == pytest.approx(sums.FORGOTTEN, abs=0.02)
    for row in rows["prompts"] + rows["held_out"]:
        assert int(row["answer"]) == sum(map(int, row["question"].rstrip("=").split("+")))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))
    ids = tokenizer.encode("17+25=42<|endoftext|>").ids
    assert len(ids) == 9
    assert tokenizer.decode(ids) == "17+25=42"
    document = yaml.safe_load((EXAMPLES / "sums.yaml").read_text())
    longest = max(len(row["question"]) for row in rows["prompts"] + rows["held_out"])
    assert longest + document["rollout"]["max_tokens"] == document["data"]["sequence_length"]


@pytest.mark.parametrize("name", ["sums_pretrain", "sums"])
def test_the_jobs_of_sums_are_valid(name: str) -> None:
    assert parse(yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())).train.steps > 0


def test_the_probabilities_of_the_5_gram_sum_to_one() -> None:
    baselines, vocabulary = example("baselines"), 7
    rng = np.random.default_rng(3)
    training = rng.integers(0, vocabulary - 1, 400)  # the last token is never seen
    for context in ([0, 1, 2, 3], [6, 6, 6, 6], [1, 6, 2, 3]):
        last = [
            baselines._probabilities(training, np.array([*context, token]), vocabulary)[-1]
            for token in range(vocabulary)
        ]
        assert min(last) > 0
        assert sum(last) == pytest.approx(1.0)
    # what follows every time is nearly certain
    repeated = np.tile(np.arange(5), 50)
    assert baselines._probabilities(repeated, repeated[:20], vocabulary)[4:].min() > 0.9


def test_a_run_is_told_beside_what_others_make_of_its_held_out_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = job(write_text(tmp_path / "corpus", 60_000))
    asked["data"]["validation"], asked["evaluate"] = {"share": 0.2}, {"every": 4}
    asked["data"]["tokenizer"] = {"train_bpe": 300}
    spec = parse(asked)
    rows = {
        "job.yaml": dump(spec),
        "summary.json": json.dumps({"evaluation": {"sets": {"validation": {"bits_per_byte": 3.25}}}}),
    }
    for name, text in rows.items():
        (tmp_path / name).write_text(text)
    data = prepare_here(spec, str(tmp_path / "data"))
    row = {"time": 1e9, "phase": "prepare", "attempt": 1, "data": data}
    RunDir(str(tmp_path)).append("events.jsonl", [row])
    example("baselines").main(str(tmp_path), "gzip", "5-gram")
    told = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [line[0] for line in told] == ["gzip", "5-gram", "this"]
    assert told[-1][2] == "3.250"
    assert all(0.5 < float(line[-4]) < 8 for line in told)
