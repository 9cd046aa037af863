"""What an export does to a commit: transformers agrees with it, nothing is unpickled, nothing else is overwritten."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tmpfs import mounted
from trained import trained
from transformers import AutoConfig, Gemma3TextConfig

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.retention import Retention, prune
from orchestrator.checkpoint.shard import RawPiece
from orchestrator.config.errors import InputError
from orchestrator.export import hugging_face as exports
from orchestrator.export.hugging_face import export
from orchestrator.export.target import check_target

AUDITED = """
import json, sys
from orchestrator.export.hugging_face import export

def refuse(event, arguments):
    if event == "pickle.find_class":
        raise RuntimeError(f"unpickles {arguments}")

import transformers, torch  # what they do at import is theirs
sys.addaudithook(refuse)
print(json.dumps(export(sys.argv[1], 2, sys.argv[2])))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with a commit at step 2, made by the rank program."""
    return trained(tmp_path_factory.mktemp("run"))


def test_an_export_unpickles_nothing_and_agrees(run: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-c", AUDITED, str(run), str(tmp_path / "export")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["logits_difference"] < 1e-4
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json", "export.json"} <= {
        path.name for path in (tmp_path / "export").iterdir()
    }
    card = (tmp_path / "export/README.md").read_text()
    receipt = json.loads((tmp_path / "export/export.json").read_text())["receipt"]
    for part in ("library_name: transformers", "| objective | causal_lm |", "| trained | 2 of", receipt):
        assert part in card


def test_a_class_run_as_it_is_leaves_though_it_has_tables_that_no_commit_holds(tmp_path: Path) -> None:
    theirs = Gemma3TextConfig(
        vocab_size=600, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=64, sliding_window=8, max_position_embeddings=64, pad_token_id=1, attention_dropout=0.1,
    )  # fmt: skip
    theirs.save_pretrained(tmp_path / "folder")
    options = {"documents": "isolate"}
    run = trained(tmp_path / "run", model=f"hf:{tmp_path / 'folder'}", options=options)
    assert export(str(run), 2, str(tmp_path / "export"))["logits_difference"] < 1e-5
    assert AutoConfig.from_pretrained(tmp_path / "export").attention_dropout == 0.1


def test_a_folder_that_is_no_export_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(InputError, match="holds something other than an export; give a new folder"):
        check_target(str(tmp_path))
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_a_full_disk_under_an_export_is_one_line_and_leaves_nothing(run: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "64k") as disk:
        with pytest.raises(
            InputError, match=r"disk/model: cannot be written \(No space left on device.*\); make room"
        ):
            export(str(run), 2, str(disk / "model"))
        assert list(disk.iterdir()) == []
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(InputError, match=r"disk/model: cannot be written \(Read-only file system\)"):
            export(str(run), 2, str(disk / "model"))


def test_a_run_at_work_does_not_remove_what_is_exported(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run, tmp_path / "run")
    store, write = Store(str(tmp_path / "run/checkpoints")), exports.write

    def meanwhile(*arguments: Any, **keywords: Any) -> float | None:
        piece = RawPiece("model.w", "F32", (1,), (0,), (1,), memoryview(bytes(4)))
        store.publish(3, store.write_raw(3, 0, [piece]), {"position": 3, "receipt": ""})
        assert prune(store, Retention(keep=1)) == []
        return write(*arguments, **keywords)

    monkeypatch.setattr(exports, "write", meanwhile)
    assert export(str(tmp_path / "run"), 2, str(tmp_path / "export"))["step"] == 2
    assert prune(store, Retention(keep=1)) == [2]


def test_an_export_that_is_cancelled_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cancelled(*_: object, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(exports, "_sample", cancelled)
    with pytest.raises(KeyboardInterrupt):
        export(str(run), 2, str(tmp_path / "new" / "model"))
    assert list((tmp_path / "new").iterdir()) == []
