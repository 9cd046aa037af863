"""Take the weights out of a DeepSpeed ZeRO checkpoint that another project wrote.

Its files are pickles. They are opened in a separate process, with an empty environment and placeholders for every
object; its results are safetensors and JSON. This process unpickles nothing.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.export.target import new_folder
from orchestrator.extensions.importers.reading_process import ask
from orchestrator.storage.uri import check_uri

CHILD = "orchestrator.extensions.importers.deepspeed_unpickle"


def import_checkpoint(
    source: str, target: str, tag: str | None = None, config: str | None = None, trust: bool = False
) -> dict[str, Any]:
    """Write `target`/model.safetensors (fp32, the checkpoint's own names) and, if given, config.json beside it.

    With a config such a folder can be trained as `hf:<target>`. Optimiser state is not imported. Returns {"stage",
    "ranks", "tensors", "version"}, `tensors` by name with their shapes. `trust` unpickles everything, which runs any
    code in the files.

    Raises InputError if the folder is not a ZeRO checkpoint, or needs trust that was not given.
    """
    folder = _tagged(Path(source), tag)
    if config is not None and not Path(config).is_file():
        raise InputError("there is no such file", config, "give the config.json of the model")
    with new_folder(target) as draft:
        answer = ask(CHILD, {"folder": str(folder.resolve()), "target": draft, "trust": trust})
        if config is not None:
            shutil.copyfile(config, Path(draft, "config.json"))
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
