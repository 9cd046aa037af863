"""The manifest of prepared data: a JSON document that is written last. The data exists when its manifest does."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import xxhash

from orchestrator.config.errors import InputError
from orchestrator.config.redact import without_credentials
from orchestrator.data.store.data_folder import DataFolder

FORMAT = 6
"""The format of data that is prepared now. It also determines how samples are cut and drawn, since a run keeps its
data."""
RECORDS_FORMAT = 6
"""The same of records."""
FORMATS = (1, 2, 3, 4, 5, 6)
"""Formats that can be read, and prepared again for runs that began with them.

1: a sample starts every sequence_length tokens, whatever the objective reads; its randomness depends on the epoch.
2: samples tile the text; a sample's randomness depends on the pass over its source. Blocks have checksums, and the ends
of documents are recorded.
3: as 2; the length and a hash of each document's text are recorded too, so that documents can be held out by content.
4: as 3, of records alone; a token that begins before an answer and ends in it is predicted, and no answer is empty.
5: as 4; a chat template is given messages as it reads them, see `preprocessing.messages`.
6: texts and records. What a pretrained folder, a table or a tokenizer means is read as their own libraries read it.
"""
NAME = "manifest.json"


def newest_format(records: bool) -> int:
    """The format of data that is prepared now, of text or of `records`."""
    return RECORDS_FORMAT if records else FORMAT


@dataclass(frozen=True)
class TokenShard:
    """A file of token ids of one part of a source, little-endian, without header.

    Attributes:
        file: its path in the folder of prepared data.
        tokens, documents: how many it holds.
        bytes: length of their text in UTF-8.
        xxh3: xxh3_128 of the file.
        blocks: from format 2 on, the xxh3_64 (16 hexadecimal digits) of every `shards.BLOCK_BYTES`, concatenated.
        ends: from format 2 on, the xxh3_64 of the index of document ends, see `shards.ends_name`.
        contents: from format 3 on, the xxh3_64 of the index of documents' contents, see `shards.contents_name`.
        turns: of conversations that are learnt turn by turn: how many `rows`, how many records these have `more` than
            one each, all of which are documents, and the `tokens` of those; empty if there are none.
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


@dataclass(frozen=True)
class PreparedSource:
    """The shards of one source in the order of its text. `uri` is where the text was when it was prepared, or several
    places joined by commas."""

    uri: str
    shards: tuple[TokenShard, ...]

    @property
    def tokens(self) -> int:
        """Tokens in all shards."""
        return sum(s.tokens for s in self.shards)


