from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.data.config import Source
from orchestrator.data.encoding.engines import Encoded, FastEngine, fast, reference
from orchestrator.data.encoding.training import train_bytes
from orchestrator.data.prepare import shards
from orchestrator.data.sources import cut, resolve
from orchestrator.data.sources.documents import TextPiece
from orchestrator.data.store import manifest
from orchestrator.data.store.data_folder import DataFolder

TEXT = "".join(f"Sentence {n}, number {n * n}.\n<|endoftext|>\n" for n in range(400))
Prepare = Callable[..., str]


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    fast.cache_clear()
    yield
    fast.cache_clear()


def bytes_of(uri: str) -> dict[str, bytes]:
    return {str(path.relative_to(uri)): path.read_bytes() for path in sorted(Path(uri).glob("shards/*"))}


def by_the_reference(prepare_here: Prepare, monkeypatch: pytest.MonkeyPatch, uri: str) -> str:
    with monkeypatch.context() as patched:
        patched.setattr(shards, "fast", lambda *_, **__: None)
        return prepare_here([TEXT], part_bytes=1500, uri=uri)


def test_shards_are_the_same_by_either_engine(
    prepare_here: Prepare, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    quick = prepare_here([TEXT], part_bytes=1500, uri=str(tmp_path / "quick"))
    plain = by_the_reference(prepare_here, monkeypatch, str(tmp_path / "plain"))
    assert bytes_of(quick) == bytes_of(plain)
    found, other = (manifest.read(DataFolder(uri)) for uri in (quick, plain))
    assert found is not None
    assert other is not None
    ((name, said),) = found.engines.items()
    assert name.startswith("fastokens ")
    assert said["parts"] == len(found.shards)
    assert said["compared_documents"] >= said["parts"]
    assert [*other.engines] != [*found.engines]
    assert found.digest == other.digest


def test_what_an_engine_made_that_later_differs_is_made_again(
    prepare_here: Prepare, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It goes wrong from the third part on, in every text: parts made before are made again by the reference too."""
    encode = FastEngine.encode
    calls: list[int] = []

    def wrong(self: FastEngine, texts: Any) -> Encoded:
        calls.append(1)
        found = encode(self, texts)
        return (
            Encoded(found.ids ^ 1, found.ends) if len(calls) > 3 else found
        )  # the first is that of hard texts

    plain = by_the_reference(prepare_here, monkeypatch, str(tmp_path / "plain"))
    monkeypatch.setattr(FastEngine, "encode", wrong)
    uri = prepare_here([TEXT], part_bytes=1500, uri=str(tmp_path / "prepared"))
    folder, before = DataFolder(uri), manifest.read(DataFolder(uri))
    assert before is not None
    assert len(calls) == 4  # no part after the one that differed
    assert shards.unfinished(folder, len(before.shards), shards.TokenFormat(320, before.roles)) == [0, 1]
    parts = cut(resolve([Source(uri=str(tmp_path / "source-0" / "*.txt"))]), 1500)
    for number in (0, 1):
        shards.make_shard(uri, number, parts[number], shards.TokenFormat(320, before.roles))()
    assert shards.unfinished(folder, len(before.shards), shards.TokenFormat(320, before.roles)) == []
    assert bytes_of(uri) == bytes_of(plain)


def test_of_a_long_piece_the_beginning_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    text = train_bytes([TEXT], 320, ())
    pieces = [TextPiece(one, True, len(one)) for one in (TEXT, "short")]
    assert len(TEXT) > 2 * shards.COMPARED
    found = shards.PartEncoder(text, 0)
    assert np.array_equal(found.encode(pieces).ids, reference(text).encode([TEXT, "short"]).ids)
    assert found.compared[1:] == (1, shards.COMPARED)
    encode = FastEngine.encode
    wrong = lambda self, texts: Encoded((made := encode(self, texts)).ids ^ 1, made.ends)  # noqa: E731
    monkeypatch.setattr(FastEngine, "encode", wrong)
    with pytest.raises(shards.EngineDiffers):
        shards.PartEncoder(text, 0).encode(pieces)
