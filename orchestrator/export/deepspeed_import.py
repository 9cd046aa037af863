"""Take the weights out of a DeepSpeed ZeRO checkpoint that another project wrote.

Its files are pickles. They are opened in a separate process, with an empty environment and placeholders for every
object; its results are safetensors and JSON. This process unpickles nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from orchestrator.job.errors import InputError
from orchestrator.storage.uri import check_uri

CHILD = "orchestrator.export.deepspeed_unpickle"


def import_checkpoint(
    source: str, target: str, tag: str | None = None, config: str | None = None, trust: bool = False
) -> dict[str, Any]:
    """Write `target`/model.safetensors (fp32, the checkpoint's own names) and, if given, config.json beside it.

    With a config such a folder can be trained as `hf:<target>`. Optimiser state is not imported. Returns {"stage",
    "ranks", "tensors", "version"}, `tensors` by name with their shapes. `trust` unpickles everything, which runs any
    code in the files.

    Raises InputError if the folder is no ZeRO checkpoint, or needs trust that was not given.
    """
    folder = _tagged(Path(source), tag)
    out = Path(target)
    new = not out.exists()
    if not new and (not out.is_dir() or any(out.iterdir())):
        raise InputError("the target is not empty", target, "name a new folder")
    if config is not None and not Path(config).is_file():
        raise InputError("there is no such file", config, "give the config.json of the model")
    out.mkdir(parents=True, exist_ok=True)
    answer = _ask(
        {"folder": str(folder.resolve()), "target": str(out.resolve()), "trust": trust}, folder, out
    )
    if "refused" in answer:
        if new:
            out.rmdir()
        raise InputError(answer["refused"], str(folder), "")
    if config is not None:
        shutil.copyfile(config, out / "config.json")
    return answer


def _tagged(source: Path, tag: str | None) -> Path:
    """The folder of one step: `tag`, or the one that DeepSpeed names in the file `latest`."""
    if tag is None and (source / "latest").is_file():
        tag = (source / "latest").read_text().strip()
    folder = source / tag if tag else source
    check_uri(str(folder))
    if not folder.is_dir() or not any(folder.glob("*_optim_states.pt")):
        raise InputError(
            "there is no DeepSpeed ZeRO checkpoint (*_optim_states.pt)",
            str(folder),
            "name its folder, or --tag",
        )
    return folder


def _ask(request: dict[str, Any], folder: Path, out: Path) -> dict[str, Any]:
    environment = {
        "PATH": os.defpath,
        "HOME": str(out),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run(
        [sys.executable, "-m", CHILD],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env=environment,
        cwd=out,
        check=False,
    )
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        answer = None
    if done.returncode or not isinstance(answer, dict):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise InputError(
            f"the process that reads it ended: {last}", str(folder), "see whether its files are complete"
        )
    return answer
