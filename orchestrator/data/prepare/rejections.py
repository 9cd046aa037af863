"""Documents that were left out or repaired, over all parts: rejected.jsonl next to the prepared data, and the limit
on it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from orchestrator.config.errors import InputError
from orchestrator.data.clean.totals import removed_in_all
from orchestrator.data.config import ceiling_of
from orchestrator.data.prepare import named_tokens
from orchestrator.data.sources import Part
from orchestrator.data.sources.rejected import EXAMPLES, LEFT_OUT
from orchestrator.data.store import manifest
from orchestrator.data.store.data_folder import DataFolder
from orchestrator.data.store.manifest import DataManifest

NAME = "rejected.jsonl"
Finding = dict[str, Any]
"""A `sources.rejected.Finding` as plain data."""
Totals = dict[str, dict[str, int]]
"""Number of documents, by action (left out, repaired) and by kind."""
LARGE_BYTES = 2**30
"""Above this size of an uncut part, a message says that the text could not be cut."""
LEAST_BYTES = {".jsonl": 8, ".txt": 14}
"""Minimum bytes of a document in a plain file: `{"a":""}`, or the line that separates it from the next."""


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Merge the findings of all parts: one for each file and kind, in order of first appearance."""
    by_key: dict[tuple[int, str, str, str], Finding] = {}
    for finding in findings:
        key = (finding["source"], finding["file"], finding["kind"], finding["action"])
        if key not in by_key:
            by_key[key] = {**finding, "examples": list(finding["examples"])}
            continue
        by_key[key]["count"] += finding["count"]
        by_key[key]["examples"] = [*by_key[key]["examples"], *finding["examples"]][:EXAMPLES]
    return list(by_key.values())


def totals(findings: Iterable[Finding]) -> Totals:
    """Return how many documents were left out and how many were repaired, by kind."""
    counts: Totals = {}
    for finding in findings:
        kinds = counts.setdefault(finding["action"], {})
        kinds[finding["kind"]] = kinds.get(finding["kind"], 0) + finding["count"]
    return {action: dict(sorted(kinds.items())) for action, kinds in sorted(counts.items())}


def write(folder: DataFolder, findings: Iterable[Finding]) -> Totals:
    """Write one line for each file and kind, with count and first examples, and return the totals. Writes nothing
    without findings.
    """
    merged_findings = merged(findings)
    if merged_findings:
        lines = (json.dumps(finding, ensure_ascii=False) + "\n" for finding in merged_findings)
        folder.write(NAME, "".join(lines).encode())
    return totals(merged_findings)


def notes_of(*uris: str) -> list[str]:
    """Return notes for the user about prepared data: documents left out or repaired, and text that a single task had
    to read.
    """
    manifests = [(uri, manifest.read(DataFolder(uri))) for uri in uris]
    lines = [
        line
        for uri, prepared in manifests
        if prepared
        for line in (
            *frame_notes(uri, prepared),
            *notes(prepared.rejected, uri),
            *_turns(prepared),
            *named_tokens.notes(prepared.named),
            *_undivided(prepared),
        )
    ]
    return list(dict.fromkeys(lines))  # all data sets share the note about framing


def frame_notes(uri: str, manifest: DataManifest) -> list[str]:
    """Return at most one line about the tokens around each text. Empty for conversations, whose template writes
    everything.
    """
    if manifest.records == "conversation":
        return []
    before, after = frame_names(uri, manifest)
    parts = [
        *([f"begins with {' '.join(before)}"] if before else []),
        *([f"ends with {' '.join(after)}"] if after else []),
    ]
    return [f"each text {' and '.join(parts)}, as its tokenizer frames it"] if parts else []


def frame_names(uri: str, manifest: DataManifest) -> tuple[list[str], list[str]]:
    """Return the names of the tokens before and after each text of prepared data."""
    if not any(manifest.frame):
        return [], []
    tokenizer = Tokenizer.from_str((DataFolder(uri).read(manifest.tokenizer) or b"").decode())
    before, after = (
        [tokenizer.id_to_token(number) or str(number) for number in side] for side in manifest.frame
    )
    return before, after


def _turns(manifest: DataManifest) -> list[str]:
    """Return one line if conversations are trained turn by turn."""
    turns = manifest.turns
    if not turns:
        return []
    rows = turns["rows"]
    more = turns["more"]
    tokens = turns["tokens"]
    reason = "the chat template rewrites an earlier answer when others follow"
    message = f"{rows} conversations are learnt turn by turn, since {reason}"
    return [f"{message}: {rows + more} records instead of {rows}, with {tokens} tokens more"]


