"""The demonstration data of LLaMA-Factory: rows in Alpaca's and ShareGPT's shapes, read as their columns say.

They need a checkout of hiyouga/LLaMA-Factory in the folder of --peers. Each row's tokens are those that transformers'
apply_chat_template writes of its messages, which this file makes of a row by itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import peers
import pytest
import trl
from hf_tokenizers import of_bytes
from transformers import PreTrainedTokenizerFast

from orchestrator.data import sources
from orchestrator.data.config import Source
from orchestrator.data.prepare.records import RecordKind, records_of
from orchestrator.data.sources.rejected import Rejected
from workloads.record_format import MARK, unpack

Message = dict[str, Any]
TEMPLATE = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text()
ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "system": "system"}


BYTES = of_bytes()
THEIRS = PreTrainedTokenizerFast(tokenizer_object=BYTES)


def message(spoken: Message) -> Message:
    """What OpenAI's format makes of a ShareGPT message."""
    if spoken["from"] != "function_call":
        return {"role": ROLES[spoken["from"]], "content": spoken["value"]}
    calls = json.loads(spoken["value"])
    calls = calls if isinstance(calls, list) else [calls]
    called = [{"type": "function", "function": call} for call in calls]
    return {"role": "assistant", "content": "", "tool_calls": called}


def alpaca(row: Message) -> list[list[Message]]:
    asked = "\n\n".join(part for part in (row["instruction"], row["input"]) if part).strip()
    return [[{"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]]


def sharegpt(row: Message) -> list[list[Message]]:
    return [[message(each) for each in row["conversations"]]]


def pair(row: Message) -> list[list[Message]]:
    asked = [message(each) for each in row["conversations"]]
    return [[*asked, message(row[side])] for side in ("chosen", "rejected")]


FILES: dict[str, tuple[str, dict[str, str], Callable[[Message], list[list[Message]]]]] = {
    **dict.fromkeys(
        ("alpaca_en_demo", "alpaca_zh_demo", "identity"),
        ("conversation", {"prompt": "{instruction}\n\n{input}", "completion": "output"}, alpaca),
    ),
    **dict.fromkeys(
        ("glaive_toolcall_en_demo", "glaive_toolcall_zh_demo"),
        ("conversation", {"messages": "conversations", "tools": "tools"}, sharegpt),
    ),
    **dict.fromkeys(
        ("dpo_en_demo", "dpo_zh_demo"),
        ("dpo", {"prompt": "conversations", "chosen": "chosen", "rejected": "rejected"}, pair),
    ),
    "kto_en_demo": ("kto", {"messages": "messages", "label": "label"}, lambda row: [row["messages"]]),
}
SIDES = {"conversation": slice(0, 1), "dpo": slice(0, 2), "kto": slice(0, 1)}


def texts_of(words: np.ndarray, objective: str) -> list[list[int]]:
    """The token ids of a record's texts."""
    parts = [words] if objective == "conversation" else unpack(words)[SIDES[objective]]
    return [[int(word) & ~MARK for word in part] for part in parts]


def read(path: Path, objective: str, columns: dict[str, str], rejected: Rejected) -> Iterator[np.ndarray]:
    files = sources.resolve([Source(uri=str(path), field=columns)], on_error="skip")
    for part in sources.cut(files, max(files[0].size, 1)):
        for span in part:
            for record in records_of(span, RecordKind(objective, (), TEMPLATE), BYTES, 0, rejected):
                yield record.words


@pytest.mark.parametrize("name", FILES)
def test_every_row_has_the_tokens_of_transformers(name: str, checkout: Callable[[str], Path]) -> None:
    path = checkout("LLaMA-Factory") / "data" / f"{name}.json"
    objective, columns, messages_of = FILES[name]
    rows, rejected = json.loads(path.read_text()), Rejected()
    records = list(read(path, objective, columns, rejected))
    assert rejected.to_json() == []
    assert len(records) == len(rows) == peers.ROWS_OF_LLAMA_FACTORY[name]
    for row, words in zip(rows, records, strict=True):
        tools = json.loads(row["tools"]) if row.get("tools") else None
        wanted = [THEIRS.apply_chat_template(each, tools, chat_template=TEMPLATE, return_dict=True)["input_ids"]
                  for each in messages_of(row)]  # fmt: skip
        assert texts_of(words, objective) == wanted


@pytest.mark.parametrize("name", ["v1_sft_demo", "v1_dpo_demo", "reason_tool_use_demo_50"])
def test_rows_of_its_version_1_are_refused(name: str, checkout: Callable[[str], Path]) -> None:
    """Their parts have `value` instead of `text`, and a `loss_weight` that would be lost."""
    path, rejected = checkout("LLaMA-Factory") / "data" / f"{name}.jsonl", Rejected()
    columns = {"chosen": "chosen_messages", "rejected": "rejected_messages"}
    given = ("dpo", columns) if "dpo" in name else ("conversation", {"messages": "messages"})
    assert list(read(path, *given, rejected)) == []
    (found,) = rejected.to_json()
    assert found["count"] == len(path.read_text().splitlines())
    assert found["examples"][0]["what"] == "its message 1 has a part without text"


def test_the_page_counts_these_rows() -> None:
    assert {*FILES} == {*peers.ROWS_OF_LLAMA_FACTORY}
