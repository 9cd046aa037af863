"""What the version before has left: `fixtures/format1.tar.gz`, written with it.

texts/  tokenizer.json      the sources
data/  pairs/               prepared data of format 1
batches.json                digests of batches of every objective over it: position, receipt, content
run/                        a run that was stopped at step 5
curve.json                  step, loss and receipt of the same run, undisturbed
"""

from __future__ import annotations

import tarfile
from pathlib import Path

ARCHIVE = Path(__file__).parent / "fixtures" / "format1.tar.gz"


def unpack(folder: Path) -> Path:
    """All of it, in a folder where its paths lead to one another."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    found = folder / "format1"
    for data in (*found.glob("data/*"), *found.glob("pairs/*")):
        (data / "tokenizer.json").write_bytes((found / "tokenizer.json").read_bytes())
    for name in ("job.yaml", "events.jsonl"):
        path = found / "run" / name
        path.write_text(path.read_text().replace("@HERE@", str(found)))
    return found
