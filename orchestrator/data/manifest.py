"""What prepared data consists of: a JSON document, written last, so that the data exists when it does."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from orchestrator.data.files import Folder
from orchestrator.errors import InputError

FORMAT = 1
NAME = "manifest.json"


@dataclass(frozen=True)
class Shard:
    """Token ids of one part of a source, little-endian, without header. `bytes` is their text's, in UTF-8."""

    file: str
    tokens: int
    documents: int
    bytes: int
    xxh3: str


@dataclass(frozen=True)
class PreparedSource:
    """The shards of one source in the order of its text. `uri` tells where it once came from."""

    uri: str
    shards: tuple[Shard, ...]

    @property
    def tokens(self) -> int:
        """Tokens in all shards."""
        return sum(s.tokens for s in self.shards)


@dataclass(frozen=True)
class Manifest:
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

    def to_json(self) -> dict[str, Any]:
        """The manifest as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Manifest:
        """The manifest that `to_json` wrote. Raises KeyError or TypeError if it is another document."""
        sources = tuple(
            PreparedSource(s["uri"], tuple(Shard(**shard) for shard in s["shards"])) for s in data["sources"]
        )
        return cls(**{**data, "sources": sources, "sentinels": tuple(data["sentinels"])})


def read(folder: Folder) -> Manifest | None:
    """The manifest in `folder`, or None if there is none.

    Raises InputError if it is of another format or no manifest at all.
    """
    try:
        data = folder.read_json(NAME)
        if data is None:
            return None
        if data["format"] != FORMAT:
            raise InputError(
                f"is of format {data['format']}, not {FORMAT}", folder.uri, "prepare the data again"
            )
        return Manifest.from_json(data)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"holds a damaged {NAME} ({error!r})", folder.uri, "remove the folder and prepare again"
        ) from None


def write(folder: Folder, manifest: Manifest) -> None:
    """Write the manifest. From then on the prepared data exists."""
    folder.write_json(NAME, manifest.to_json())
