"""What stands around each document, compared with what the tokenizer of transformers writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hf_tokenizers import DOCUMENTS, bert, unigram, with_bos
from tokenizers import Tokenizer

from orchestrator.data.encoding import tokenizer
from orchestrator.data.encoding.engines import Encoded
from orchestrator.data.encoding.framing import UNFRAMED, Framing, framed
from orchestrator.data.sources.documents import TextPiece

BOS, EOS, SEP = 80, 90, 91
LLAMA = Framing((BOS,), ())
PIECES = [
    TextPiece("a", False, 1), TextPiece("b", True, 1), TextPiece("", True, 0), TextPiece("c", False, 1, True),
    TextPiece("d", True, 1),
]  # fmt: skip
ENCODED = Encoded(np.array([1, 2, 3, 4, 5], np.uint32), np.array([2, 3, 3, 4, 5]))


def test_documents_are_closed_where_they_end() -> None:
    ids, ends = framed(ENCODED, PIECES, UNFRAMED, EOS, SEP, goes_on=False)
    assert ids.tolist() == [1, 2, 3, EOS, EOS, 4, SEP, 5, EOS]
    assert ends.tolist() == [4, 5, 9]


def test_each_document_is_framed_once_however_it_is_cut() -> None:
    ids, ends = framed(ENCODED, PIECES, LLAMA, EOS, SEP, goes_on=False)
    assert ids.tolist() == [BOS, 1, 2, 3, EOS, BOS, EOS, BOS, 4, SEP, 5, EOS]
    assert ends.tolist() == [5, 7, 12]
    ids, ends = framed(ENCODED, PIECES, Framing((BOS,), (SEP,)), EOS, SEP, goes_on=True)
    assert ids.tolist() == [1, 2, 3, SEP, EOS, BOS, SEP, EOS, BOS, 4, SEP, 5, SEP, EOS]
    assert ends.tolist() == [5, 8, 14]


def test_what_a_parsed_text_says_itself_is_not_written_twice() -> None:
    said = Encoded(np.array([BOS, 1, EOS, 2], np.uint32), np.array([3, 4]))
    pieces = [TextPiece("<s>a</s>", True, 8), TextPiece("b", True, 1)]
    ids, ends = framed(said, pieces, Framing((BOS,), (), parsed=True), EOS, None, goes_on=False)
    assert ids.tolist() == [BOS, 1, EOS, BOS, 2, EOS]
    assert ends.tolist() == [3, 6]
    assert framed(said, pieces, LLAMA, EOS, None, goes_on=False)[0].tolist()[:2] == [BOS, BOS]


@pytest.mark.parametrize("write", [with_bos, bert, unigram])
def test_the_frame_is_that_of_the_tokenizer(write: object, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    write(tmp_path)  # type: ignore[operator]
    text, roles = tokenizer.load(str(tmp_path), ())
    theirs = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(text))
    found, eos = Framing.of(text, roles["eos"], True, False), roles["eos"]
    for document in DOCUMENTS[:3]:
        inside = theirs(document, add_special_tokens=False)["input_ids"]
        before, after = found.around(inside, eos)
        whole = [*before, *inside, *after]
        expected = theirs(document)["input_ids"]
        assert whole == (expected if expected[-1] == eos else [*expected, eos])
    assert Framing.of(text, eos, False, False) == UNFRAMED
