from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from before import unpack
from jobs import job
from tmpfs import mounted

from cluster.workers import ray_internals
from orchestrator.config.errors import InputError
from orchestrator.config.spec import parse
from orchestrator.data.config import DataSpec
from orchestrator.data.encoding.training import train_bytes
from orchestrator.data.prepare.prepare import prepare
from orchestrator.data.store.tokens import Tokens
from orchestrator.data.store.verified_shard import DamagedShard
from orchestrator.resolve.prepared_data import PreparedData, has_all_files, prepared
from orchestrator.storage.run_directory import RunDir

pytestmark = pytest.mark.usefixtures("two_cpus")
SENTENCES = [f"Sentence number {i} of {i * i} tells little more than {i % 7}.\n" for i in range(400)]


def spec(*uris: str, weight: float = 1.0, tokens: Any = None) -> DataSpec:
    return DataSpec(
        sources=[{"uri": uri, "weight": weight} for uri in uris],
        tokenizer=tokens or {"train_bpe": 320},
        sequence_length=16,
    )


def write_texts(folder: Path) -> list[str]:
    """One source of two .txt files, one of .jsonl and one of .parquet; returns their globs."""
    folder.mkdir()
    for name, lines in (("a", SENTENCES[:150]), ("b", SENTENCES[150:200])):
        (folder / f"{name}.txt").write_text(
            "<|endoftext|>\n".join("".join(lines[i : i + 5]) for i in range(0, 150, 5))
        )
    (folder / "c.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in SENTENCES[200:300]))
    pq.write_table(pa.table({"text": SENTENCES[300:]}), folder / "d.parquet", row_group_size=20)
    return [str(folder / name) for name in ("*.txt", "*.jsonl", "*.parquet")]


def text_of(tokens: Tokens, source: int) -> str:
    ids = tokens.window(source, 0, tokens.length(source))
    return str(tokens.tokenizer().decode([i for i in ids if i != tokens.manifest.roles["eos"]]))


def all_cpus_are_free() -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if ray.available_resources().get("CPU") == 2:
            return True
        time.sleep(0.05)
    return False


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mtime_ns)
        for p in folder.rglob("*")
        if p.is_file()
    }


def test_text_of_every_kind_becomes_shards_that_give_it_back(tmp_path: Path) -> None:
    data = spec(*write_texts(tmp_path / "texts"))
    told: list[tuple[str, int, int]] = []
    uri = prepare(
        data, ("<extra_id_0>",), str(tmp_path / "cache"), lambda *t, **_: told.append(t[:3]), part_bytes=2000
    )

    tokens = Tokens.open(uri)
    assert text_of(tokens, 0).replace("\n", "") == "".join(SENTENCES[:200]).replace("\n", "")
    assert text_of(tokens, 1) == "".join(SENTENCES[200:300])
    assert text_of(tokens, 2) == "".join(SENTENCES[300:])
    assert [sum(s.documents for s in source.shards) for source in tokens.manifest.sources] == [40, 100, 100]
    assert tokens.vocabulary().sentinels == (7,)
    assert tokens.manifest.vocabulary == 320

    parts = told[-1][2]
    assert parts == len(list((Path(uri) / "records").iterdir())) > 8
    assert told == [
        ("tokenizer", 0, 1),
        ("tokenizer", 1, 1),
        *(("tokens", n, parts) for n in range(parts + 1)),
    ]
    assert all_cpus_are_free()


def test_a_cluster_of_this_process_has_no_agents_but_idle_ones() -> None:
    found = [process.cmdline() for process in psutil.Process().children(recursive=True)]
    assert [line[3:4] for line in found].count([ray_internals.__file__]) == 2
    assert not any("Agent" in line[0] for line in found if line)