@dataclass(frozen=True)
class DataManifest:
    """Prepared data.

    Attributes:
        fingerprint: hash of the text, the tokenizer and the format.
        vocabulary: ids, at least as many as the tokenizer has entries; the others are unused.
        roles: the ids of eos, pad, bos, cls, sep, mask and unk, as far as the tokenizer has them, and of the languages
            that it names, see `orchestrator.data.encoding.tokenizer.LANGUAGES`.
        sentinels: the ids of `<extra_id_0>`, `<extra_id_1>`, ...
        entropy: of the unigram distribution of tokens, in nats: the loss of a model that knows only token frequencies.
        records: the objective whose records it holds, see `orchestrator.data.prepare.records`; empty for text.
        engines: which engines encoded the text, and how much of it was compared with the reference, by name, see
            `encoding.engines`; empty for data of earlier versions.
        rejected: how many documents were left out, repaired, or read in a way that is told, by kind; empty if none.
        code: hashes of the own functions that cleaned the text, by `module:name`; empty if none did, and for data of
            earlier versions.
        chat: the `template` that wrote its conversations, the special `tokens` that it names, and the `tool_template`
            that wrote those with tools if that is another one; empty if none did, and for data of earlier versions.
        frame: the tokens that stand before each text, and those behind it in front of the one that ends a document; of
            data of earlier versions none.
        named: how often the text contains each name of a special token, separately for names read as "text" and
            as "tokens".
        inner_ends: tokens that end a document and stand within one; of data of earlier versions they are not counted.
        own: checksum of own samples, of which there are as many as `documents`; empty for text.
        tokens: of all sources, those of frames included.
        bytes_per_token: turns a loss in nats per token into bits per byte: loss / ln 2 / bytes_per_token. What stands
            before a text is not predicted, and does not count, here and in the entropy.
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
        """Those of all shards, see `TokenShard`; empty if there are none."""
        found = Counter[str]()
        for shard in self.shards:
            found.update(shard.turns)
        return dict(found)

    @property
    def rows(self) -> int:
        """Documents, each row of a table as one, however many records it has."""
        return self.documents - self.turns.get("more", 0)

    @property
    def digest(self) -> str:
        """xxh3_128 over the shards' checksums in order: data of equal digests has the same tokens, or own samples."""
        if self.own:
            return self.own
        content = [[[shard.tokens, shard.xxh3] for shard in source.shards] for source in self.sources]
        return xxhash.xxh3_128_hexdigest(json.dumps([self.dtype, content]).encode())

    def to_json(self) -> dict[str, Any]:
        """The manifest as JSON."""
        found = asdict(self)
        if self.format < 3:  # whose checksum is over what there was
            for shard in (shard for source in found["sources"] for shard in source["shards"]):
                del shard["contents"]
        for shard in (shard for source in found["sources"] for shard in source["shards"]):
            if not shard["turns"]:
                del shard["turns"]
        if not self.records:  # as of earlier versions
            del found["records"]
        if not self.engines:
            del found["engines"]
        if not self.rejected:
            del found["rejected"]
        if not self.chat:
            del found["chat"]
        if not any(self.frame):
            del found["frame"]
        if not self.inner_ends:
            del found["inner_ends"]
        if not self.named:
            del found["named"]
        if not self.own:
            del found["own"]
        if not self.code:
            del found["code"]
        return found

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> DataManifest:
        """The inverse of `to_json`. Raises KeyError or TypeError for another document."""
        sources = tuple(
            PreparedSource(s["uri"], tuple(TokenShard(**shard) for shard in s["shards"]))
            for s in data["sources"]
        )
        before, after = data.get("frame", ((), ()))
        changed = {"sources": sources, "sentinels": tuple(data["sentinels"])}
        return cls(**{**data, **changed, "frame": (tuple(before), tuple(after))})

    def same_tokens(self, other: DataManifest) -> bool:
        """Whether both have the same tokens from the same tokenizer."""
        tokenizers = {self.tokenizer_xxh3, other.tokenizer_xxh3} - {""}
        return [s.xxh3 for s in self.shards] == [s.xxh3 for s in other.shards] and len(tokenizers) < 2

    def checksum(self) -> str:
        """xxh3_128 of the manifest."""
        return xxhash.xxh3_128_hexdigest(json.dumps(self.to_json(), sort_keys=True).encode())


class DamagedManifest(InputError):
    """The manifest is not what was written."""


def read(folder: DataFolder, name: str = NAME) -> DataManifest | None:
    """The manifest `name` in `folder`, or None if there is none.

    Raises InputError if its format is unknown, DamagedManifest if it is damaged.
    """
    try:
        data = folder.read_json(name)
        if data is None:
            return None
        if data["format"] not in FORMATS:
            known = f"{', '.join(map(str, FORMATS[:-1]))} or {FORMATS[-1]}"
            what = f"is of format {data['format']}, not {known}"
            raise InputError(what, folder.uri, "prepare the data again")
        checksum = data.pop("checksum", None)
        found = DataManifest.from_json(data)
        if found.format > 1 and found.checksum() != checksum:
            raise ValueError("its checksum is another")
        return found
    except (ValueError, KeyError, TypeError) as error:
        what = f"holds a damaged {name} ({error!r})"
        raise DamagedManifest(what, folder.uri, "run or prepare the job again, which makes it anew") from None


def write(folder: DataFolder, manifest: DataManifest, name: str = NAME) -> None:
    """Write the manifest, with which the prepared data exists; with another `name`, one of a part of it. Others may
    read it, and where the text was stands there without credentials."""
    manifest = replace(manifest, sources=tuple(map(_public, manifest.sources)))
    folder.write_json(name, {**manifest.to_json(), "checksum": manifest.checksum()})


def _public(source: PreparedSource) -> PreparedSource:
    return replace(source, uri=", ".join(map(without_credentials, source.uri.split(", "))))
