"""Own modules side by side: what they import of each other, and what cannot travel."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from workloads.errors import WorkloadError
from workloads.own.flat_code import flat_code

MODEL = '''"""A model."""
from __future__ import annotations
from typing import TYPE_CHECKING
import os.path, flat_helpers as tools
from flat_parts import layers, doubled as twice
from flat_parts.layers import (
    WIDTH,  # units
    Layer as Block,
)
if TYPE_CHECKING:
    from workloads.workload import Batch

class Model:
    def __init__(self) -> None:
        from flat_parts.inner import deep; self.deep = deep.VALUE
        self.words = [tools.NAME, twice(WIDTH), Block().width, layers.WIDTH, os.path.sep, "äöü"]
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "flat_parts" / "inner").mkdir(parents=True)
    for name, text in {
        "flat_model.py": MODEL,
        "flat_helpers.py": "NAME = 'tools'\n",
        "flat_parts/__init__.py": "from .layers import doubled\n",
        "flat_parts/layers.py": "from . import numbers_of as n\nimport flat_helpers\nWIDTH = n.SIZE\n"
        "def doubled(x): return 2 * x\nclass Layer:\n    width = len(flat_helpers.NAME)\n",
        "flat_parts/numbers_of.py": "SIZE = 4\n",
        "flat_parts/inner/__init__.py": "",
        "flat_parts/inner/deep.py": "from ..numbers_of import SIZE\nVALUE = SIZE + 1\n",
    }.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def imported(files: dict[str, str], folder: Path, name: str) -> ModuleType:
    """A module of files that lie in one package, and nowhere else."""
    (folder / "__init__.py").write_text("")
    for file, text in files.items():
        (folder / f"{file}.py").write_text(text, encoding="utf-8")
    sys.path.insert(0, str(folder.parent))
    return importlib.import_module(f"{folder.name}.{name}")


def test_the_code_means_the_same_side_by_side(here: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    flat = flat_code("flat_model:Model")
    wanted = importlib.import_module("flat_model").Model()
    for name in [each for each in sys.modules if each.startswith("flat_")]:
        del sys.modules[name]
    sys.path.remove(str(here))
    place = tmp_path_factory.mktemp("elsewhere") / "moved_package"
    place.mkdir()
    found = imported(dict(flat.files), place, flat.module).Model()
    assert (found.words, found.deep) == (wanted.words, wanted.deep)
    assert found.words[:4] == ["tools", 8, 5, 4]
    assert importlib.util.find_spec("flat_helpers") is None
    assert "workloads" not in "".join(flat.files.values())
    assert flat.needs == ()


def test_code_of_this_project_is_named(here: Path) -> None:
    (here / "flat_model.py").write_text("from workloads.model.heads import Head\nclass Model: ...\n")
    assert flat_code("flat_model:Model").needs == ("workloads",)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("import flat_parts.layers\n", "write `from flat_parts import layers`"),
        ("import flat_parts.compiled as c\n", "flat_parts.compiled is compiled and cannot travel"),
        ("import flat_parts_inner, flat_parts.inner as i\n", "two modules .* get one file name"),
    ],
    ids=["dotted", "compiled", "one name"],
)
def test_what_cannot_travel_is_one_line(here: Path, text: str, wanted: str) -> None:
    (here / "flat_model.py").write_text(text + "class Model: ...\n")
    (here / "flat_parts_inner.py").write_text("")
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    (here / "flat_parts" / f"compiled{suffix}").write_bytes(b"")
    with pytest.raises(WorkloadError, match=wanted):
        flat_code("flat_model:Model")
