"""A model that learns from conversations answers prompts: in the run's samples, and as a commit and an export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import job, rows
from letters import TEMPLATE, letters, write_tokenizer
from local_run import LocalGang, drive_here

from orchestrator.cli.app import call
from orchestrator.export.hugging_face import export

PROMPTS, ANSWER = ["p o", "p"], "p o n"
BARE = ["n", "o n"]
"""With what goes on these prompts where they are no turns, but the beginning of the answer."""
TALKS = [
    {"messages": [{"role": "user", "content": letters(n)}, {"role": "assistant", "content": ANSWER}]}
    for n in range(96)
]


@pytest.mark.slow
def test_it_answers_as_it_has_learnt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TALKS))
    write_tokenizer(tmp_path, False)
    # more follows the token that ends a turn, so that it is seen where an answer goes on
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE.replace("<|endoftext|>", "[SEP] a b"))
    document = job(str(tmp_path / "rows.jsonl"), steps=40, optimizer={"lr": 1e-2, "schedule": "constant"})
    document["workload"]["objective"] = "conversation"
    document["data"] |= {"tokenizer": str(tmp_path), "sequence_length": 48}
    document["data"]["sources"][0]["field"] = {"messages": "messages"}
    document["evaluate"] = {"every": 40, "samples": {"prompts": PROMPTS, "tokens": 6}}
    document["checkpoint"]["every"] = 40
    run = tmp_path / "run"
    drive_here(document, str(run), tmp_path / "cache", gang=lambda: LocalGang([1]))
    answered = [{"prompt": prompt, "text": ANSWER} for prompt in PROMPTS]
    assert rows(run, "evals.jsonl")[-1]["samples"] == answered
    export(str(run), 40, str(tmp_path / "model"))
    (tmp_path / "chat_template.jinja").unlink()  # that of the data, and that of the export count

    def generated(*words: Any, **_: Any) -> str:
        with pytest.raises(SystemExit) as ended:
            call(["generate", *map(str, words), *PROMPTS, "--tokens", "6"])
        assert ended.value.code == 0
        return capsys.readouterr().out

    capsys.readouterr()
    for place in (run, run / "checkpoints/step-00000040", tmp_path / "model"):
        assert json.loads(generated(place, "--json")) == answered
        bare = json.loads(generated(place, "--json", "--raw"))
        assert [
            each["text"] for each in bare
        ] == BARE  # the end of a turn ends the bare text too, as in the export
    assert generated(run) == "".join(f"{prompt}\n=> {ANSWER}\n\n" for prompt in PROMPTS)
