"""Cleaning against datatrove's local pipeline: the same JSONL, rules, cores and processes; time, memory, documents.

    .venv/bin/python tests/bench/bench_clean.py --their-python PYTHON [--mb 50] [--processes 2] [--rounds 3] [--json]

PYTHON has datatrove with spacy, regex and `xxhash<4`, in an environment of its own:

    python -m venv build/reference
    build/reference/bin/pip install datatrove spacy regex orjson tokenizers 'xxhash<4'

The text is the documentation strings of the installed packages, and a tenth of them once more. Steps: the quality and
repetition rules of Gopher (with 60 % of words with a letter, since these are technical), those of FineWeb, and near
duplicates (MinHash, 5 words in a row). Every run is a process
of its own, from the first line of its program to its end, with all imports and Ray's start. Memory is the peak of the
PSS of all its processes. Rows:

    ours             decisions, and then all that is kept read again, as it is when it is tokenised
    datatrove        its pipeline, with spaCy's words
    datatrove-words  its pipeline, with the words that ours has: a regular expression
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROWS = ("ours", "datatrove", "datatrove-words")
FILES = 16


def build(folder: Path, megabytes: float) -> None:
    """The text, in several files since datatrove divides work by files."""
    from orchestrator.data.corpus import PACKAGES, _docstrings

    found, seen, size = [], set(), 0
    for text in (text for package in PACKAGES for text in _docstrings(package)):
        if len(text) > 200 and text not in seen and size < megabytes * 10**6:
            seen.add(text)
            found.append(text)
            size += len(text)
    found += [f"{text}\nOnce more." for text in found[::10]]
    for number in range(FILES):
        with open(folder / f"{number:02d}.jsonl", "w") as file:
            for text in found[number::FILES]:
                file.write(json.dumps({"text": text}) + "\n")


def ours(folder: Path, work: Path, processes: int) -> dict[str, Any]:
    """Clean the text, and read what is left."""
    from cluster.local.ray_session import connected_ray
    from orchestrator.config.packages import PACKAGES

    with connected_ray(None, processes, packages=PACKAGES):
        return cleaned(folder, work, processes)


def cleaned(folder: Path, work: Path, processes: int) -> dict[str, Any]:
    """As `orchestrator.data.prepare.prepare` does it, to where text is tokenised."""
    began = time.perf_counter()
    from orchestrator.data import sources
    from orchestrator.data.clean.plan import cleaning_of
    from orchestrator.data.clean.run import clean
    from orchestrator.data.clean.totals import totals
    from orchestrator.data.config import DataSpec
    from orchestrator.data.prepare.part_tasks import run_tasks, together

    data = DataSpec(
        sources=[{"uri": str(folder / "*.jsonl")}],
        tokenizer={"train_bpe": 300},
        sequence_length=8,
        clean=[
            {"gopher_quality": {"min_alphabetic": 0.6}},
            "gopher_repetition",
            "fineweb",
            "near_duplicates",
        ],
    )
    files = sources.resolve(data.sources)
    size = sources.part_size(files)
    cleaning, parts = cleaning_of(data, files, size), sources.cut(files, size)
    assert cleaning is not None
    text = clean(cleaning, parts, str(work), lambda *_, **__: None)

    def read(row: dict[str, Any]) -> None:
        count = sum(piece.bytes for piece in text.pieces(sources.from_json(row["part"])))
        (work / f"{row['number']}.count").write_text(str(count))

    rows = [{"number": n, "part": sources.to_json(p)} for n, p in enumerate(parts)]
    for _ in run_tasks(read, rows, str(work), together=together(size)):
        pass
    steps = totals(text, parts, 1)
    removed = {step["step"]: step["sources"][0]["removed"] for step in steps}
    return {"work": time.perf_counter() - began, "removed": removed}


THEIRS = r"""
import json, re, sys, time
folder, work, processes, mine = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "words"
import datatrove.utils.text as text
import datatrove.utils.word_tokenizers as tokenizers
if mine:
    word = re.compile(r"\d+(?:[.,]\d+)+|\w+(?:['\u2019]\w+)*|\.{2,}|[^\w\s]")
    class Words(tokenizers.WordTokenizer):
        def word_tokenize(self, text): return word.findall(text)
        def sent_tokenize(self, text): return [text]
        def span_tokenize(self, text): return [(0, len(text))]
    tokenizers.load_word_tokenizer = lambda language: Words()
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup import minhash
from datatrove.pipeline.dedup.minhash import MinhashConfig
if mine:
    minhash.load_word_tokenizer = tokenizers.load_word_tokenizer
