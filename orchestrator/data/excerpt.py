"""A little of prepared data as prepared data of its own, with all that is known of the whole.

A run keeps it in its directory: what ends a run or comes after it (export, summary) needs the tokenizer, what was
counted and some real text, and must not fail because a cache is gone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import xxhash

from orchestrator.data import manifest, shards
from orchestrator.data.files import Folder
from orchestrator.data.manifest import PreparedSource, TokenShard
from orchestrator.data.tokens import Tokens

EXCERPT_TOKENS = 2**15


def keep(uri: str, target: str) -> None:
    """Write an excerpt of the prepared data at `uri` to the folder `target`, unless it has one of that data.

    Raises InputError and DamagedShard as `Tokens` does, and OSError.
    """
    folder = Folder(target)
    tokens = Tokens.open(uri)
    whole = tokens.manifest
    if shards.is_whole(folder) and (manifest.read(folder) or whole).fingerprint == whole.fingerprint:
        return
    source = max(range(tokens.sources), key=tokens.length)
    found = tokens.window(source, 0, min(EXCERPT_TOKENS, tokens.length(source)))
    data, name = found.astype(whole.dtype).tobytes(), shards.shard_name(0)
    ends = (
        tokens.document_ends(source) if whole.format > 1 else np.flatnonzero(found == whole.roles["eos"]) + 1
    )
    ends = ends[ends <= len(found)].astype("<u4")
    shard = TokenShard(name, len(found), len(ends), 0, xxhash.xxh3_128_hexdigest(data))
    if whole.format > 1:
        index = ends.tobytes()
        folder.write(shards.ends_name(name), index)
        shard = replace(shard, blocks=shards.block_sums(data), ends=xxhash.xxh3_64_hexdigest(index))
    folder.write(name, data)
    folder.write("tokenizer.json", tokens.tokenizer().to_str().encode())
    text = folder.read("tokenizer.json") or b""
    sources = (PreparedSource(whole.sources[source].uri, (shard,)),)
    manifest.write(folder, replace(whole, sources=sources, tokenizer_xxh3=xxhash.xxh3_128_hexdigest(text)))
