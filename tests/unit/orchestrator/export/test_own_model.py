"""A stored folder of an own model names code, and only a model's class that is elsewhere is called."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.app import call
from orchestrator.config.errors import InputError
from orchestrator.evaluate.of_export import spec_of_export
from orchestrator.export.own_model import load_own
from workloads.own.object_reference import code_hash

FACTS = {"objective": "causal_lm", "sequence_length": 8, "global_batch": 1}
TOUCH = "from pathlib import Path\ndef touch(path):\n    Path(path).touch()\n"
RUN = "from pathlib import Path\nPath({mark!r}).touch()\nclass Model: pass\n"


def write(folder: Path, reference: str, /, **options: Any) -> None:
    """A folder as somebody else would make it, with the right hash."""
    folder.mkdir(exist_ok=True)
    code = {} if reference.startswith(("workloads.", "orchestrator.")) else {reference: code_hash(reference)}
    about = {"model": reference, "options": options, "code": code, "vocabulary_size": 300}
    (folder / "own.json").write_text(json.dumps(about))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (folder / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    (folder / "export.json").write_text(json.dumps({"step": 1, "evaluation": FACTS}))


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line with which a command refuses."""
    with pytest.raises(SystemExit) as end:
        call(list(words))
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.mark.parametrize(
    ("reference", "option"),
    [("only_touches:touch", "path"), ("workloads.own.object_reference:load", "reference")],
)
def test_what_is_no_class_of_a_model_is_not_called(
    reference: str, option: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from orchestrator.data.encoding.training import train_bytes

    (here / "only_touches.py").write_text(TOUCH)
    (here / "run_by_load.py").write_text(RUN.format(mark=str(here / "called")))
    write(here / "export", reference, **{option: "called" if option == "path" else "run_by_load:Model"})
    (here / "export" / "tokenizer.json").write_text(train_bytes(["a text"] * 9, 300, ["<pad>"]))
    with pytest.raises(InputError, match=f"{reference} is no torch.nn.Module; name a class of one"):
        load_own("export")
    assert f"{reference} is no torch.nn.Module" in refused(capsys, "chat", "export")
    assert not (here / "called").exists()


@pytest.mark.parametrize("within", [True, False], ids=["in the folder", "above it"])
@pytest.mark.parametrize("kind", ["model", "objective"])
def test_code_of_the_folder_itself_is_not_imported(
    kind: str, within: bool, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place, name = here / "downloaded", f"brought_{kind}"
    place.mkdir()
    (place / f"{name}.py").write_text(RUN.format(mark=str(here / "imported")))
    if within:
        monkeypatch.chdir(place)
    folder, reference = (".", f"{name}:Model") if within else ("downloaded", f"downloaded.{name}:Model")
    write(place, reference)
    if kind == "objective":
        (place / "own.json").unlink()
        facts = {**FACTS, "objective": reference}
        (place / "export.json").write_text(json.dumps({"step": 1, "evaluation": facts}))
    else:
        with pytest.raises(InputError, match="would run code of this folder"):
            load_own(folder)
    assert f"{reference} would run code of this folder" in refused(capsys, "chat", folder)
    assert not (here / "imported").exists()


def test_a_damaged_description_is_one_line(here: Path) -> None:
    write(here / "export", "workloads.own.network:OwnNetwork")
    for text in ("{", "[]", '{"model": "hf:x", "options": {}, "code": {}}', '{"model": 3}'):
        (here / "export" / "own.json").write_text(text)
        with pytest.raises(InputError, match=r"own\.json: cannot be read .*; export the commit again"):
            load_own("export")


@pytest.mark.parametrize("kind", ["clip:Clip", "mae:Mae"])
def test_an_export_of_images_is_refused_as_one_without_text(kind: str, here: Path) -> None:
    write(here / "export", f"orchestrator.extensions.vision.{kind}")
    (here / "export" / "export.json").write_text(json.dumps({"step": 1}))
    with pytest.raises(InputError, match="is an export of an own model without text; give the run"):
        spec_of_export("export", {})