from datatrove.pipeline.filters import FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
import glob, os
if __name__ == "__main__":
    config, tasks = MinhashConfig(), len(glob.glob(folder + "/*.jsonl"))
    began = time.perf_counter()
    def run(pipeline, tasks):
        import uuid
        logs = f"{work}/logs/{uuid.uuid4()}"
        LocalPipelineExecutor(pipeline=pipeline, tasks=tasks, workers=processes, logging_dir=logs).run()
    steps = [GopherQualityFilter(max_non_alpha_words_ratio=0.6), GopherRepetitionFilter(), FineWebQualityFilter()]
    plain = dict(compression=None, output_filename="${rank}.jsonl")
    run([JsonlReader(folder, glob_pattern="*.jsonl"), *steps, JsonlWriter(f"{work}/kept", **plain)], tasks)
    run([JsonlReader(f"{work}/kept"), MinhashDedupSignature(f"{work}/sigs", config)], tasks)
    run([MinhashDedupBuckets(f"{work}/sigs", f"{work}/buckets", config=config)], config.num_buckets)
    run([MinhashDedupCluster(f"{work}/buckets", f"{work}/remove", config=config)], 1)
    run([JsonlReader(f"{work}/kept"), MinhashDedupFilter(f"{work}/remove"), JsonlWriter(f"{work}/out", **plain)], tasks)
    seconds = time.perf_counter() - began
    def lines(folder): return sum(sum(1 for _ in open(path)) for path in glob.glob(folder + "/*.jsonl"))
    given, kept, out = lines(folder), lines(f"{work}/kept"), lines(f"{work}/out")
    print(json.dumps({"work": seconds, "removed": {"rules": given - kept, "near_duplicates": kept - out}}))
"""


def measured(command: list[str]) -> tuple[dict[str, Any], float, float]:
    """What a process says last, its seconds, and the peak of its tree's memory in MiB."""
    import psutil

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    began, peak = time.perf_counter(), 0.0
    with tempfile.TemporaryFile("w+") as out:
        process = psutil.Popen(command, stdout=out, stderr=subprocess.DEVNULL, env=environment)
        while process.poll() is None:
            total = 0
            try:
                for member in [process, *process.children(recursive=True)]:
                    total += member.memory_full_info().pss
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            peak = max(peak, total / 2**20)
            time.sleep(0.1)
        seconds = time.perf_counter() - began
        out.seek(0)
        said = out.read().strip().splitlines()
    if process.returncode:
        raise SystemExit(f"{command[:3]} failed with {process.returncode}")
    return json.loads(said[-1]), seconds, peak


def main() -> None:
    """Run all rows in turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--their-python", default="")
    parser.add_argument("--mb", type=float, default=50)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        print(json.dumps(ours(Path(given.run[0]), Path(given.run[1]), given.processes)))
        return
    results: dict[str, list[dict[str, Any]]] = {row: [] for row in given.rows}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "text"
        folder.mkdir()
        build(folder, given.mb)
        size = sum(path.stat().st_size for path in folder.iterdir()) / 10**6
        for _ in range(given.rounds):
            for row in given.rows:
                work = Path(name) / "work"
                work.mkdir()
                if row == "ours":
                    command = [sys.executable, __file__, "--processes", str(given.processes), "--run"]
                    command += [str(folder), str(work)]
                else:
                    how = "words" if row == "datatrove-words" else "spacy"
                    program = Path(name) / "theirs.py"
                    program.write_text(THEIRS)
                    command = [
                        given.their_python,
                        str(program),
                        str(folder),
                        str(work),
                        str(given.processes),
                        how,
                    ]
                said, seconds, peak = measured(command)
                results[row].append({**said, "seconds": seconds, "peak": peak})
                shutil.rmtree(work)
                print(
                    row,
                    {**said, "seconds": round(seconds, 1), "peak": round(peak)},
                    file=sys.stderr,
                    flush=True,
                )
    shown = {
        row: {
            "seconds": statistics.median(entry["seconds"] for entry in found),
            "work": statistics.median(entry["work"] for entry in found),
            "mb_per_second": size / statistics.median(entry["work"] for entry in found),
            "peak_mib": max(entry["peak"] for entry in found),
            "removed": found[-1]["removed"],
        }
        for row, found in results.items()
    }
    print(json.dumps({"mb": size, "processes": given.processes, **shown}, indent=None if given.json else 2))


if __name__ == "__main__":
    main()
