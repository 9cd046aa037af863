"""Models of SentencePiece give the ids of the sentencepiece library, and folders those of transformers."""

from __future__ import annotations

import io
import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import fsspec
import pytest
import sentencepiece
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from orchestrator.config.errors import InputError
from orchestrator.data.encoding.sentencepiece_file import convert
from orchestrator.data.encoding.tokenizer import is_there, load

TEXTS = [topics[key] for key in sorted(topics)[:40]]
LINES = [line for text in TEXTS for line in text.splitlines() if line.strip()]
HARD = [
    "",
    " ",
    "  two  spaces ",
    " begins",
    "tab\tand\nline",
    "äöü \uff46\uff55\uff4c\uff4c ①",
    "日本語の文 🙂🙃",
    "a" * 300,
    "<x>mark</x>",
]


def trained(**options: Any) -> bytes:
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=made, vocab_size=600, minloglevel=2, **options
    )
    return made.getvalue()


OPTIONS: dict[str, dict[str, Any]] = {
    "unigram": {},
    "unigram with bytes": {"byte_fallback": True, "character_coverage": 0.98},
    "bpe as Llama's": {
        "model_type": "bpe", "byte_fallback": True, "remove_extra_whitespaces": False,
        "normalization_rule_name": "identity", "split_digits": True,
    },
    "bpe": {"model_type": "bpe"},
    "no prefix": {"add_dummy_prefix": False, "user_defined_symbols": ["<x>"], "normalization_rule_name": "nmt_nfkc_cf"},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_ids_are_those_of_sentencepiece(name: str) -> None:
    data = trained(**OPTIONS[name])
    theirs, ours = sentencepiece.SentencePieceProcessor(model_proto=data), convert(data)
    assert ours.get_vocab_size() == theirs.get_piece_size()
    for text in [*HARD, *LINES[:300], *TEXTS[:3]]:
        ids = theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False).ids == ids, text
        if theirs.unk_id() not in ids:
            assert ours.decode(ids) == theirs.decode(ids)


def test_a_folder_is_read_as_its_class_reads_it(tmp_path: Path) -> None:
    """Llama's class, whose configuration names it, and a bare model."""
    data = trained(**OPTIONS["bpe as Llama's"])
    (tmp_path / "tokenizer.model").write_bytes(data)
    assert is_there(str(tmp_path))
    text, roles = load(str(tmp_path), ())
    theirs = sentencepiece.SentencePieceProcessor(model_proto=data)
    made = Tokenizer.from_str(text)
    assert roles["eos"] == theirs.eos_id() == 2
    for line in LINES[:100]:
        assert made.encode(line, add_special_tokens=False).ids == theirs.encode(line)
    assert load(str(tmp_path / "tokenizer.model"), ())[0] == text
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    ours = Tokenizer.from_str(load(str(tmp_path), ())[0])
    wanted = AutoTokenizer.from_pretrained(tmp_path)
    for line in LINES[:100]:
        assert ours.encode(line, add_special_tokens=False).ids == wanted.encode(
            line, add_special_tokens=False
        )


def test_a_broken_model_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.model").write_bytes(b"\x00\x01 no model")
    with pytest.raises(
        InputError, match=r"data.tokenizer .*a.model: is not a model of SentencePiece that can be read"
    ):
        load(str(tmp_path / "a.model"), ())
    (tmp_path / "b.model").write_bytes(trained(user_defined_symbols=["<x>"]))
    with pytest.raises(InputError, match=r"a space goes before its own symbols \(<x>\)"):
        load(str(tmp_path / "b.model"), ())
    with pytest.raises(InputError, match="no model of SentencePiece"):
        load(str(tmp_path), ())


def test_a_remote_folder_of_a_class_is_refused(tmp_path: Path) -> None:
    """Its ids would be SentencePiece's own, which a class such as XLM-RoBERTa's shifts."""
    place = f"memory://{tmp_path.name}"
    files = fsspec.filesystem("memory")
    files.pipe(f"/{tmp_path.name}/sentencepiece.bpe.model", trained())
    assert load(place, ())[1]["eos"] == 2
    files.pipe(f"/{tmp_path.name}/tokenizer_config.json", b'{"tokenizer_class": "XLMRobertaTokenizer"}')
    with pytest.raises(
        InputError, match=r"reads local folders only; copy the folder to a local path; or copy"
    ):
        load(place, ())


def test_a_class_that_fails_is_told_with_a_way_that_works(tmp_path: Path) -> None:
    """Also code of the folder is not run, nor asked for."""
    data = trained()
    (tmp_path / "tokenizer.model").write_bytes(data)
    auto = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(auto))
    mark = tmp_path / "imported"
    (tmp_path / "own.py").write_text(f"open({str(mark)!r}, 'w')")
    with pytest.raises(InputError, match=r"makes no tokenizer of it .*; copy its \.model file into a folder"):
        load(str(tmp_path), ())
    assert not mark.exists()
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "tokenizer.model").write_bytes(data)
    assert load(str(tmp_path / "alone"), ())[1]["eos"] == 2
