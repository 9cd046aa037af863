"""Raw text to token shards with Ray Data, and from there to batches by pure index arithmetic."""
