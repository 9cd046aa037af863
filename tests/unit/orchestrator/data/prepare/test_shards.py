from __future__ import annotations

import math
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import xxhash
from tokenizers import Tokenizer, models, pre_tokenizers

from orchestrator.config.errors import InputError
from orchestrator.data.config import Source
from orchestrator.data.prepare import shards
from orchestrator.data.prepare.contents import digests
from orchestrator.data.prepare.gather import gather
from orchestrator.data.prepare.part_text import sample
from orchestrator.data.sources import cut, resolve
from orchestrator.data.store import manifest
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.data.store.tokens import Tokens

Prepare = Callable[..., str]


def test_the_manifest_counts_what_is_there(prepare_here: Prepare) -> None:
    texts = ["héllo wörld.\n<|endoftext|>\nmore of it\n" * 30, "end"]
    tokens = Tokens.open(prepare_here(texts, ["other"]))
    found = tokens.manifest
    ids = np.concatenate([tokens.window(s, 0, tokens.length(s)) for s in (0, 1)])
    assert found.tokens == len(ids)
    assert found.documents == (ids == found.roles["eos"]).sum() == 30 + 1 + 1 + 1
    assert found.bytes == len(tokens.tokenizer().decode(ids.tolist()).encode())
    assert found.bytes_per_token == found.bytes / found.tokens
    shares = [n / len(ids) for n in Counter(ids.tolist()).values()]
    assert found.entropy == pytest.approx(-sum(p * math.log(p) for p in shares))
    for shard in (shard for source in found.sources for shard in source.shards):
        assert xxhash.xxh3_128_hexdigest(Path(tokens.folder.at(shard.file)).read_bytes()) == shard.xxh3


def test_ids_take_two_bytes_where_they_fit() -> None:
    assert (shards.TokenFormat(2**16, {}).dtype, shards.TokenFormat(2**16 + 1, {}).dtype) == ("<u2", "<u4")


def test_parts_without_text_make_no_shard(prepare_here: Prepare) -> None:
    # One line far longer than a part: the parts within it hold no beginning of a line.
    tokens = Tokens.open(prepare_here(["word " * 300 + "\nend"], part_bytes=200))
    found = [shard.file for shard in tokens.manifest.sources[0].shards]
    assert found == ["shards/000000.bin", "shards/000007.bin"]
    assert (
        tokens.tokenizer().decode(tokens.window(0, 0, tokens.length(0)).tolist()) == "word " * 300 + "\nend"
    )


def test_no_text_at_all_is_told(prepare_here: Prepare) -> None:
    with pytest.raises(InputError, match="there is no text in the files"):
        prepare_here(["<|endoftext|>\n<|endoftext|>\n"])


def test_text_of_which_no_token_is_made_counts(tmp_path: Path) -> None:
    """A tokenizer that leaves out white space: a part of a document then has text and no token."""
    white = "\n".join([" " * 60] * 40)
    texts = [f"some words {white} more words", f"some words {white}  more words"]
    tokenizer = Tokenizer(
        models.WordLevel({"<|endoftext|>": 0, "some": 1, "words": 2, "more": 3}, unk_token="more")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    (tmp_path / "a.txt").write_text("\n<|endoftext|>\n".join([*texts, texts[0]]))
    folder, roles = DataFolder(str(tmp_path / "prepared")), {"eos": 0}
    folder.write("tokenizer.json", tokenizer.to_str().encode())
    parts = cut(resolve([Source(uri=str(tmp_path / "a.txt"))]), 300)
    for number, part in enumerate(parts):
        shards.make_shard(folder.uri, number, part, shards.TokenFormat(4, roles))()
    made = gather(folder, "f" * 32, ["a.txt"], parts, shards.TokenFormat(4, roles))
    manifest.write(folder, made)
    assert any(not shard.tokens for shard in made.shards)
    assert shards.is_complete(folder)
    tokens = Tokens.open(folder.uri)
    tokens.check()
    assert tokens.window(0, 0, tokens.length(0)).tolist() == [1, 2, 3, 2, 0] * 3
    contents = tokens.contents(0)
    assert contents["bytes"].tolist() == [len(text) for text in (*texts, texts[0])]
    one, other, again = digests(contents).tolist()
    assert one == again != other


WRITE = """
import sys, tracemalloc
from orchestrator.data.prepare import shards
from orchestrator.data.sources import cut, resolve
from orchestrator.data.config import Source

text, folder = sys.argv[1:]
(part,) = cut(resolve([Source(uri=text)]), 10**7)
write = shards.make_shard(folder, 0, part, shards.TokenFormat(3, {"eos": 0}))
write()  # imports what it needs
tracemalloc.start()
write()
print(tracemalloc.get_traced_memory()[1])
"""


def test_tokens_are_written_without_a_copy_of_them(tmp_path: Path) -> None:
    """In a process of its own: threads that other tests have left take memory too."""
    tokenizer = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "a": 1, "b": 2}, unk_token="b"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    (tmp_path / "a.txt").write_text("a b " * 300_000)
    folder = DataFolder(str(tmp_path / "prepared"))
    folder.write("tokenizer.json", tokenizer.to_str().encode())
    command = [sys.executable, "-c", WRITE, str(tmp_path / "a.txt"), folder.uri]
    peak = int(subprocess.run(command, check=True, capture_output=True, timeout=120).stdout)
    written = np.fromfile(folder.at(shards.shard_name(0)), "<u2")
    assert written.tolist() == [1, 2] * 300_000 + [0]
    assert peak < written.nbytes / 4


