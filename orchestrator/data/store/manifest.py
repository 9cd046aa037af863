"""The manifest of prepared data: a JSON document written last. The data exists once its manifest does."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from orchestrator.config.errors import InputError
from orchestrator.config.redact import without_credentials
from orchestrator.data.store.data_folder import DataFolder

FORMAT = 6
"""The format of newly prepared text. It also determines how samples are cut and drawn, because a run keeps its data.
"""
RECORDS_FORMAT = 7
"""The format of newly prepared records."""
FORMATS = (1, 2, 3, 4, 5, 6, 7)
"""Formats that can be read, and prepared again for runs that began with them.

1: a sample starts every sequence_length tokens, whatever the objective reads; its randomness depends on the epoch.
2: samples tile the text; a sample's randomness depends on the pass over its source. Blocks have checksums, and the ends
of documents are recorded.
3: as 2; the length and a hash of each document's text are recorded too, so that documents can be held out by content.
4: as 3, for records only; a token that begins before an answer and ends in it is predicted, and no answer is empty.
5: as 4; a chat template receives messages in the form that it reads, see `preprocessing.messages`.
6: text and records. A pretrained folder, a table or a tokenizer is interpreted as its own library interprets it.
7: as 6, for records only; ShareGPT's speaker function_call calls tools.
"""
NAME = "manifest.json"


def newest_format(records: bool) -> int:
    """Return the format of newly prepared data, of text or of `records`."""
    return RECORDS_FORMAT if records else FORMAT


@dataclass(frozen=True)
class TokenShard:
    """A file of token ids of one part of a source, little-endian, without header.

    Attributes:
        file: its path in the folder of prepared data.
        tokens, documents: their numbers.
        bytes: length of their text in UTF-8.
        xxh3: xxh3_128 of the file.
        blocks: from format 2 on, the xxh3_64 (16 hexadecimal digits) of every `shards.BLOCK_BYTES`, concatenated.
        ends: from format 2 on, the xxh3_64 of the index of document ends, see `shards.ends_name`.
        contents: from format 3 on, the xxh3_64 of the index of documents' contents, see `shards.contents_name`.
        turns: for conversations whose answers are separate records: the number of `rows`, how many `more` records
            than rows
            they have, and the `tokens` of these records; empty without any.
    """

    file: str
    tokens: int
    documents: int
    bytes: int
    xxh3: str
    blocks: str = ""
    ends: str = ""
    contents: str = ""
    turns: dict[str, int] = field(default_factory=dict)


def part_of(file: str) -> int:
    """Return the number of a shard's part of the text, which names its file."""
    return int(Path(file).stem)


@dataclass(frozen=True, eq=False)
class MappedShards(Sequence[TokenShard]):
    """Shards in memory-mapped arrays, which all processes of a node share. A shard is parsed when it is asked for.

    Attributes:
        rows: the shards as JSON, one after the other, uint8.
        ends: the index in `rows` after each shard, int64 [shards + 1], with the begin of the first shard before.
        lengths, parts: see `PreparedSource`.
    """

    rows: np.ndarray
    ends: np.ndarray
    lengths: np.ndarray
    parts: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        """Return a shard, or a tuple of shards for a slice. Raises IndexError."""
        if isinstance(index, slice):
            return tuple(map(self.__getitem__, range(*index.indices(len(self)))))
        number = range(len(self))[index]
        return TokenShard(**json.loads(self.rows[self.ends[number] : self.ends[number + 1]].tobytes()))


@dataclass(frozen=True)
class PreparedSource:
    """The shards of one source in the order of its text. `uri` is the location of the text when it was prepared, or
    several locations joined by commas.
    """

    uri: str
    shards: Sequence[TokenShard]

    @property
    def tokens(self) -> int:
        """Tokens in all shards."""
        return int(self.lengths.sum())

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each shard, int64 [shards]."""
        if isinstance(self.shards, MappedShards):
            return self.shards.lengths
        return np.array([shard.tokens for shard in self.shards], dtype=np.int64)

    @property
    def parts(self) -> np.ndarray:
        """The number of each shard's part of the text, int64 [shards], ascending."""
        if isinstance(self.shards, MappedShards):
            return self.shards.parts
        return np.array([part_of(shard.file) for shard in self.shards], dtype=np.int64)


