"""The kinds of files: each has a reader, and a name in the job file."""

from __future__ import annotations

from typing import get_args, get_type_hints

from orchestrator.data.clean.config import OtherText
from orchestrator.data.config import Source
from orchestrator.data.sources import rows
from orchestrator.data.sources.kinds import KINDS


def test_each_kind_has_a_reader_and_a_name() -> None:
    kinds = {kind.suffixes[0] for kind in KINDS}
    assert rows._READERS.keys() == kinds | {".txt"}
    for model in (Source, OtherText):
        formats = get_args(get_args(get_type_hints(model)["format"])[0])
        assert {f".{name}" for name in formats} == kinds | {".text"}
