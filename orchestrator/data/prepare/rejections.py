"""What was left out or repaired in all parts: rejected.jsonl beside the prepared data, and the ceiling of it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from orchestrator.config.data import ceiling_of
from orchestrator.config.errors import InputError
from orchestrator.data.clean.totals import removed_in_all
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
"""Documents by what was done with them (left out, repaired) and by kind."""
LARGE_BYTES = 2**30
"""Text of a part from which on a user is told that it could not be cut."""
LEAST_BYTES = {".jsonl": 8, ".txt": 14}
"""Bytes that a document takes at least in a plain file: `{"a":""}`, or a line that separates it from the next."""


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """The findings of all parts, each file's of one kind as one, in the order in which they come."""
    found: dict[tuple[int, str, str, str], Finding] = {}
    for finding in findings:
        key = (finding["source"], finding["file"], finding["kind"], finding["action"])
        if key not in found:
            found[key] = {**finding, "examples": list(finding["examples"])}
            continue
        found[key]["count"] += finding["count"]
        found[key]["examples"] = [*found[key]["examples"], *finding["examples"]][:EXAMPLES]
    return list(found.values())


def totals(findings: Iterable[Finding]) -> Totals:
    """How many documents were left out and how many repaired, by kind."""
    found: Totals = {}
    for finding in findings:
        kinds = found.setdefault(finding["action"], {})
        kinds[finding["kind"]] = kinds.get(finding["kind"], 0) + finding["count"]
    return {action: dict(sorted(kinds.items())) for action, kinds in sorted(found.items())}


def write(folder: DataFolder, findings: Iterable[Finding]) -> Totals:
    """Write a line a file and kind, with its count and first examples, unless there are none; returns the totals."""
    found = merged(findings)
    if found:
        lines = (json.dumps(finding, ensure_ascii=False) + "\n" for finding in found)
        folder.write(NAME, "".join(lines).encode())
    return totals(found)


def notes_of(*uris: str) -> list[str]:
    """What a user should know of how prepared data was read: what was left out of it or repaired, and text that one
    task had to read."""
    told = [(uri, manifest.read(DataFolder(uri))) for uri in uris]
    lines = [
        line
        for uri, found in told
        if found
        for line in (
            *frame_notes(uri, found),
            *notes(found.rejected, uri),
            *_turns(found),
            *named_tokens.notes(found.named),
            *_undivided(found),
        )
    ]
    return list(dict.fromkeys(lines))  # that of a frame is the same of all sets


def frame_notes(uri: str, found: DataManifest) -> list[str]:
    """What stands around each text, in at most one line; of conversations their template writes all."""
    if found.records == "conversation":
        return []
    before, after = frame_names(uri, found)
    parts = [
        *([f"begins with {' '.join(before)}"] if before else []),
        *([f"ends with {' '.join(after)}"] if after else []),
    ]
    return [f"a text {' and '.join(parts)}, as its tokenizer frames it"] if parts else []


def frame_names(uri: str, found: DataManifest) -> tuple[list[str], list[str]]:
    """The names of the tokens that stand before and behind each text of prepared data."""
    if not any(found.frame):
        return [], []
    tokenizer = Tokenizer.from_str((DataFolder(uri).read(found.tokenizer) or b"").decode())
    before, after = (
        [tokenizer.id_to_token(number) or str(number) for number in side] for side in found.frame
    )
    return before, after


def _turns(found: DataManifest) -> list[str]:
    """A line if there are conversations that are learnt turn by turn."""
    turns = found.turns
    if not turns:
        return []
    rows, more, tokens = turns["rows"], turns["more"], turns["tokens"]
    why = "the chat template writes an earlier answer otherwise when others follow"
    what = f"{rows} conversations are learnt turn by turn, since {why}"
    return [f"{what}: {rows + more} records instead of {rows}, with {tokens} tokens more"]


def _undivided(found: DataManifest) -> list[str]:
    """A line if there is a part whose text one task had to hold."""
    largest = max((shard.bytes for shard in found.shards), default=0)
    if largest < LARGE_BYTES:
        return []
    what = f"{largest / 2**30:.1f} GiB of text are one part, which one task reads and holds"
    return [
        f"{what}: a compressed file, a .csv and a .tar cannot be cut; smaller files are read by more tasks"
    ]


def notes(found: Mapping[str, Mapping[str, int]], uri: str) -> list[str]:
    """What a user should know of what was left out and repaired, in at most one line."""
    told = [
        f"{sum(kinds.values())} documents {action} ({', '.join(f'{kind} {n}' for kind, n in kinds.items())})"
        for action, kinds in found.items()
    ]
    return [f"{', '.join(told)}; see {uri}/{NAME}"] if told else []


def read(folder: DataFolder) -> list[Finding]:
    """What rejected.jsonl says; nothing if there is none."""
    return [json.loads(line) for line in (folder.read(NAME) or b"").splitlines()]


def check(limit: int | str | None, folder: DataFolder) -> None:
    """Raise InputError if more is left out of prepared data than `limit`, which is `data.max_rejected`."""
    found = manifest.read(folder) if limit is not None else None
    if found and found.rejected:
        _check(limit, read(folder), found.rows + removed_in_all(folder), 0.0, folder)


class Ceiling:
    """Ends a preparation as soon as it is certain that more than `data.max_rejected` is left out, whatever the parts
    hold that are not done. `limited` is whether there is a limit at all; `folder` is where the data is prepared."""

    def __init__(self, limit: int | str | None, folder: DataFolder) -> None:
        self.limited = limit is not None
        self._limit, self.folder = limit, folder
        self._left: dict[int, float] = {}
        self._findings: list[Finding] = []
        self._documents = removed_in_all(folder) if self.limited else 0  # a share is of all that was read

    def check(self, number: int, record: Mapping[str, Any] | None, parts: Sequence[Part]) -> None:
        """Raise InputError after part `number`, of which `record` is the record; rejected.jsonl then tells what was
        left out so far."""
        if not record:
            return
        if not self._left:
            self._left = {n: _most_documents(part) for n, part in enumerate(parts)}
        self._left[number] = 0.0
        self._findings += record["rejected"]
        self._documents += record["documents"] - record.get("turns", {}).get("more", 0)
        if self._findings:
            left = sum(self._left.values())
            _check(self._limit, self._findings, self._documents, left, self.folder)


def _check(
    limit: int | str | None, findings: list[Finding], documents: int, left: float, folder: DataFolder
) -> None:
    """Raise InputError if too much is left out even if `left` more documents are not."""
    if limit is None:
        return
    count, share = ceiling_of(limit)
    out = totals(findings).get(LEFT_OUT, {})
    rejected = sum(out.values())
    most = count if share is None else share * (rejected + documents + left)
    if most is None or rejected <= most:
        return
    if left:
        write(folder, findings)
    files = Counter[str]()
    for finding in findings:
        files[finding["file"]] += finding["count"] if finding["action"] == LEFT_OUT else 0
    ((worst, of_worst),) = files.most_common(1)
    told = ", ".join(f"{kind} {n}" for kind, n in out.items())
    what = (
        f"{rejected} of {rejected + documents} documents are left out ({told}), {of_worst} of them in {worst}"
    )
    hint = f"see {folder.uri}/{NAME}; mend the text, or raise data.max_rejected"
    raise InputError(what, f"data.max_rejected {limit}", hint)


def _most_documents(part: Part) -> float:
    """How many documents a part can have at most."""
    found = 0.0
    for span in part:
        least = LEAST_BYTES.get(span.file.kind)
        if least is None or span.file.compression:
            return math.inf
        found += span.bytes / least + 1
    return found
