"""What prepared data consists of: a JSON document, written last, so that the data exists when it does."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import xxhash

from orchestrator.data.files import Folder
from orchestrator.job.errors import InputError

FORMAT = 2
"""Of data that is prepared now. The number also says how its samples are cut and drawn, since a run keeps its data."""
FORMATS = (1, 2)
"""Those that can be read, and made again for the runs that began with them.

1: a sample starts every sequence_length tokens, whatever it reads; its random numbers are those of the epoch.
2: samples tile the text; a sample's random numbers are those of its source's pass. Blocks have checksums, and the ends
of documents are on record.
"""
NAME = "manifest.json"


@dataclass(frozen=True)
class TokenShard:
    """Token ids of one part of a source, little-endian, without header. `bytes` is their text's, in UTF-8.

    From format 2 on: `blocks` are the checksums (xxh3_64, 16 hexadecimal digits each) of every `tokens.BLOCK_BYTES` of
    the file, and `ends` that of the file beside it which holds where its documents end.
    """

    file: str
    tokens: int
    documents: int
    bytes: int
    xxh3: str
    blocks: str = ""
    ends: str = ""


@dataclass(frozen=True)
class PreparedSource:
    """The shards of one source in the order of its text. `uri` tells where it once came from."""

    uri: str
    shards: tuple[TokenShard, ...]

    @property
    def tokens(self) -> int:
        """Tokens in all shards."""
        return sum(s.tokens for s in self.shards)


@dataclass(frozen=True)
class DataManifest:
    """Prepared data. `roles` maps eos, pad, bos, cls, sep, mask, unk to ids, those the tokenizer has.

    `entropy` is that of the tokens' unigram distribution in nats: the loss of a model that knows only how
    often each token occurs. `bytes_per_token` turns a loss in nats a token into bits a byte:
    loss / ln 2 / bytes_per_token. `vocabulary` may exceed the tokenizer's entries; the rest goes unused.
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

    @property
    def shards(self) -> list[TokenShard]:
        """The shards of all sources."""
        return [shard for source in self.sources for shard in source.shards]

    @property
    def digest(self) -> str:
        """xxh3_128 over the shards' checksums in order: data of equal digests has the same tokens."""
        content = [[[shard.tokens, shard.xxh3] for shard in source.shards] for source in self.sources]
        return xxhash.xxh3_128_hexdigest(json.dumps([self.dtype, content]).encode())

    def to_json(self) -> dict[str, Any]:
        """The manifest as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> DataManifest:
        """The manifest that `to_json` wrote. Raises KeyError or TypeError if it is another document."""
        sources = tuple(
            PreparedSource(s["uri"], tuple(TokenShard(**shard) for shard in s["shards"]))
            for s in data["sources"]
        )
        return cls(**{**data, "sources": sources, "sentinels": tuple(data["sentinels"])})

    def same(self, other: DataManifest) -> bool:
        """Whether both are of the same tokens from the same text."""
        tokenizers = {self.tokenizer_xxh3, other.tokenizer_xxh3} - {""}
        return [s.xxh3 for s in self.shards] == [s.xxh3 for s in other.shards] and len(tokenizers) < 2

    def checksum(self) -> str:
        """xxh3_128 of the manifest."""
        return xxhash.xxh3_128_hexdigest(json.dumps(self.to_json(), sort_keys=True).encode())


class DamagedManifest(InputError):
    """There is a manifest, and it is not what was written."""


def read(folder: Folder) -> DataManifest | None:
    """The manifest in `folder`, or None if there is none.

    Raises InputError if it is of another format, DamagedManifest if it is none at all.
    """
    try:
        data = folder.read_json(NAME)
        if data is None:
            return None
        if data["format"] not in FORMATS:
            what = f"is of format {data['format']}, not {' or '.join(map(str, FORMATS))}"
            raise InputError(what, folder.uri, "prepare the data again")
        checksum = data.pop("checksum", None)
        found = DataManifest.from_json(data)
        if found.format > 1 and found.checksum() != checksum:
            raise ValueError("its checksum is another")
        return found
    except (ValueError, KeyError, TypeError) as error:
        what = f"holds a damaged {NAME} ({error!r})"
        raise DamagedManifest(what, folder.uri, "run or prepare the job again, which makes it anew") from None


def write(folder: Folder, manifest: DataManifest) -> None:
    """Write the manifest. From then on the prepared data exists."""
    folder.write_json(NAME, {**manifest.to_json(), "checksum": manifest.checksum()})
