"""Which code a `module:name` stands for, and what of it counts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from workloads.errors import WorkloadError
from workloads.own.object_reference import (
    code_hash,
    is_built_in,
    is_object_reference,
    load,
    present_name,
    sources,
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("net:Net", True),
        ("a.b_c:D1", True),
        ("hf:folder", False),
        ("gpt-tiny", False),
        ("a.b:c.d", False),
        ("a:", False),
    ],
)
def test_what_is_a_reference(name: str, is_one: bool) -> None:
    assert is_object_reference(name) is is_one


def test_all_that_it_imports_from_its_folder_counts(folder: Path) -> None:
    (folder / "ownpack").mkdir()
    (folder / "ownpack" / "__init__.py").write_text("")
    write(
        folder,
        own_a="import os, numpy\nimport own_b\nfrom ownpack import one\nNet = 1\n",
        own_b="def f():\n    import own_c\n",
        own_c="",
        own_unused="",
    )
    (folder / "ownpack" / "one.py").write_text("from . import two\n")
    (folder / "ownpack" / "two.py").write_text("from .one import x\n")
    assert set(sources("own_a:Net")) == {"own_a", "own_b", "own_c", "ownpack", "ownpack.one", "ownpack.two"}
    before = code_hash("own_a:Net")
    (folder / "own_unused.py").write_text("1")
    assert code_hash("own_a:Net") == before
    for file in ("own_c.py", "ownpack/two.py", "ownpack/__init__.py"):
        path = folder / file
        text = path.read_text()
        path.write_text(text + "\n#\n")
        assert code_hash("own_a:Net") != before, file
        path.write_text(text)
    assert code_hash("own_a:Net") == before


def test_a_compiled_module_counts(folder: Path) -> None:
    write(folder, own_d="import own_e\nf = 1\n")
    (folder / "own_e.so").write_bytes(b"one")
    before = code_hash("own_d:f")
    (folder / "own_e.so").write_bytes(b"two")
    assert code_hash("own_d:f") != before
    with pytest.raises(WorkloadError, match="own_e:f has no source code"):
        code_hash("own_e:f")


@pytest.mark.parametrize(
    ("reference", "wanted"),
    [
        ("own_missing:f", "there is no module own_missing in .* name one"),
        ("own_broken:f", r"cannot be imported \(ZeroDivisionError"),
        ("own_ends:f", r"cannot be imported \(SystemExit: 0\)"),
        ("own_fine:g", "own_fine has no g"),
    ],
)
def test_what_cannot_be_loaded_is_told(folder: Path, reference: str, wanted: str) -> None:
    write(folder, own_broken="1 / 0", own_ends="raise SystemExit(0)", own_fine="f = 1")
    with pytest.raises(WorkloadError, match=wanted):
        load(reference)


def test_a_module_that_an_installed_one_hides_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, yaml="def f(): ...")
    with pytest.raises(WorkloadError, match=r"yaml in .* hides .*yaml\.py; rename yours"):
        load("yaml:f")


def test_folders_named_like_packages_of_this_project_are_found_beside_them(tmp_path: Path) -> None:
    """In a process of its own, since packages would stay changed."""
    write(tmp_path, workloads__mine="from workloads.errors import WorkloadError\ndef f(): return 'own'")
    write(tmp_path, cluster__net="def f(): return 'own'")
    code = (
        "from workloads.own.object_reference import load, code_hash\n"
        "import workloads.load, cluster.workers.gang\n"
        "print(load('workloads.mine:f')(), load('cluster.net:f')(), len(code_hash('cluster.net:f')))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert done.stdout.split() == ["own", "own", "32"], done.stderr


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("workloads.vision.clip:Clip", "orchestrator.extensions.vision.clip:Clip"),
        ("workloads.vision.mae:Mae", "orchestrator.extensions.vision.mae:Mae"),
        ("orchestrator.data.images:Images", "orchestrator.extensions.vision.samples:Images"),
    ],
)
def test_an_object_that_has_moved_is_found_by_its_old_name(old: str, new: str) -> None:
    """Run directories and job files have it. It stays code of this program, which no run's identity covers."""
    assert present_name(old) == new
    assert load(old) is load(new)
    assert is_built_in(old)
    assert is_built_in(new)


def test_other_names_have_not_moved() -> None:
    for name in ("mine:Model", "workloads.vision.clip:Other", "workloads.load:load"):
        assert present_name(name) == name