ADDED_LATER = ("records", "engines", "rejected", "chat", "inner_ends", "named", "own", "code")
"""Fields that earlier versions did not write. Their manifests keep their checksums, because empty ones are left out."""


@dataclass(frozen=True)
class DataManifest:
    """Prepared data.

    Attributes:
        fingerprint: hash of the text, the tokenizer and the format.
        vocabulary: number of ids, at least the tokenizer's entries; further ids are unused.
        roles: the ids of eos, pad, bos, cls, sep, mask and unk, as far as the tokenizer has them, and of the
            languages that it names, see `orchestrator.data.encoding.tokenizer.LANGUAGES`.
        sentinels: the ids of `<extra_id_0>`, `<extra_id_1>`, ...
        entropy: entropy of the unigram distribution of tokens, in nats: the loss of a model that knows only token
            frequencies.
        records: the objective whose records it holds, see `orchestrator.data.prepare.records`; empty for text.
        engines: by name, the engines that encoded the text, and how much of it was compared with the reference, see
            `encoding.engines`; empty for data of earlier versions.
        rejected: numbers of documents that were left out, repaired, or read in a notable way, by kind; empty without
            any.
        code: hashes of the user's functions that cleaned the text, by `module:name`; empty without any, and for data
            of earlier versions.
        chat: the `template` that wrote its conversations, the special `tokens` that it uses, and the `tool_template`
            for conversations with tools, if that is another one; empty without any, and for data of earlier versions.
        frame: the tokens before each text, and those after it before the end of the document; empty for data of
            earlier versions.
        named: how often the text contains each name of a special token, separately for names read as "text" and as
            "tokens".
        inner_ends: number of tokens within documents that look like a document's end; 0 for data of earlier versions.
        own: checksum of own samples; `documents` is their number; empty for text.
        tokens: tokens of all sources, those of `frame` included.
        bytes_per_token: turns a loss in nats per token into bits per byte: loss / ln 2 / bytes_per_token. Tokens
            before a text are not predicted and do not count, here and in the entropy.
    """

    fingerprint: str
    dtype: str
    tokenizer: str
    vocabulary: int
    roles: dict[str, int]
    sentinels: tuple[int, ...]
    sources: tuple[PreparedSource, ...]
    tokens: int
    documents: int
    bytes: int
    entropy: float
    bytes_per_token: float
    format: int = field(default=FORMAT)
    tokenizer_xxh3: str = ""
    records: str = ""
    engines: dict[str, dict[str, int]] = field(default_factory=dict)
    rejected: dict[str, dict[str, int]] = field(default_factory=dict)
    chat: dict[str, Any] = field(default_factory=dict)
    frame: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    named: dict[str, dict[str, int]] = field(default_factory=dict)
    inner_ends: int = 0
    own: str = ""
    code: dict[str, str] = field(default_factory=dict)

    @property
    def shards(self) -> list[TokenShard]:
        """The shards of all sources."""
        return [shard for source in self.sources for shard in source.shards]

    @property
    def turns(self) -> dict[str, int]:
        """The sums of `turns` over all shards, see `TokenShard`; empty without any."""
        result = Counter[str]()
        for shard in self.shards:
            result.update(shard.turns)
        return dict(result)

    @property
    def rows(self) -> int:
        """Number of documents, counting each table row as one, however many records it has."""
        return self.documents - self.turns.get("more", 0)

    @cached_property
    def digest(self) -> str:
        """xxh3_128 over the shards' checksums in order. Data with equal digests has the same tokens, or own samples."""
        if self.own:
            return self.own
        content = [[[shard.tokens, shard.xxh3] for shard in source.shards] for source in self.sources]
        return xxhash.xxh3_128_hexdigest(json.dumps([self.dtype, content]).encode())

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as JSON. Empty optional fields are left out, so that checksums of earlier versions stay
        valid.
        """
        document = asdict(replace(self, sources=()))
        document["sources"] = [
            {"uri": source.uri, "shards": [asdict(shard) for shard in source.shards]}
            for source in self.sources
        ]
        for shard in (shard for source in document["sources"] for shard in source["shards"]):
            if self.format < 3:  # the checksum covers the original keys
                del shard["contents"]
            if not shard["turns"]:
                del shard["turns"]
        if not any(self.frame):
            del document["frame"]
        for name in ADDED_LATER:
            if not document[name]:
                del document[name]
        return document

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> DataManifest:
        """Restore a manifest; the inverse of `to_json`. Raises KeyError or TypeError for another document."""
        sources = tuple(
            PreparedSource(s["uri"], tuple(TokenShard(**shard) for shard in s["shards"]))
            for s in data["sources"]
        )
        before, after = data.get("frame", ((), ()))
        changed = {"sources": sources, "sentinels": tuple(data["sentinels"])}
        return cls(**{**data, **changed, "frame": (tuple(before), tuple(after))})

    def same_tokens(self, other: DataManifest) -> bool:
        """Return whether both have the same tokens from the same tokenizer."""
        tokenizers = {self.tokenizer_xxh3, other.tokenizer_xxh3} - {""}
        return [s.xxh3 for s in self.shards] == [s.xxh3 for s in other.shards] and len(tokenizers) < 2

    def checksum(self) -> str:
        """xxh3_128 of the manifest."""
        return _checksum(self.to_json())


def _checksum(document: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(document, sort_keys=True).encode())


class DamagedManifest(InputError):
    """The manifest differs from the one that was written."""


def read(folder: DataFolder, name: str = NAME) -> DataManifest | None:
    """Return the manifest `name` in `folder`; None if it is missing.

    Raises InputError if its format is unknown, DamagedManifest if it is damaged.
    """
    document = read_document(folder, name)
    return document and document[1]


def read_document(folder: DataFolder, name: str = NAME) -> tuple[dict[str, Any], DataManifest] | None:
    """Return the JSON of a manifest too, with its checksum. Arguments and errors as for `read`."""
    try:
        data = folder.read_json(name)
        if data is None:
            return None
        if data["format"] not in FORMATS:
            formats = f"{', '.join(map(str, FORMATS[:-1]))} or {FORMATS[-1]}"
            problem = f"is of format {data['format']}, not {formats}"
            raise InputError(problem, folder.uri, "prepare the data again")
        content = {key: value for key, value in data.items() if key != "checksum"}
        manifest = DataManifest.from_json(content)
        # What the file says has the recorded checksum, or else what is understood of it: that takes much longer.
        known = data.get("checksum")
        if manifest.format > 1 and _checksum(content) != known and manifest.checksum() != known:
            raise ValueError("its checksum differs")
        return data, manifest
    except (ValueError, KeyError, TypeError) as error:
        problem = f"holds a damaged {name} ({error!r})"
        raise DamagedManifest(
            problem, folder.uri, "run or prepare the job again, which makes it again"
        ) from None


def write(folder: DataFolder, manifest: DataManifest, name: str = NAME) -> None:
    """Write the manifest, which makes the prepared data exist. With another `name`, it describes a part.

    Others may read it, so the location of the text is written without credentials.
    """
    manifest = replace(manifest, sources=tuple(map(_public, manifest.sources)))
    folder.write_json(name, {**manifest.to_json(), "checksum": manifest.checksum()})


def _public(source: PreparedSource) -> PreparedSource:
    return replace(source, uri=", ".join(map(without_credentials, source.uri.split(", "))))
