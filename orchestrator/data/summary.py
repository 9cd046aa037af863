"""What prepared data holds, for `orchestrator data inspect`."""

from __future__ import annotations

import math
from typing import Any

from orchestrator.data.tokens import Tokens

EXCERPT_TOKENS = 64


def inspect(uri: str) -> dict[str, Any]:
    """Totals, sources, entropy and an excerpt of each source's text. Raises InputError as `Tokens.open`.

    `entropy_nats` and `bits_per_byte` are the loss of a model that knows only how often each token occurs.
    """
    tokens = Tokens.open(uri)
    found, tokenizer = tokens.manifest, tokens.tokenizer()
    sources = [
        {
            "uri": source.uri,
            "shards": len(source.shards),
            "tokens": source.tokens,
            "documents": sum(shard.documents for shard in source.shards),
            "bytes": sum(shard.bytes for shard in source.shards),
            "excerpt": tokenizer.decode(
                tokens.window(number, 0, min(EXCERPT_TOKENS, source.tokens)).tolist(),
                skip_special_tokens=False,
            ),
        }
        for number, source in enumerate(found.sources)
    ]
    return {
        "uri": tokens.folder.uri,
        "fingerprint": found.fingerprint,
        "tokens": found.tokens,
        "documents": found.documents,
        "bytes": found.bytes,
        "vocabulary": found.vocabulary,
        "dtype": found.dtype,
        "bytes_per_token": found.bytes_per_token,
        "entropy_nats": found.entropy,
        "bits_per_byte": found.entropy / math.log(2) / found.bytes_per_token,
        "sources": sources,
    }
