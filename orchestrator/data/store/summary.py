"""The content of prepared data, for `orchestrator data inspect`."""

from __future__ import annotations

import math
from typing import Any

from orchestrator.data.prepare.rejections import frame_names
from orchestrator.data.samples.held_out_split import split
from orchestrator.data.store.tokens import Tokens

EXCERPT_TOKENS = 64


def sizes(uri: str, share: float | None = None) -> dict[str, int]:
    """Return documents, tokens and bytes of text of prepared data, or of the `share` of it that is held out.

    Raises InputError as `Tokens.open` and `split`.
    """
    tokens = Tokens.open(uri)
    if share is None:
        manifest = tokens.manifest
        return {"documents": manifest.documents, "tokens": manifest.tokens, "bytes": manifest.bytes}
    parts = split(tokens, share)
    held_out = parts.held_out
    return {"documents": held_out.documents, "tokens": held_out.tokens, "bytes": parts.bytes}


def inspect(uri: str, share: float | None = None) -> dict[str, Any]:
    """Return totals, sources, entropy and an excerpt of each source's text; with a `share`, also what it would hold
    out.

    `entropy_nats` and `bits_per_byte` are the loss of a model that knows only token frequencies. Raises InputError as
    `sizes` does.
    """
    tokens = Tokens.open(uri)
    manifest = tokens.manifest
    before, after = frame_names(tokens.folder.uri, manifest)
    sources = [
        {
            "uri": source.uri,
            "shards": len(source.shards),
            "tokens": source.tokens,
            "documents": sum(shard.documents for shard in source.shards),
            "bytes": sum(shard.bytes for shard in source.shards),
            "excerpt": "" if manifest.records else _excerpt(tokens, number),
        }
        for number, source in enumerate(manifest.sources)
    ]
    return {
        "uri": tokens.folder.uri,
        "fingerprint": manifest.fingerprint,
        "tokens": manifest.tokens,
        "documents": manifest.documents,
        "bytes": manifest.bytes,
        **({"rejected": manifest.rejected} if manifest.rejected else {}),
        **({"turns": manifest.turns} if manifest.turns else {}),
        **({"before_a_text": before} if before else {}),
        **({"behind_a_text": after} if after else {}),
        **({"special_tokens_in_text": manifest.named} if manifest.named else {}),
        "vocabulary": manifest.vocabulary,
        "dtype": manifest.dtype,
        "bytes_per_token": manifest.bytes_per_token,
        "entropy_nats": manifest.entropy,
        "bits_per_byte": manifest.entropy / math.log(2) / manifest.bytes_per_token,
        **({} if share is None else {"held_out": sizes(uri, share)}),
        "sources": sources,
    }


def _excerpt(tokens: Tokens, source: int) -> str:
    size = min(EXCERPT_TOKENS, tokens.length(source))
    result: str = tokens.tokenizer().decode(
        tokens.window(source, 0, size).tolist(), skip_special_tokens=False
    )
    return result
