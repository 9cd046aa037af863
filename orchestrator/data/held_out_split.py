"""Which documents of prepared data are held out from training: those whose text says so."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from orchestrator.data.contents import digests
from orchestrator.data.subset import Subset
from orchestrator.data.tokens import Tokens
from orchestrator.job.errors import InputError

SHARE = "data.validation.share"
DIGESTS = 2**64
"""Number of digests that there may be."""


@dataclass(frozen=True)
class Split:
    """The documents of prepared data in two: those that are trained on, and those that are held out, with the bytes of
    the latter's text."""

    training: Subset
    held_out: Subset
    bytes: int


def split(tokens: Tokens, share: float) -> Split:
    """Hold out about the `share` of documents whose digest is small: equal documents are on one side, and a document is
    on the same side whatever others there are.

    Raises InputError if a side would be empty, or the data do not tell documents apart.
    """
    contents = [tokens.contents(source) for source in range(tokens.sources)]
    found = [digests(entries) for entries in contents]
    limit = math.ceil(share * DIGESTS)  # exact: the product of a float and a power of two is one
    chosen = [values < limit for values in found]
    _check_sides(np.concatenate(found), sum(int(mask.sum()) for mask in chosen), share)
    text = sum(int(entries["bytes"][mask].sum()) for entries, mask in zip(contents, chosen, strict=True))
    return Split(Subset(tokens, [~mask for mask in chosen]), Subset(tokens, chosen), text)


def trained_documents(tokens: Tokens, held_out: Tokens, share: float) -> int:
    """How many documents of the set `held_out` are also among those of `tokens` that are trained on, where `share` of
    them is held out.

    Raises InputError if either does not tell documents apart.
    """
    ours = np.concatenate([digests(held_out.contents(source)) for source in range(held_out.sources)])
    ours = ours[ours >= math.ceil(share * DIGESTS)]
    there = np.zeros(len(ours), dtype=bool)
    for source in range(tokens.sources):
        there |= np.isin(ours, digests(tokens.contents(source)))
    return int(there.sum())


def _check_sides(found: np.ndarray, held_out: int, share: float) -> None:
    """Raise InputError if `held_out` of the documents with the digests `found` are none or all of them."""
    if 0 < held_out < len(found):
        return
    least, most = int(found.min()) / DIGESTS, int(found.max()) / DIGESTS
    if not held_out:
        what, hint = "holds out none", f"make it at least {_rounded(least, up=True)}"
    else:
        what, hint = "leaves none", f"make it at most {_rounded(most, up=False)}"
    if least == most:
        hint = (
            "separate documents by lines of <|endoftext|>, or name held-out text in data.validation.sources"
        )
    raise InputError(f"{share:g} {what} of {len(found)} documents", SHARE, hint)


def _rounded(share: float, up: bool) -> str:
    """A share to three significant digits."""
    unit = 10.0 ** (math.floor(math.log10(share)) - 2)
    return f"{(math.floor(share / unit) + 1 if up else math.floor(share / unit)) * unit:.3g}"
