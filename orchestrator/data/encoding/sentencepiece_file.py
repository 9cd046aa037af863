"""SentencePiece's models (Kudo and Richardson, 2018): a file with pieces, their scores, and how text is normalised.

A model alone gives SentencePiece's own ids. In a folder whose configuration names a class of transformers, the class
decides, because some shift the ids or add tokens (XLM-RoBERTa, T5).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

from orchestrator.config.errors import InputError
from orchestrator.data.store.data_folder import DataFolder

SUFFIX = ".model"
NAMES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model", "spm.model")
"""Usual names of the file in a folder."""
SPACE = "▁"
NORMAL, CONTROL, USER = 1, 3, 4
"""Types of pieces: ordinary ones, those that no text contains, and those that are always one token."""
UNIGRAM, BPE = 1, 2
ALONE = "copy its .model file into a folder of its own, which is read with SentencePiece's own ids"
"""How to read a model without the class that its folder names."""


def name_in(folder: DataFolder) -> str | None:
    """Return the name of the model in a folder; None without one."""
    return next((name for name in NAMES if folder.read(name) is not None), None)


def text_of(folder: DataFolder, name: str, where: str) -> str:
    """Return the JSON of the tokenizer of the file `name` in a folder; empty if it is missing. Raises InputError."""
    data = folder.read(name)
    if data is None:
        return ""
    if name in NAMES and _names_a_class(folder):
        if not folder.local:
            problem = "is read by a class of transformers, which reads local folders only"
            raise InputError(problem, where, f"copy the folder to a local path; or {ALONE}")
        return _made_by_transformers(folder.uri, where)
    try:
        return _converted(data)
    except (ValueError, RuntimeError) as error:
        raise InputError(f"is not a model of SentencePiece that can be read ({error})", where) from None


def _names_a_class(folder: DataFolder) -> bool:
    config = folder.read_json("tokenizer_config.json") or {}
    return bool(config.get("tokenizer_class")) or folder.read("config.json") is not None


@lru_cache(maxsize=2)  # a command reads it several times
def _converted(data: bytes) -> str:
    return str(convert(data).to_str())


def _made_by_transformers(folder: str, where: str) -> str:
    """Return the tokenizer that the class of a folder makes of its model. Raises InputError."""
    from transformers import AutoTokenizer

    try:
        result = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return str(result.backend_tokenizer.to_str())
    except Exception as error:  # each class fails in its own way
        why = " ".join(str(error).split())[:200]
        raise InputError(f"transformers makes no tokenizer of it ({why})", where, ALONE) from None


def convert(data: bytes) -> Tokenizer:
    """Return a tokenizer with SentencePiece's ids for every text. Raises ValueError for a model of another kind."""
    proto = _parsed(data)
    spec, normal = proto.trainer_spec, proto.normalizer_spec
    if spec.treat_whitespace_as_suffix:
        raise ValueError("spaces belong to the piece before them, which tokenizers cannot express")
    symbols = [piece.piece for piece in proto.pieces if piece.type == USER]
    if symbols and normal.add_dummy_prefix:
        raise ValueError(
            f"a space goes before its own symbols ({symbols[0]}), which tokenizers cannot express"
        )
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    if spec.model_type == UNIGRAM:
        model: Any = models.Unigram(pieces, spec.unk_id, spec.byte_fallback)
    elif spec.model_type == BPE:
        vocabulary = {piece: number for number, (piece, _) in enumerate(pieces)}
        unknown = pieces[spec.unk_id][0]
        model = models.BPE(
            vocabulary, _merges(proto), unk_token=unknown, fuse_unk=True, byte_fallback=spec.byte_fallback
        )
    else:
        raise ValueError("it is a model of words or characters")
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence(_normalisers(normal))
    decoding = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(
        [*decoding, *([decoders.Strip(" ", 1, 0)] if normal.add_dummy_prefix else [])]
    )
    made.add_special_tokens(
        [AddedToken(p.piece, normalized=False) for p in proto.pieces if p.type == CONTROL]
    )
    made.add_tokens([AddedToken(symbol, normalized=False) for symbol in symbols])
    return made


def _parsed(data: bytes) -> Any:
    from transformers.convert_slow_tokenizer import import_protobuf

    proto = import_protobuf().ModelProto()
    try:
        proto.ParseFromString(data)
    except Exception as error:  # protobuf has an error for each of its implementations
        raise ValueError(" ".join(str(error).split()) or "it is damaged") from None
    if not proto.pieces:
        raise ValueError("it has no pieces")
    return proto


def _merges(proto: Any) -> list[tuple[str, str]]:
    """Return the pairs of pieces that make another piece. SentencePiece joins the pair whose result has the best
    score.
    """
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type in (NORMAL, USER)}
    order = {piece.piece: number for number, piece in enumerate(proto.pieces)}
    result = []
    for piece, score in scores.items():
        pairs = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        existing = [pair for pair in pairs if pair[0] in scores and pair[1] in scores]
        result += [(-score, order[piece], order[left], order[right], left, right) for left, right in existing]
    return [(left, right) for *_, left, right in sorted(result)]


def _normalisers(spec: Any) -> list[Any]:
    result: list[Any] = []
    if spec.precompiled_charsmap:
        result.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        result += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        result.append(normalizers.Prepend(SPACE))
    if spec.escape_whitespaces:
        result.append(normalizers.Replace(" ", SPACE))
    return result
