from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import xxhash

from orchestrator.config.errors import InputError
from orchestrator.data import corpus
from orchestrator.data.corpus import collect

SCRIPT = """
import json, sys
from orchestrator.data.corpus import collect
summary = collect(sys.argv[1], limit_mib=0.5)
print(json.dumps([summary, sorted(sys.modules)]))
"""


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[str]]:
    """A folder, the summary of the corpus that another process collected there, and what it imported."""
    folder = tmp_path_factory.mktemp("corpus") / "texts"
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(folder)], capture_output=True, check=True)
    return folder, *json.loads(done.stdout)


@pytest.fixture(scope="module")
def collected(process: tuple[Path, dict[str, Any], list[str]]) -> tuple[Path, dict[str, Any]]:
    return process[:2]


def test_every_package_gives_a_file_of_prose(collected: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = collected
    assert {p.name for p in folder.iterdir()} == {"corpus.json", *summary["files"]}
    assert {"python.txt", "torch.txt", "ray.txt", "numpy.txt"} <= set(summary["files"])
    assert 0.4 * 2**20 < summary["bytes"] <= 0.5 * 2**20
    assert json.loads((folder / "corpus.json").read_text()) == summary
    for name, file in summary["files"].items():
        data = (folder / name).read_bytes()
        assert (len(data), xxhash.xxh3_128_hexdigest(data)) == (file["bytes"], file["xxh3"])
        documents = data.decode().split("\n<|endoftext|>\n")
        assert documents.pop() == ""
        assert len(documents) == len(set(documents)) == file["documents"]
        assert min(map(len, documents), default=corpus.SHORTEST) >= corpus.SHORTEST


def test_no_package_is_imported_for_its_text(process: tuple[Path, dict[str, Any], list[str]]) -> None:
    assert not {"torch", "transformers", "scipy", "sklearn", "sympy", "mlflow", "ray"} & set(process[2])


def test_nothing_else_is_left_behind(collected: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = collected
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_it_is_collected_once(collected: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = collected
    before = {p: p.stat().st_mtime_ns for p in folder.iterdir()}
    assert collect(str(folder), limit_mib=0.5) == summary
    assert {p: p.stat().st_mtime_ns for p in folder.iterdir()} == before


@pytest.mark.slow
def test_it_is_the_same_again_where_it_is_not_whole(collected: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = collected
    (folder / "numpy.txt").write_text("cut short")
    assert collect(str(folder), limit_mib=0.5) == summary
    assert (folder / "numpy.txt").stat().st_size == summary["files"]["numpy.txt"]["bytes"]
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_what_is_no_corpus_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(InputError, match="holds something other than a corpus"):
        collect(str(tmp_path), limit_mib=0.01)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        collect(str(tmp_path / "file" / "corpus"), limit_mib=0.01)