def test_prepared_data_is_not_prepared_again(tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    data = spec(*write_texts(tmp_path / "texts"))
    uri = prepare(data, (), cache)
    before = snapshot(Path(uri))
    moved = spec(*write_texts(tmp_path / "elsewhere"), weight=0.5)
    for again in (data, moved):
        assert prepare(again, (), cache, lambda *_, **__: pytest.fail("worked again")) == uri
    assert snapshot(Path(uri)) == before

    (tmp_path / "texts" / "b.txt").write_text("Another text altogether.")
    others = [
        prepare(data, (), cache),
        prepare(moved, ("<extra_id_0>",), cache),
        prepare(spec(*(s.uri for s in moved.sources), tokens={"train_bpe": 330}), (), cache),
        prepare(moved, (), cache, part_bytes=4000),
    ]
    assert len({uri, *others}) == 5


def test_a_tokenizer_is_trained_by_a_recipe(tmp_path: Path) -> None:
    recipe = {"kind": "unigram", "vocabulary": 600, "byte_fallback": True, "digits": "single"}
    data = spec(*write_texts(tmp_path / "texts"), tokens={"train": recipe})
    tokens = Tokens.open(prepare(data, ("<extra_id_0>",), str(tmp_path / "cache")))
    assert text_of(tokens, 1) == "".join(SENTENCES[200:300])
    assert tokens.manifest.vocabulary == 600
    assert [name.split()[0] for name in tokens.manifest.engines] == ["tokenizers"]


def test_a_tokenizer_may_be_brought_along(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(train_bytes(SENTENCES, 400, ()))
    data = spec(*write_texts(tmp_path / "texts"), tokens=str(tmp_path))
    tokens = Tokens.open(prepare(data, ("<extra_id_0>",), str(tmp_path / "cache")))
    assert tokens.manifest.vocabulary == 401
    assert tokens.manifest.sentinels == (400,)
    assert text_of(tokens, 1) == "".join(SENTENCES[200:300])


def test_old_data_is_made_again_as_it_was(tmp_path: Path) -> None:
    before = unpack(tmp_path)
    data = spec(str(before / "texts" / "a.txt"), str(before / "texts" / "b.jsonl"), tokens=str(before))
    (old,) = (before / "data").iterdir()
    again = Path(prepare(data, (), str(tmp_path / "cache"), before=old.name))
    assert again.name == old.name
    assert Tokens.open(str(again)).manifest.format == 1
    for shard in (old / "shards").iterdir():
        assert (again / "shards" / shard.name).read_bytes() == shard.read_bytes()
    assert Path(prepare(data, (), str(tmp_path / "cache"))).name != old.name
    with pytest.raises(InputError, match="the training text changed after the run began"):
        prepare(data, (), str(tmp_path / "cache"), before="f" * 32)


@pytest.mark.parametrize(
    "lost",
    [
        "shards/000000.bin",
        pytest.param("shards/000000.ends", marks=pytest.mark.slow),
        pytest.param("tokenizer.json", marks=pytest.mark.slow),
    ],
)
def test_what_is_missing_is_made_again_and_nothing_else(tmp_path: Path, lost: str) -> None:
    data, cache = spec(*write_texts(tmp_path / "texts")), str(tmp_path / "cache")
    uri = Path(prepare(data, (), cache))
    before = snapshot(uri)
    (uri / lost).rename(tmp_path / "aside")
    assert prepare(data, (), cache) == str(uri)
    after = snapshot(uri)
    assert {name: content for name, (content, _) in after.items()} == {n: c for n, (c, _) in before.items()}
    kept = [n for n in before if n.startswith("shards/") and "000000" not in n]
    assert {n: after[n] for n in kept} == {n: before[n] for n in kept}


def test_wrong_text_is_told_plainly_and_leaves_nothing_running(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        "\n".join(json.dumps({"text": line}) for line in SENTENCES) + "\nnot JSON\n"
    )
    (tmp_path / "tokenizer.json").write_text(train_bytes(SENTENCES, 400, ()))
    for tokens in (None, str(tmp_path)):  # found while the tokenizer is trained, and while tokenising
        with pytest.raises(InputError, match="is not JSON") as caught:
            prepare(
                spec(str(tmp_path / "a.jsonl"), tokens=tokens), (), str(tmp_path / "cache"), part_bytes=2000
            )
        assert caught.value.where == str(tmp_path / "a.jsonl")
        assert all_cpus_are_free()
    assert not list((tmp_path / "cache").rglob("manifest.json"))


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_same_command_goes_on(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "64k") as disk:
        data = spec(*write_texts(tmp_path / "texts"))
        (disk / "filler").write_bytes(bytes(30_000))
        with pytest.raises(
            InputError, match=r"No space left on device.*run the same command again"
        ) as caught:
            prepare(data, (), str(disk / "cache"), part_bytes=2000)
        assert "\n" not in str(caught.value)
        assert str(disk / "cache") in caught.value.where
        assert all_cpus_are_free()
        assert not list(disk.rglob("*.tmp"))
        assert not list(disk.rglob("manifest.json"))
        subprocess.run(["mount", "-o", "remount,size=2m", str(disk)], check=True)
        (disk / "filler").unlink()
        uri = prepare(data, (), str(disk / "cache"), part_bytes=2000)
        other = prepare(data, (), str(tmp_path / "other"), part_bytes=2000)
        assert {n: c for n, (c, _) in snapshot(Path(uri)).items()} == {
            n: c for n, (c, _) in snapshot(Path(other)).items()
        }


def test_text_that_changes_while_it_is_prepared_is_refused_and_leaves_no_wrong_data(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(SENTENCES))
    data, cache = spec(str(tmp_path / "a.txt")), str(tmp_path / "cache")

    def change(phase: str, done: int, total: int, text_bytes: int = 0) -> None:
        if (phase, done) == ("tokens", 0):
            (tmp_path / "a.txt").write_text("".join(reversed(SENTENCES)))

    with pytest.raises(InputError, match=r"a\.txt: has changed since this command began to read it"):
        prepare(data, (), cache, change, part_bytes=2000)
    assert not list((tmp_path / "cache").rglob("manifest.json"))
    tokens = Tokens.open(prepare(data, (), cache, part_bytes=2000))
    assert text_of(tokens, 0) == "".join(reversed(SENTENCES)).rstrip("\n")
    (tmp_path / "a.txt").write_text("".join(SENTENCES))
    tokens = Tokens.open(prepare(data, (), cache, part_bytes=2000))
    assert text_of(tokens, 0) == "".join(SENTENCES).rstrip("\n")


@pytest.mark.slow
def test_several_may_prepare_the_same_data_at_once(tmp_path: Path) -> None:
    @ray.remote(num_cpus=0)
    class Preparer:
        def prepare(self, data: DataSpec, cache: str) -> str:
            return prepare(data, (), cache, part_bytes=2000)

    data, cache = spec(*write_texts(tmp_path / "texts")), str(tmp_path / "cache")
    at_once = [Preparer.remote().prepare.remote(data, cache) for _ in range(3)]
    (uri,) = set(ray.get(at_once, timeout=120))
    Tokens.open(uri).check()
    other = prepare(data, (), str(tmp_path / "other"), part_bytes=2000)
    assert {n: c for n, (c, _) in snapshot(Path(uri)).items()} == {
        n: c for n, (c, _) in snapshot(Path(other)).items()
    }


@pytest.mark.parametrize("text", ["", "<|endoftext|>\n"])
def test_sources_without_text_are_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(InputError, match=r"files are empty|no text in the files"):
        prepare(spec(str(tmp_path / "a.txt")), (), str(tmp_path / "cache"))


def test_an_actor_may_prepare(tmp_path: Path) -> None:
    @ray.remote(num_cpus=0)
    class Controller:
        def prepare(self, data: DataSpec, cache: str) -> str:
            return prepare(data, (), cache)

    data = spec(*write_texts(tmp_path / "texts"))
    uri = ray.get(Controller.remote().prepare.remote(data, str(tmp_path / "cache")), timeout=60)
    assert Tokens.open(uri).manifest.documents == 240


def test_a_set_is_made_again_by_the_tokenizer_of_the_run(tmp_path: Path) -> None:
    """What is lost of a set comes out as it was, and without touching the data of training."""
    texts = write_texts(tmp_path / "texts")
    (tmp_path / "wiki.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in SENTENCES[:50]))
    document = job(texts[0])
    document["data"] |= {"cache": str(tmp_path / "cache"), "validation": {"share": 0.2}}
    document["evaluate"] = {"sets": {"wiki": {"sources": [{"uri": str(tmp_path / "wiki.jsonl")}]}}}
    job_, run = parse(document), RunDir(str(tmp_path / "run"))

    def nothing(*told: Any, **_: Any) -> None:
        """Tells nobody."""

    made = prepared(job_, run, PreparedData(), nothing)
    before = snapshot(tmp_path / "cache")
    own, training = Tokens.open(made.sets["wiki"]), Tokens.open(made.uri)
    assert (own.manifest.documents, own.manifest.roles) == (50, training.manifest.roles)
    assert own.tokenizer().to_str() == training.tokenizer().to_str()

    shutil.rmtree(made.sets["wiki"])
    assert prepared(job_, run, made, nothing) == made
    Path(own.folder.at("shards/000000.contents")).write_bytes(b"damaged")
    with pytest.raises(DamagedShard):
        Tokens.open(made.sets["wiki"]).check()
    assert not has_all_files(made)
    assert prepared(job_, run, made, nothing) == made
    Tokens.open(made.sets["wiki"]).check()
    after = {
        name: found for name, found in snapshot(tmp_path / "cache").items() if not name.endswith(".damaged")
    }
    assert {name: data for name, (data, _) in after.items()} == {
        name: data for name, (data, _) in before.items()
    }
    assert all(after[name] == found for name, found in before.items() if Path(made.uri).name in name)


PREPARE = """
import sys, ray
from cluster.workers.ray_internals import lean_start
from orchestrator.data.prepare.prepare import prepare
from orchestrator.data.config import DataSpec
with lean_start():
    ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=10**8, _node_ip_address="127.0.0.1")
print(prepare(DataSpec.model_validate_json(sys.argv[1]), (), sys.argv[2], part_bytes=20_000))
"""


@pytest.mark.slow
def test_a_killed_preparation_goes_on_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"Line {i} of {i % 1000} says {i * i}.\n" for i in range(15_000)))
    data = spec(str(tmp_path / "a.txt"))
    cache = tmp_path / "cache"
    process = subprocess.Popen(
        [sys.executable, "-c", PREPARE, data.model_dump_json(), str(cache)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 180  # Ray's first start on a machine takes its time
    while len(list(cache.glob("*/records/*.json"))) < 3 and process.poll() is None:
        assert time.monotonic() < deadline, "no three records within 180 s"
        time.sleep(0.002)
    assert process.poll() is None, process.communicate()[0]
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in tree:
        os.kill(member.pid, signal.SIGKILL)
    process.communicate()
    psutil.wait_procs(tree)
    (left,) = cache.iterdir()
    finished = {p.stem for p in (left / "records").glob("*.json")}
    before = snapshot(left)
    assert len(finished) >= 3
    assert "manifest.json" not in before

    told: list[tuple[str, int, int]] = []
    uri = prepare(data, (), str(cache), lambda *t, **_: told.append(t[:3]), part_bytes=20_000)
    assert uri == str(left)
    assert told[2] == ("tokens", len(finished), told[-1][2])
    assert told[-1][2] > len(finished)
    after = snapshot(left)
    kept = [
        "tokenizer.json",
        *(f"records/{n}.json" for n in finished),
        *(f"shards/{n}.bin" for n in finished),
    ]
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}

    undisturbed = Path(prepare(data, (), str(tmp_path / "other"), part_bytes=20_000))
    whole = {name: content for name, (content, _) in after.items() if not name.endswith(".tmp")}
    assert whole == {name: content for name, (content, _) in snapshot(undisturbed).items()}
