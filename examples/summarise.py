"""Writes what examples/summarise.yaml trains on: documentation strings of this machine's packages, each as its text and
the line that it begins with.

    orchestrator data corpus corpus && python examples/summarise.py

Writes summarise/train.jsonl and summarise/test.jsonl (a tenth, by a hash of the text).
"""

import hashlib
import json
import re
import sys
from pathlib import Path

SEPARATOR = "\n<|endoftext|>\n"
SUMMARY, TEXT, LONGEST = (20, 120), 150, 500
"""Characters of a summary, the least of a text, and the most of it that is kept."""
SIGNATURE = re.compile(r"[\w.]+\(.*\)( *->.*)?", re.DOTALL)


def pairs(folder: Path) -> dict[str, str]:
    """Texts and their summaries, each text once."""
    found = {}
    for path in sorted(folder.glob("*.txt")):
        for document in path.read_text().split(SEPARATOR):
            parts = [" ".join(part.split()) for part in re.split(r"\n\s*\n", document.strip())]
            if parts and SIGNATURE.fullmatch(parts[0]):
                parts = parts[1:]
            summary, text = (parts[0], " ".join(parts[1:])) if parts else ("", "")
            if SUMMARY[0] <= len(summary) <= SUMMARY[1] and summary.endswith(".") and len(text) >= TEXT:
                found[text[:LONGEST]] = summary
    return found


def main(corpus: str = "corpus", target: str = "summarise") -> None:
    """Write the files."""
    found = pairs(Path(corpus))
    hashes = {text: hashlib.sha256(text.encode()).digest() for text in found}
    place = Path(target)
    place.mkdir(parents=True, exist_ok=True)
    for name, held_out in (("train", False), ("test", True)):
        rows = [
            {"text": text, "summary": found[text]}
            for text in sorted(found, key=hashes.__getitem__)
            if (hashes[text][-1] % 10 == 0) == held_out
        ]
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{place}/{name}.jsonl: {len(rows)} texts and their summaries")


if __name__ == "__main__":
    main(*sys.argv[1:])
