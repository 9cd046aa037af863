"""Drafts of exports that were killed: the next export to the same place removes them, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import fsspec

from orchestrator.export.target import draft, publish
from orchestrator.storage.retry import Retry

WRITER = (
    "import sys, time\n"
    "from orchestrator.export.target import draft\n"
    "with draft(sys.argv[1]) as folder:\n"
    "    open(f'{folder}/model.safetensors', 'w').close()\n"
    "    print(folder, flush=True)\n"
    "    time.sleep(60)\n"
)


def test_the_draft_of_a_killed_export_goes_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    target = str(tmp_path / "export")
    words = [sys.executable, "-c", WRITER, target]
    writers = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        dead, alive = (Path((writer.stdout or sys.stdin).readline().strip()) for writer in writers)
        os.kill(writers[0].pid, signal.SIGKILL)
        writers[0].wait()
        others = [
            ".export.12345678.old",
            ".other.12345678.tmp",
            ".export.1234567.tmp",
            ".export.new_1234.tmp",
        ]
        for name in others:
            (tmp_path / name).mkdir()
        (tmp_path / others[1] / "file").write_text("another export's")
        with draft(target) as folder:
            names = {path.name for path in tmp_path.iterdir()}
        assert names == {alive.name, Path(folder).name, *others}
        assert not dead.exists()
        assert [path.name for path in alive.iterdir()] == ["model.safetensors"]
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()


def test_an_object_store_keeps_nothing_of_an_earlier_export_that_would_be_read_first(tmp_path: Path) -> None:
    files = fsspec.filesystem("memory")
    target = f"memory://exports{tmp_path}"
    for number, names in enumerate(
        (["model.safetensors", "generator/config.json"], ["model-1-of-1.safetensors"])
    ):
        made = tmp_path / str(number)
        for name in (*names, "config.json", "export.json"):
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            (made / name).write_text(json.dumps({"files": [name.partition("/")[0] for name in names]}))
        publish(str(made), target, Retry())
        files.pipe_file(f"{target}/notes.txt", b"a user's")
    found = {path.removeprefix(f"/exports{tmp_path}/") for path in files.find(target)}
    assert found == {"model-1-of-1.safetensors", "config.json", "export.json", "notes.txt"}
