"""Of which folders transformers makes another tokenizer than their tokenizer.json says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf_tokenizers
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from orchestrator.data.encoding import tokenizer as made
from orchestrator.data.encoding.auto_tokenizer import class_to_read, probes
from orchestrator.data.encoding.training import train_bytes

DIGITS = train_bytes([Path(__file__).read_text(), "1234567 " * 50], 400, ())


def test_there_are_a_hundred_probes() -> None:
    found = list(probes(Tokenizer.from_str(DIGITS)))
    assert len(found) == len(set(found)) == 100


@pytest.mark.contract
@pytest.mark.parametrize(
    ("kind", "wanted"), [("qwen2", "PreTrainedTokenizerFast"), ("qwen3", ""), ("llama", "")]
)
def test_a_tokenizer_that_transformers_would_make_anew_is_told(
    kind: str, wanted: str, tmp_path: Path
) -> None:
    """For a Qwen 2 AutoTokenizer takes a class with a way of its own to divide text, whatever the folder says."""
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(DIGITS)).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert class_to_read(str(tmp_path)) == wanted


@pytest.mark.contract
@pytest.mark.parametrize("write", [hf_tokenizers.gpt2, hf_tokenizers.bert], ids=lambda write: write.__name__)
def test_what_is_read_is_not_told_to_be_read_otherwise(write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path)
    assert class_to_read(str(tmp_path)) == ""
    # Stored truncation and padding, which transformers drops, are not how a text is divided.
    whole = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    whole.enable_truncation(4)
    whole.enable_padding(length=9)
    whole.save(str(tmp_path / "tokenizer.json"))
    assert class_to_read(str(tmp_path)) == ""


def test_a_folder_is_loaded_once_until_a_file_in_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its special tokens and how it divides a text are asked of one tokenizer, which takes a second to load."""
    hf_tokenizers.bert(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    loads: list[str] = []
    load = AutoTokenizer.from_pretrained

    def counted(folder: str, **more: Any) -> Any:
        loads.append(folder)
        return load(folder, **more)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", counted)
    for _ in range(2):
        assert made.special_tokens_of(str(tmp_path))["cls_token"] == "[CLS]"
        assert class_to_read(str(tmp_path)) == ""
    assert len(loads) == 1
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"cls_token": "[SEP]"}))
    assert made.special_tokens_of(str(tmp_path))["cls_token"] == "[SEP]"
    assert len(loads) == 2
