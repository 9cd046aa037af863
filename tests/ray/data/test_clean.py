"""Cleaning on real Ray tasks: what is kept, what is done again, and that nothing else decides it."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from cleaning_texts import PROSE

from orchestrator.config.errors import InputError
from orchestrator.data.clean import run
from orchestrator.data.clean.totals import read_totals, removed_by
from orchestrator.data.config import DataSpec
from orchestrator.data.prepare.prepare import prepare
from orchestrator.data.store.census import census
from orchestrator.data.store.tokens import Tokens
from orchestrator.observe.pages.data_report import page

pytestmark = pytest.mark.usefixtures("two_cpus")
STEPS = [
    "normalize",
    {"gopher_quality": {"min_words": 20, "min_stop_words": 1, "min_alphabetic": 0.7}},
    "exact_duplicates",
    {"near_duplicates": {"threshold": 0.7, "words": 3}},
    {"pii": {"kinds": ["email"]}},
]


def document(draw: random.Random) -> str:
    return " ".join(draw.choice(PROSE.split()) for _ in range(draw.randint(30, 80)))


def corpus(folder: Path, count: int = 120) -> dict[str, list[str]]:
    """Documents in two .txt files, and copies, near copies, short ones and others in a .jsonl."""
    folder.mkdir()
    draw = random.Random(1)
    first = [document(draw) for _ in range(count)]
    near = [text.replace("the", "a", 1) + " Indeed." for text in first[:40]]
    second = [*first[40:60], *near, *(document(draw) + " me@there.org" for _ in range(40)), "Too short."]
    held_out = [first[70], first[71] + " More."]
    half = count // 2
    for name, texts in (("a", first[:half]), ("b", first[half:])):
        (folder / f"{name}.txt").write_text("\n<|endoftext|>\n".join(texts) + "\n")
    for name, texts in (("c", second), ("held", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {"first": first, "near": near, "second": second, "held_out": held_out}


def spec(folder: Path, steps: list[Any], **more: Any) -> DataSpec:
    return DataSpec(
        sources=[{"uri": str(folder / "*.txt")}, {"uri": str(folder / "c.jsonl")}],
        tokenizer={"train_bpe": 300},
        sequence_length=16,
        clean=steps,
        **more,
    )


def documents(uri: str) -> list[list[str]]:
    """The documents of each source."""
    tokens = Tokens.open(uri)
    found = []
    for source in range(tokens.sources):
        ids = tokens.window(source, 0, tokens.length(source)).tolist()
        text = tokens.tokenizer().decode(ids, skip_special_tokens=False)
        found.append(text.split("<|endoftext|>")[:-1])
    return found


@pytest.mark.slow
def test_what_is_left_is_what_the_steps_keep_whatever_the_parts(tmp_path: Path) -> None:
    texts = corpus(tmp_path / "texts")
    data = spec(
        tmp_path / "texts", STEPS, validation={"sources": [{"uri": str(tmp_path / "texts/held.jsonl")}]}
    )
    uris = [prepare(data, (), str(tmp_path / "cache"), part_bytes=size) for size in (4000, 7000, 10**6)]
    found = [documents(uri) for uri in uris]
    assert found[0] == found[1] == found[2]
    longest = [text for n, text in enumerate(texts["first"]) if n >= 40 and n not in (70, 71)]
    assert found[0][0] == longest
    assert found[0][1] == [
        *texts["near"],
        *(text.replace("me@there.org", "email@example.com") for text in texts["second"][60:100]),
    ]
    totals = [read_totals(Tokens.open(uri).folder) for uri in uris]
    for entry in totals[0]:
        assert entry["samples"] or not entry["reasons"]
    assert [[e["step"], e["sources"], e["reasons"]] for e in totals[0]] == [
        [e["step"], e["sources"], e["reasons"]] for e in totals[2]
    ]
    by_step = {entry["step"]: [source["removed"] for source in entry["sources"]] for entry in totals[0]}
    assert by_step == {
        "normalize": [0, 0], "gopher_quality": [0, 1], "exact_duplicates": [1, 20],
        "near_duplicates": [41, 0], "pii": [0, 0],
    }  # fmt: skip
    (near,) = removed_by(uris[0], "near_duplicates")
    assert near["reasons"] == {"another document": 40, "held-out text": 1}
    assert all(sample["reason"].startswith(("kept: ", "held-out text")) for sample in near["samples"])
    with pytest.raises(InputError, match="has no step c4; choose from normalize, gopher_quality, exact_dup"):
        removed_by(uris[0], "c4")
    found_in = census(uris[0])
    assert [source["duplicates"] for source in found_in["sources"]] == [0, 0]
    assert "near_duplicates: 41 removed, with" in page(found_in)


def test_of_a_file_that_is_there_twice_one_copy_is_kept_however_files_are_grouped(tmp_path: Path) -> None:
    """A part of a copy has the same text as another part; and what is known of parts holds for one grouping alone."""
    draw = random.Random(2)
    texts = {name: [document(draw) for _ in range(4)] for name in "abc"}
    texts["b"][3] = texts["b"][1]
    for name, of in (("a", "a"), ("b", "b"), ("c", "c"), ("d", "a")):
        rows = "".join(json.dumps({"text": text}) + "\n" for text in texts[of])
        (tmp_path / f"{name}.jsonl").write_text(rows)

    def kept(*groups: str, **_: Any) -> list[str]:
        sources = [{"uri": [str(tmp_path / f"{name}.jsonl") for name in group]} for group in groups]
        tokenizer = {"train_bpe": 300}
        data = DataSpec(
            sources=sources, tokenizer=tokenizer, sequence_length=16, clean=["exact_duplicates", "normalize"]
        )
        found = documents(prepare(data, (), str(tmp_path / "cache"), part_bytes=1000))
        return [text for source in found for text in source]

    wanted = [*texts["a"], *texts["b"][:3], *texts["c"]]
    for groups in (("a", "bcd"), ("ab", "cd"), ("abcd",), ("a", "b", "c", "d")):
        assert kept(*groups) == wanted, groups


def test_held_out_text_is_compared_as_the_steps_before_leave_it(tmp_path: Path) -> None:
    draw = random.Random(3)
    texts = [document(draw) + "." for _ in range(6)]
    texts[1] += "\n{not a sentence}"  # c4 drops that line
    texts[2] = "Cafe\u0301 " + texts[2]
    for name, some in (("train", texts), ("held", texts[:3])):
        rows = "".join(json.dumps({"text": text}) + "\n" for text in some)
        (tmp_path / f"{name}.jsonl").write_text(rows)
    (tmp_path / "bad.jsonl").write_text(json.dumps({"text": texts[5]}) + "\nno JSON\n")
    c4 = {"c4": {"min_sentences": 1}}
    for steps in (["exact_duplicates"], [c4, "exact_duplicates"], ["normalize", c4, "exact_duplicates"]):
        data = DataSpec(
            sources=[{"uri": str(tmp_path / "train.jsonl")}],
            tokenizer={"train_bpe": 300},
            sequence_length=16,
            clean=steps,
            validation={"sources": [{"uri": str(tmp_path / "held.jsonl")}]},
        )
        assert documents(prepare(data, (), str(tmp_path / "cache"))) == [texts[3:]], steps
    # a share of what may be left out is of all that was read, not of what cleaning has left
    mixed = [{"uri": str(tmp_path / name)} for name in ("train.jsonl", "bad.jsonl")]
    limited = data.model_copy(
        update={"sources": DataSpec(**{**data.model_dump(), "sources": mixed}).sources, "on_error": "skip"}
    )
    assert prepare(limited.model_copy(update={"max_rejected": "13%"}), (), str(tmp_path / "cache"))
    with pytest.raises(InputError, match="1 of 8 documents are left out"):
        prepare(limited.model_copy(update={"max_rejected": "12%"}), (), str(tmp_path / "cache"))
    corpus(tmp_path / "texts")
    by_address = spec(tmp_path / "texts", [{"url": {"words": ["bad"]}}])
    with pytest.raises(
        InputError, match=r"data.clean.url.column: names 'url', which no row .*; there are text"
    ):
        prepare(by_address, (), str(tmp_path / "cache"))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": texts[0], "url": "https://a.org"}) + "\n")
    rows = type(by_address.sources[0])(uri=str(tmp_path / "rows.jsonl"))
    with pytest.raises(InputError, match="needs a column with an address"):
        prepare(
            by_address.model_copy(update={"sources": [*by_address.sources, rows]}),
            (),
            str(tmp_path / "cache"),
        )


@pytest.mark.slow
def test_a_changed_step_redoes_itself_and_what_comes_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus(tmp_path / "texts")
    ran: list[int] = []
    run_tasks = run.run_tasks

    def counted(task: Any, rows: Any, cache: str, **options: Any) -> Any:
        ran.extend([len(rows)] if rows else [])
        return run_tasks(task, rows, cache, **options)

    monkeypatch.setattr(run, "run_tasks", counted)
    cache = str(tmp_path / "cache")
    uri = prepare(spec(tmp_path / "texts", STEPS), (), cache, part_bytes=7000)
    clean = tmp_path / "cache" / "clean"
    before = {path: path.stat().st_mtime_ns for path in clean.rglob("*") if path.is_file()}
    parts = ran[0]
    assert ran == [parts, 1, ran[2], parts]
    ran.clear()
    other = prepare(
        spec(tmp_path / "texts", [*STEPS[:-1], {"pii": {"action": "drop"}}]), (), cache, part_bytes=7000
    )
    assert ran == [parts]  # the last pass alone
    assert len(documents(other)[1]) == 40 < len(documents(uri)[1])
    assert {path: path.stat().st_mtime_ns for path in before} == before
    ran.clear()
    assert prepare(spec(tmp_path / "texts", STEPS), (), cache, part_bytes=7000) == uri
    assert ran == []
    # a damaged decision is made again, and nothing else
    last = max(before, key=lambda path: (path.suffix == ".json", before[path]))
    last.write_bytes(last.read_bytes()[:-9])
    (tmp_path / "cache" / Path(uri).name / "manifest.json").unlink()
    assert prepare(spec(tmp_path / "texts", STEPS), (), cache, part_bytes=7000) == uri
    assert ran == [1]


@pytest.mark.slow
def test_own_functions_evaluation_text_and_addresses(tmp_path: Path) -> None:
    texts = corpus(tmp_path / "texts")
    (tmp_path / "eval.jsonl").write_text(json.dumps({"question": " ".join(texts["first"][3].split()[5:25])}))
    data = spec(
        tmp_path / "texts",
        [{"decontaminate": {"sources": [{"uri": str(tmp_path / "eval.jsonl"), "field": "question"}]}}],
    )
    found = documents(prepare(data, (), str(tmp_path / "cache")))
    assert texts["first"][3] not in found[0]
    assert len(found[0]) == 119
    (tmp_path / "texts/c.jsonl").write_text(
        "".join(
            json.dumps({"text": text, "meta": {}, "url": f"https://{'bad' if n % 3 else 'good'}.org/{n}"})
            + "\n"
            for n, text in enumerate(texts["first"])
        )
    )
    steps = [{"url": {"domains": ["bad.org"]}}]
    found = documents(
        prepare(
            spec(tmp_path / "texts", steps).model_copy(update={"sources": data.sources[1:]}),
            (),
            str(tmp_path / "cache"),
        )
    )
    assert found == [texts["first"][::3]]
    with pytest.raises(InputError, match="removes every document, gopher_quality most of them"):
        prepare(spec(tmp_path / "texts", [{"gopher_quality": {"min_words": 1000}}]), (), str(tmp_path))
    with pytest.raises(InputError, match=r"own textwrap:indent: failed \(TypeError"):
        prepare(spec(tmp_path / "texts", [{"own": {"function": "textwrap:indent"}}]), (), str(tmp_path))


def files(folder: Path) -> dict[str, bytes]:
    """The content of all files but drafts of writers that were killed."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if not name.endswith(".tmp")}


