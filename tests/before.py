"""What earlier versions have left, written with them.

`fixtures/format1.tar.gz`, by the last version with format 1 of prepared data:

texts/  tokenizer.json      the sources
data/  pairs/               prepared data of format 1
batches.json                digests of batches of every objective over it: position, receipt, content
run/                        a run that was stopped at step 5
curve.json                  step, loss and receipt of the same run, undisturbed

`fixtures/drafted.tar.gz`, by the last version whose bitwise runs drew answers with a key-value cache alone:

tokenizer.json  data/       a tokenizer and prepared prompts
run/                        a bitwise GRPO run that was stopped at step 3
curve.json                  step, receipt and answers of the same run, undisturbed
"""

from __future__ import annotations

import tarfile
from pathlib import Path

FIXTURES = Path(__file__).parent / "fixtures"


def unpack(folder: Path, name: str = "format1") -> Path:
    """All of an archive, in a folder where its paths lead to one another."""
    with tarfile.open(FIXTURES / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    found = folder / name
    for data in (*found.glob("data/*"), *found.glob("pairs/*")):
        (data / "tokenizer.json").write_bytes((found / "tokenizer.json").read_bytes())
    for name in ("job.yaml", "events.jsonl"):
        path = found / "run" / name
        path.write_text(path.read_text().replace("@HERE@", str(found)))
    return found
