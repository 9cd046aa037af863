"""What an export stores of the class weights that training counted, when the prepared data is gone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from jobs import job
from letters import write_tokenizer
from prepared import prepare_here

from orchestrator.config.spec import parse
from orchestrator.export.evaluation_facts import evaluation_facts
from orchestrator.resolve.prepared_data import data_of, keep_excerpt
from orchestrator.resolve.training_inputs import training_inputs, workload_of
from orchestrator.storage.run_directory import RunDir


@pytest.mark.parametrize("share", [None, 0.25])
def test_class_weights_are_those_of_training_or_stay_balanced(share: float | None, tmp_path: Path) -> None:
    """With sorted labels, so that the excerpt has the first label alone."""
    rows = [{"text": f"a b c d e f {'g h ' * 300}{n % 7 * 'i '}", "label": int(n >= 90)} for n in range(120)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_tokenizer(tmp_path)
    document = job(str(tmp_path / "rows.jsonl"))
    document["workload"] = {
        "model": "bert-tiny", "objective": "sequence_classification", "options": {"class_weights": "balanced"},
    }  # fmt: skip
    document["data"] = {
        "sources": [{"uri": str(tmp_path / "rows.jsonl"), "field": {"text": "text", "label": "label"}}],
        "tokenizer": str(tmp_path), "sequence_length": 16, "labels": ["first", "last"],
        "validation": share and {"share": share},
    }  # fmt: skip
    spec = parse(document)
    data, run = prepare_here(spec, str(tmp_path / "cache")), RunDir(str(tmp_path / "run"))
    keep_excerpt(run, data)
    counted = training_inputs(spec, data_of(run, data)).class_weights
    if share is None:
        assert counted == pytest.approx([120 / (2 * 90), 120 / (2 * 30)])

    def stored(**meta: Any) -> Any:
        tokens = data_of(run, data)
        commit = SimpleNamespace(meta={"data": data, "layout": {"micro_batch": 2}, **meta})
        trained = workload_of(spec.workload, spec.data, spec.train, spec.seed, tokens)
        facts = evaluation_facts(
            spec.data, spec.workload, spec.train, spec.seed, tokens, commit=cast(Any, commit), trained=trained
        )
        return facts["options"]["class_weights"]

    assert stored() == list(counted)  # a commit of an earlier version, whose data is there
    shutil.rmtree(data)
    assert stored(class_weights=list(counted)) == list(counted)
    assert stored() == "balanced"
