"""An excerpt of prepared data: the tokenizer, the counts and a little text, in the format of prepared data.

A run keeps it in its directory, because export and summary need these and must not fail when the cache is gone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import xxhash

from orchestrator.data.prepare import shards
from orchestrator.data.store import manifest
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.data.store.manifest import PreparedSource, TokenShard
from orchestrator.data.store.tokens import Tokens

EXCERPT_TOKENS = 2**15


def write_excerpt(uri: str, target: str) -> None:
    """Write an excerpt of the prepared data at `uri` to the folder `target`, unless it has one of the same data.

    Raises InputError and DamagedShard as `Tokens` does, and OSError.
    """
    folder = DataFolder(target)
    tokens = Tokens.open(uri, keep=0)
    full = tokens.manifest
    if shards.is_complete(folder) and (manifest.read(folder) or full).fingerprint == full.fingerprint:
        return
    if full.own:
        if text := DataFolder(uri).read("tokenizer.json"):  # the tokenizer of captions
            folder.write("tokenizer.json", text)
        manifest.write(folder, full)
        return
    source = max(range(tokens.sources), key=tokens.length)
    excerpt = tokens.window(source, 0, min(EXCERPT_TOKENS, tokens.length(source)))
    data = excerpt.astype(full.dtype).tobytes()
    name = shards.shard_name(0)
    ends = (
        tokens.document_ends(source) if full.format > 1 else np.flatnonzero(excerpt == full.roles["eos"]) + 1
    )
    ends = ends[ends <= len(excerpt)].astype("<u4")
    shard = TokenShard(name, len(excerpt), len(ends), 0, xxhash.xxh3_128_hexdigest(data))
    if full.format > 1:
        index = ends.tobytes()
        folder.write(shards.ends_name(name), index)
        shard = replace(shard, blocks=shards.block_sums(data), ends=xxhash.xxh3_64_hexdigest(index))
    folder.write(name, data)
    folder.write("tokenizer.json", tokens.tokenizer().to_str().encode())
    text = folder.read("tokenizer.json") or b""
    sources = (PreparedSource(full.sources[source].uri, (shard,)),)
    # the contents index is left out, because nothing is held out from an excerpt
    shortened = replace(full, sources=sources, format=min(full.format, 2))
    manifest.write(folder, replace(shortened, tokenizer_xxh3=xxhash.xxh3_128_hexdigest(text)))
