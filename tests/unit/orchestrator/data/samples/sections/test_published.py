from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.data import sources
from orchestrator.data.config import DataSpec
from orchestrator.data.encoding.training import train_bytes
from orchestrator.data.prepare import part_tasks
from orchestrator.data.prepare.prepare import prepare
from orchestrator.data.prepare.records import RecordKind
from orchestrator.data.samples.sections.plan import SectionPlan
from orchestrator.data.store.tokens import Tokens


def test_sections_of_records_are_published_as_all_of_them_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def here(task: Any, rows: list[dict[str, Any]], cache: str, *_: Any, **__: Any) -> Any:
        for done, row in enumerate(rows, 1):
            part_tasks.raise_error(part_tasks.run_task(task, cache, row))
            yield done

    monkeypatch.setattr(part_tasks, "run_tasks", here)
    monkeypatch.setattr(sources, "part_size", lambda files: 900)
    rows = [{"text": f"number {n} of many", "label": n % 2} for n in range(200)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tokenizer.json").write_text(
        train_bytes(["number of many 0123456789"], 300, ("<cls>", "<sep>", "<pad>"))
    )
    data = DataSpec(
        sources=[{"uri": str(tmp_path / "rows.jsonl"), "field": {"text": "text", "label": "label"}}],
        tokenizer=str(tmp_path / "tokenizer.json"),
        sequence_length=16,
        streaming=True,
    )
    kind = RecordKind("sequence_classification", ("0", "1"))
    begun = prepare(data, (), str(tmp_path / "cache"), kind_of=lambda _: kind, begin=True)
    first = Tokens.open(begun)
    assert (first.sections, first.manifest.records) == (1, "sequence_classification")
    assert prepare(data, (), str(tmp_path / "cache"), kind_of=lambda _: kind) == begun
    whole, plan = Tokens.open(begun), SectionPlan.read(first.folder)
    assert plan is not None
    assert (whole.sections, whole.manifest.documents) == (None, 200)
    first.await_section(plan.sections - 1)
    assert first.manifest.dtype == whole.manifest.dtype == "<u4"
    assert np.array_equal(first.document_ends(0), whole.document_ends(0))
    length = whole.length(0)
    assert np.array_equal(first.window(0, 0, length), whole.window(0, 0, length))
