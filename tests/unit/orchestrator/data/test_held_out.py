"""Held-out documents: which they are depends on their text alone, and nothing is lost or read twice."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from orchestrator.data import manifest, shards, sources, tokenizer
from orchestrator.data.data_folder import DataFolder
from orchestrator.data.held_out import split
from orchestrator.data.subset import Subset
from orchestrator.data.tokens import Tokens
from orchestrator.job.data import Source
from orchestrator.job.errors import InputError

Prepare = Callable[..., str]
ENTRIES = 320
TOKENIZER = tokenizer.train(["a few words of text, and more of them.\n"], ENTRIES, ())
BREAK = "\n<|endoftext|>\n"
LINES = st.text(st.sampled_from("ab \né☃"), min_size=1, max_size=40).map(lambda text: text.strip("\n") or "a")
DOCUMENTS = st.lists(LINES, min_size=2, max_size=12)


def written(folder: Path, files: list[str], part_bytes: int) -> Tokens:
    """The files as one source, prepared in parts of so many bytes."""
    for number, text in enumerate(files):
        (folder / f"{number:03d}.txt").write_text(text, newline="")
    named = [Source(uri=str(folder / "*.txt"))]
    parts = sources.cut(sources.resolve(named), part_bytes)
    made = DataFolder(str(folder / "prepared"))
    made.write("tokenizer.json", TOKENIZER.encode())
    roles = tokenizer.roles_of(Tokenizer.from_str(TOKENIZER), {})
    for number, part in enumerate(parts):
        shards.write_shard(made.uri, number, part, ENTRIES, roles)
    manifest.write(made, shards.gather(made, "f" * 32, [named[0].uri], parts, ENTRIES, roles))
    return Tokens.open(made.uri)


def texts(streams: Tokens | Subset) -> list[str]:
    """The documents of the first source, as text."""
    found = streams.window(0, 0, streams.length(0))
    bounds = [0, *streams.document_ends(0).tolist()]
    decoder = Tokenizer.from_str(TOKENIZER)
    return [decoder.decode(found[a : b - 1].tolist()) for a, b in itertools.pairwise(bounds)]


def held_out_texts(files: list[str], part_bytes: int, share: float) -> tuple[list[str], list[str]]:
    """The documents that are trained on and those that are held out; either may be none."""
    with tempfile.TemporaryDirectory() as folder:
        tokens = written(Path(folder), files, part_bytes)
        try:
            parts = split(tokens, share)
        except InputError as error:
            return (texts(tokens), []) if "holds out none" in str(error) else ([], texts(tokens))
        assert parts.bytes == sum(len(text.encode()) for text in texts(parts.held_out))
        return texts(parts.training), texts(parts.held_out)


@settings(max_examples=60, deadline=None)
@given(
    documents=DOCUMENTS,
    more=DOCUMENTS,
    order=st.randoms(use_true_random=False),
    sizes=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    share=st.sampled_from([0.1, 0.5, 0.8]),
)
def test_which_documents_are_held_out_depends_on_their_text_alone(
    documents: list[str], more: list[str], order: object, sizes: tuple[int, int], share: float
) -> None:
    whole = held_out_texts([BREAK.join(documents)], sizes[0], share)
    assert sorted(whole[0] + whole[1]) == sorted(documents)
    assert not set(whole[0]) & set(whole[1])

    shuffled = documents + more
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    cut = order.randrange(len(shuffled))  # type: ignore[attr-defined]
    files = [BREAK.join(part) for part in (shuffled[:cut], shuffled[cut:]) if part]
    training, held_out = held_out_texts(files, sizes[1], share)
    assert sorted(training + held_out) == sorted(shuffled)
    assert set(held_out) & set(documents) == set(whole[1])
    assert not set(training) & set(held_out)