def _undivided(manifest: DataManifest) -> list[str]:
    """Return one line if a single task had to hold a large part."""
    largest = max((shard.bytes for shard in manifest.shards), default=0)
    if largest < LARGE_BYTES:
        return []
    message = f"{largest / 2**30:.1f} GiB of text are one part, which one task reads and holds"
    return [
        f"{message}: a compressed file, a .csv and a .tar cannot be cut; smaller files are read by more tasks"
    ]


def notes(by_kind: Mapping[str, Mapping[str, int]], uri: str) -> list[str]:
    """Return at most one line about documents that were left out and repaired."""
    actions = [
        f"{sum(kinds.values())} documents {action} ({', '.join(f'{kind} {n}' for kind, n in kinds.items())})"
        for action, kinds in by_kind.items()
    ]
    return [f"{', '.join(actions)}; see {uri}/{NAME}"] if actions else []


def read(folder: DataFolder) -> list[Finding]:
    """Return the findings in rejected.jsonl; empty without that file."""
    return [json.loads(line) for line in (folder.read(NAME) or b"").splitlines()]


def check(limit: int | str | None, folder: DataFolder) -> None:
    """Raise InputError if prepared data leaves out more than `limit`, the value of `data.max_rejected`."""
    stored = manifest.read(folder) if limit is not None else None
    if stored and stored.rejected:
        _check(limit, read(folder), stored.rows + removed_in_all(folder), 0.0, folder)


class Ceiling:
    """Stops a preparation as soon as it must exceed `data.max_rejected`, whatever the unfinished parts contain.

    Attributes:
        limited: whether the job sets a limit.
        folder: the folder of the data that is prepared.
    """

    def __init__(self, limit: int | str | None, folder: DataFolder) -> None:
        self.limited = limit is not None
        self._limit = limit
        self.folder = folder
        self._unread: dict[int, float] = {}
        self._findings: list[Finding] = []
        # a share counts all documents that were read, including those that cleaning removed
        self._documents = removed_in_all(folder) if self.limited else 0

    def check(self, number: int, record: Mapping[str, Any] | None, parts: Sequence[Part]) -> None:
        """Count part `number`, and raise InputError if the limit is exceeded for certain.

        On failure, rejected.jsonl lists what was left out so far. `record` is the part's record.
        """
        if not record:
            return
        if not self._unread:
            self._unread = {n: _max_documents(part) for n, part in enumerate(parts)}
        self._unread[number] = 0.0
        self._findings += record["rejected"]
        self._documents += record["documents"] - record.get("turns", {}).get("more", 0)
        if self._findings:
            remaining = sum(self._unread.values())
            _check(self._limit, self._findings, self._documents, remaining, self.folder)


def _check(
    limit: int | str | None, findings: list[Finding], documents: int, remaining: float, folder: DataFolder
) -> None:
    """Raise InputError if too much is left out even if `remaining` more documents are all kept."""
    if limit is None:
        return
    count, share = ceiling_of(limit)
    out = totals(findings).get(LEFT_OUT, {})
    rejected = sum(out.values())
    ceiling = count if share is None else share * (rejected + documents + remaining)
    if ceiling is None or rejected <= ceiling:
        return
    if remaining:
        write(folder, findings)
    files = Counter[str]()
    for finding in findings:
        files[finding["file"]] += finding["count"] if finding["action"] == LEFT_OUT else 0
    ((worst, worst_count),) = files.most_common(1)
    kinds = ", ".join(f"{kind} {n}" for kind, n in out.items())
    problem = f"{rejected} of {rejected + documents} documents are left out ({kinds}), {worst_count} of them in {worst}"
    hint = f"see {folder.uri}/{NAME}; fix the text, or raise data.max_rejected"
    raise InputError(problem, f"data.max_rejected {limit}", hint)


def _max_documents(part: Part) -> float:
    """Return the largest number of documents that a part can have."""
    maximum = 0.0
    for span in part:
        min_bytes = LEAST_BYTES.get(span.file.kind)
        if min_bytes is None or span.file.compression:
            return math.inf
        maximum += span.bytes / min_bytes + 1
    return maximum