PREPARE = """
import sys, ray
from orchestrator.data.prepare.prepare import prepare
from orchestrator.data.config import DataSpec
ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=10**8, _node_ip_address="127.0.0.1")
print("ready", flush=True)
print(prepare(DataSpec.model_validate_json(sys.argv[1]), (), sys.argv[2], part_bytes=4000))
"""


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_killed_at_random_moments_it_ends_with_the_same_bytes(tmp_path: Path) -> None:
    """The process tree is killed again and again, each time after it has made some more files."""
    corpus(tmp_path / "texts", 600)
    (tmp_path / "eval.jsonl").write_text(json.dumps({"text": PROSE}))
    steps = [
        *STEPS,
        "c4",
        {"decontaminate": {"sources": [{"uri": str(tmp_path / "eval.jsonl")}]}},
        "exact_duplicates",
    ]
    steps[5] = {"c4": {"min_sentences": 1, "terminal_punctuation": False}}
    data = spec(tmp_path / "texts", steps)
    whole = Path(prepare(data, (), str(tmp_path / "quiet"), part_bytes=4000))
    cache, draw, kills = tmp_path / "cache", random.Random(6), 0
    seen: set[tuple[int, int]] = set()
    for _ in range(200):
        arguments = [sys.executable, "-c", PREPARE, data.model_dump_json(), str(cache)]
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        until = len(files(cache)) + draw.randint(1, 30)
        while process.poll() is None and len(list(cache.rglob("*.*"))) < until:
            time.sleep(draw.uniform(0.001, 0.01))
        if process.poll() is None:
            tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            for member in tree:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            process.communicate()
            psutil.wait_procs(tree)
            kills += 1
            made = [path for path in cache.rglob("*") if path.is_file()]
            seen.add((len({path.parent for path in made}), len(made)))
        else:
            assert process.returncode == 0
            if kills >= 20:
                break
            shutil.rmtree(cache)  # it came to its end: from the beginning again
    assert kills >= 20
    assert len(seen) >= 15
    uri = Path(prepare(data, (), str(cache), part_bytes=4000))
    assert uri.name == whole.name
    assert files(cache) == files(tmp_path / "quiet")
    print(f"{kills} kills, at {len(seen)} different places")
