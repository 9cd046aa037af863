"""Tokenizers that others made, and what objectives make of their text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_tokenizers import DOCUMENTS, bert, gpt2, unigram, with_bos
from thin import every
from tokenizers import Tokenizer

from orchestrator.config.errors import InputError
from orchestrator.data import sources
from orchestrator.data.config import Source
from orchestrator.data.encoding import tokenizer
from orchestrator.data.prepare import shards
from orchestrator.data.prepare.gather import gather
from orchestrator.data.samples.batches import batches_of
from orchestrator.data.store import manifest
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.data.store.tokens import Tokens
from workloads.load import load
from workloads.objectives import build, special_tokens

UNKNOWN = 100
"""BERT's token for characters that it lacks, which text holds."""
SMALL = {"hidden": 16, "layers": 1, "heads": 2, "intermediate": 16}


def prepared(folder: Path, objective: str) -> Tokens:
    """The documents as prepared data, with the tokenizer in a folder."""
    text, roles = tokenizer.load(str(folder), special_tokens(objective))
    (folder / "a.txt").write_text("\n<|endoftext|>\n".join(DOCUMENTS))
    return written(folder, Source(uri=str(folder / "a.txt")), text, roles)


def written(folder: Path, source: Source, text: str, roles: dict[str, int]) -> Tokens:
    """A source as prepared data."""
    parts = sources.cut(sources.resolve([source]), 20_000)
    size, made = tokenizer.size_of(tokenizer.encoder(text)), DataFolder(str(folder / "prepared"))
    made.write("tokenizer.json", text.encode())
    for number, part in enumerate(parts):
        shards.make_shard(made.uri, number, part, shards.TokenFormat(size, roles))()
    manifest.write(made, gather(made, "f" * 32, ["a"], parts, shards.TokenFormat(size, roles)))
    return Tokens.open(made.uri)


CASES: dict[str, tuple[Any, str, str]] = {
    "gpt2": (gpt2, "gpt-tiny", "causal_lm"),
    "bert": (bert, "bert-tiny", "whole_word_masking"),
    "bert-pairs": (bert, "bert-tiny", "next_sentence"),
    "unigram": (unigram, "t5-tiny", "span_corruption"),
    "with_bos": (with_bos, "llama-tiny", "causal_lm"),
}


@pytest.mark.parametrize("case", every(2, CASES))
def test_text_goes_in_comes_out_and_is_trained_on(case: str, tmp_path: Path) -> None:
    make, model, objective = CASES[case]
    make(tmp_path)
    tokens = prepared(tmp_path, objective)
    eos, ids = tokens.manifest.roles["eos"], tokens.window(0, 0, tokens.length(0))
    assert tokens.manifest.documents == len(DOCUMENTS) == (ids == eos).sum()
    assert np.array_equal(tokens.document_ends(0), np.flatnonzero(ids == eos) + 1)
    if tokens.manifest.roles.get("bos") != eos:
        assert tokens.manifest.roles.get("bos") not in ids
    for document, part in zip(DOCUMENTS, np.split(ids, tokens.document_ends(0)), strict=False):
        text = tokens.tokenizer().decode(part[:-1].tolist(), skip_special_tokens=False)
        assert case.startswith("bert") or "".join(text.split()) == "".join(document.split())
    vocabulary = tokens.vocabulary()
    assert len(vocabulary.sentinels) == (100 if objective == "span_corruption" else 0)
    workload = load(model, objective, vocabulary, changes=SMALL, sequence_length=64, seed=1)
    batches = batches_of(tokens, workload.objective, 1, [1.0])
    net = workload.build()
    net.load_state_dict({name: workload.initial(name, 1) for name in workload.shapes})
    batch, _ = batches.batch(0, 8)
    loss = workload.loss(net, batch)
    assert loss.count > 0
    assert (loss.total / loss.count).item() < 1.3 * np.log(vocabulary.size)


def with_reserved(folder: Path) -> None:
    """BERT's with as many special tokens again as it has entries."""
    bert(folder)
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_special_tokens([f"<|reserved_{i}|>" for i in range(30_000)])
    made.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def reserved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Data prepared with that tokenizer, once: loading 30,000 special tokens takes seconds."""
    folder = tmp_path_factory.mktemp("reserved")
    with_reserved(folder)
    return prepared(folder, "masked_lm")


@pytest.mark.parametrize(
    "name",
    [
        "masked_lm",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("span_masking", "sentence_order", "unified_lm", "mass")
        ),
    ],
)
def test_what_replaces_a_token_at_random_is_never_a_special_one(name: str, reserved: Any) -> None:
    tokens = reserved
    vocabulary = tokens.vocabulary()
    objective = build(name, vocabulary=replace(vocabulary, bos=1), sequence_length=64, seed=1)
    batch, _ = batches_of(tokens, objective, 1, [1.0]).batch(0, 200)
    special = [i for i, token in tokens.tokenizer().get_added_tokens_decoder().items() if token.special]
    assert len(special) > 30_000
    replaced = batch["tokens"].flatten()
    played = {vocabulary.mask, vocabulary.cls, vocabulary.sep, vocabulary.pad, vocabulary.eos, 1, UNKNOWN}
    assert set(replaced.tolist()) & set(special) <= played


def test_pairs_are_told_apart_by_a_tokenizer_that_ends_both_sides_with_one_token(tmp_path: Path) -> None:
    with_reserved(tmp_path)
    text, roles = tokenizer.load(str(tmp_path), ())
    assert roles["eos"] == roles["sep"]
    pairs = [(document[:90], document[90:150]) for document in DOCUMENTS] + [(DOCUMENTS[0], DOCUMENTS[1])]
    lines = [json.dumps({"en": source, "de": target}) for source, target in pairs]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    tokens = written(tmp_path, Source(uri=str(tmp_path / "a.jsonl"), field=("en", "de")), text, roles)
    assert tokens.manifest.documents == len(pairs)
    objective = build("translation_lm", vocabulary=tokens.vocabulary(), sequence_length=128, seed=1, rate=0.5)
    batches, seen = batches_of(tokens, objective, 1, [1.0]), 0
    for sample in range(len(batches.read)):
        window = batches.read(sample)
        made = objective.collate(batches.read, [sample], 0)
        hidden, types, real = (
            made[key][0].numpy()[: len(window)] for key in ("labels", "token_types", "padding")
        )
        ends = np.flatnonzero(window == roles["sep"])
        for first, middle, last in zip([0, *(ends[1::2] + 1)], ends[::2], ends[1::2], strict=False):
            assert types[first : last + 1].tolist() == [0] * (middle + 1 - first) + [1] * (last - middle)
            assert real[first : last + 1].all()
            inside, beyond = (
                made["attention"][0][first, first : last + 1],
                made["attention"][0][first, last + 1 :],
            )
            assert inside.all()
            assert not beyond.any()
            seen += 1
        assert (hidden[ends] == -100).all()
        shown = set(made["tokens"][0].tolist()) - {roles["mask"], roles["sep"], roles["pad"], UNKNOWN}
        assert not shown & tokens.vocabulary().reserved
    assert seen == len(DOCUMENTS), (
        "the pair that is longer than a sample is read as far as its beginning goes"
    )


@pytest.mark.parametrize("file", ["spiece.model", "tokenizer.model"])
def test_a_model_of_sentencepiece_that_cannot_be_read_is_refused(file: str, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(b"\x0a\x0e")
    with pytest.raises(InputError, match=r"is not a model of SentencePiece that can be read"):
        tokenizer.load(str(tmp_path), ())
