"""The words in a row by which evaluation text is found again."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datatrove.utils.text import ngrams, simplify_text

from orchestrator.data.clean import decontaminate
from orchestrator.data.clean.config import Decontaminate
from orchestrator.data.clean.removed import Removed
from orchestrator.data.store.data_folder import DataFolder


@pytest.mark.parametrize(("between", "documents"), [("\n<|endoftext|>\n", 30), ("\n", 1)])
def test_text_that_is_cut_into_parts_is_indexed_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, between: str, documents: int
) -> None:
    """A document that is larger than a part, too."""
    letters = itertools.product("abcdefghij", repeat=4)
    texts = ["\n".join("".join(next(letters)) for _ in range(40)) for _ in range(30)]
    (tmp_path / "eval.txt").write_text(between.join(texts))
    rule = Decontaminate.model_validate({"sources": [{"uri": str(tmp_path / "eval.txt")}]})

    def index(part_bytes: int) -> Any:
        monkeypatch.setattr(decontaminate, "PART_BYTES", part_bytes)
        step: Any = SimpleNamespace(rule=rule, key=f"cut-{part_bytes}", name="decontaminate")
        folder = DataFolder(str(tmp_path / "cache"))
        decontaminate.write_index(folder, step)
        found = decontaminate.read_index(folder, step)
        assert found is not None
        return set(found["gram"].tolist())

    whole = index(2**25)
    assert len(whole) == 1200 - documents * (rule.words - 1)
    assert index(700) == whole


def test_an_evaluation_text_shorter_than_an_n_gram_is_found_where_datatrove_has_nothing_to_look_for(
    tmp_path: Path,
) -> None:
    asked = "Which river runs through the old town of Passau?"
    (tmp_path / "eval.txt").write_text(asked)
    rule = Decontaminate.model_validate({"sources": [{"uri": str(tmp_path / "eval.txt")}]})
    assert list(ngrams(simplify_text(asked).split(), rule.words)) == []
    step: Any = SimpleNamespace(rule=rule, key="short", name="decontaminate")
    folder = DataFolder(str(tmp_path / "cache"))
    decontaminate.write_index(folder, step)
    decide = decontaminate.decontaminate(folder, step)
    assert isinstance(decide(f"They were told: {asked.lower()} Nobody knew.", {}), Removed)
    assert decide("Which river runs through the old town?", {}) == "Which river runs through the old town?"
