"""The held-out bits per byte of a run, beside gzip's, xz's and a 5-gram model's on the same text.

    python examples/baselines.py runs/quickstart             # or only some: ... runs/quickstart gzip 5-gram

The 5-gram is of tokens, counted in the text that the run trains on; each order is interpolated with the one below it,
down to the uniform distribution (Witten and Bell, 1991). The compressors read the training text's last 4 MiB first, and
what the held-out text adds to them counts.
"""

from __future__ import annotations

import gzip
import lzma
import sys
from collections.abc import Callable

import numpy as np

from orchestrator.config.spec import load
from orchestrator.data.samples.held_out_split import Subset, split
from orchestrator.data.store.tokens import Tokens
from orchestrator.storage.run_directory import RunDir

ORDER = 5
READ_FIRST = 2**22


def main(run: str, *names: str) -> None:
    """Print a line for each, or for those of the `names`; and one for the run."""
    directory = RunDir(run)
    job, summary = load(directory.at("job.yaml")), directory.read_json_or_empty("summary.json")
    data = next(row["data"] for row in directory.rows("events.jsonl") if row.get("data"))
    tokens = Tokens.open(data)
    share = job.data.validation.share if job.data.validation else None
    assert share, "this run holds out no share of its text"
    assert tokens.manifest.vocabulary**ORDER < 2**63, (
        "five tokens of this vocabulary have no number of 64 bits"
    )
    parts = split(tokens, share)
    training, held_out = _stream(parts.training), _stream(parts.held_out)
    decode = tokens.tokenizer().decode
    before = decode(training.tolist(), skip_special_tokens=False).encode()[-READ_FIRST:]
    text = decode(held_out.tolist(), skip_special_tokens=False).encode()
    counted: dict[str, Callable[[], float]] = {
        "gzip": lambda: _added(lambda data: gzip.compress(data, 9), before, text),
        "xz": lambda: _added(lambda data: lzma.compress(data, preset=9), before, text),
        f"{ORDER}-gram": lambda: (
            -np.log2(_probabilities(training, held_out, tokens.manifest.vocabulary)).sum()
        ),
    }
    print("Held-out text that was not trained on:")
    for name in names or counted:
        print(f"  {name:12} {counted[name]() / parts.bytes:.3f} bits per byte")
    own = summary["evaluation"]["sets"]["validation"]["bits_per_byte"]
    print(f"  {'this run':12} {own:.3f} bits per byte")


def _stream(documents: Subset) -> np.ndarray:
    """All tokens of some documents, int64."""
    return np.concatenate([documents.window(n, 0, documents.length(n)) for n in range(documents.sources)])


def _added(compress: Callable[[bytes], bytes], before: bytes, text: bytes) -> float:
    """Bits that `text` adds to what is compressed after `before`."""
    return 8.0 * (len(compress(before + text)) - len(compress(before)))


def _probabilities(training: np.ndarray, text: np.ndarray, vocabulary: int) -> np.ndarray:
    """The probability of each token of `text` after the four before it, float64 [tokens]."""
    found = np.full(len(text), 1.0 / vocabulary)
    for order in range(1, ORDER + 1):
        whole, counts = np.unique(_ngrams(training, order, vocabulary), return_counts=True)
        contexts, first = np.unique(whole // vocabulary, return_index=True)
        kinds = np.diff(first, append=len(whole))  # different tokens after each context
        after = np.add.reduceat(counts, first)
        asked = _ngrams(text, order, vocabulary)
        seen = _of(whole, counts, asked)
        total, different = (_of(contexts, values, asked // vocabulary) for values in (after, kinds))
        known = total > 0  # an unknown context leaves what the shorter one says
        mixed = (seen + different * found[order - 1 :]) / np.maximum(total + different, 1)
        found[order - 1 :] = np.where(known, mixed, found[order - 1 :])
    return found


def _ngrams(tokens: np.ndarray, order: int, vocabulary: int) -> np.ndarray:
    """A number for each `order` tokens in a row, int64 [tokens - order + 1]: the last is its remainder."""
    number = np.zeros(len(tokens) - order + 1, np.int64)
    for place in range(order):
        number = number * vocabulary + tokens[place : place + len(number)]
    return number


def _of(keys: np.ndarray, values: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """The value of each key that is asked for, 0 for those that are not there; keys ascend."""
    at = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
    return np.where(keys[at] == asked, values[at], 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