def of_words(folder: Path, monkeypatch: pytest.MonkeyPatch, held: int) -> DataFolder:
    """A shard of 60,000 words, made with so many bytes of tokens in memory at most."""
    tokenizer = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "a": 1, "b": 2}, unk_token="b"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    (folder / "a.txt").write_text("a b\n" * 30_000)
    monkeypatch.setattr(shards, "HELD_BYTES", held)
    monkeypatch.setattr(shards, "BATCH_BYTES", 1000)
    found = DataFolder(str(folder / f"of {held}"))
    found.write("tokenizer.json", tokenizer.to_str().encode())
    (part,) = cut(resolve([Source(uri=str(folder / "a.txt"))]), 10**7)
    shards.make_shard(found.uri, 0, part, shards.TokenFormat(3, {"eos": 0}))()
    return found


def test_the_tokens_of_a_large_part_wait_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mock.patch.object(tempfile, "TemporaryFile", wraps=tempfile.TemporaryFile) as made:
        all_held = of_words(tmp_path, monkeypatch, 2**26)
        assert made.call_count == 0
        few_held = of_words(tmp_path, monkeypatch, 4000)
        assert [call.kwargs for call in made.call_args_list] == [{"dir": few_held.uri}]
    for name in (shards.shard_name(0), shards.ends_name(shards.shard_name(0)), shards.record_name(0)):
        assert all_held.read(name) == few_held.read(name)
    assert {path.name for path in Path(few_held.uri).iterdir()} == {"records", "shards", "tokenizer.json"}


def test_more_tokens_than_a_shard_can_have_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its index would begin anew at nought, without a word."""
    monkeypatch.setattr(shards, "MOST_TOKENS", 59_999)
    with pytest.raises(InputError, match=r"a.txt: has more than 59,999 tokens"):
        of_words(tmp_path, monkeypatch, 2**26)


@pytest.mark.parametrize("limit", [10**6, 700])
def test_a_sample_takes_every_parts_due(tmp_path: Path, limit: int) -> None:
    (tmp_path / "a.txt").write_text("a few a words\n<|endoftext|>\n" * 200)
    (tmp_path / "b.txt").write_text("b and b others\n<|endoftext|>\n" * 50)
    (part,) = cut(resolve([Source(uri=str(tmp_path / "*.txt"))]), 10**5)
    parts = [(span,) for span in part]
    total = sum(span.bytes for span in part)
    taken = list(sample(parts, limit))
    of_a, of_b = sum("few" in text for text in taken), sum("others" in text for text in taken)
    if limit > total:
        assert (of_a, of_b) == (200, 50)
    else:
        assert sum(map(len, taken)) == pytest.approx(limit, abs=40)
        assert of_b / of_a == pytest.approx(0.25, abs=0.1)
