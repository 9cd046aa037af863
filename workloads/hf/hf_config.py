"""Reading the configuration (config.json) of a Hugging Face folder as transformers' own object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from workloads.errors import WorkloadError

RANDOM = ("drop", "jitter")
"""What the names of numbers have in them with which a network in training draws random numbers."""


def read_hf_config(folder: str, changes: Mapping[str, Any] | None = None) -> Any:
    """Their configuration object. Raises WorkloadError if the folder has none that transformers knows."""
    from transformers import AutoConfig

    path = root(folder)
    if not (path / "config.json").exists():
        raise WorkloadError(f"{folder} has no config.json; give a folder that save_pretrained wrote")
    try:
        theirs = AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, **(changes or {})
        )
    except Exception as error:  # each class checks its configuration in its own way
        line = " ".join(str(error).split())[:200]
        raise WorkloadError(f"transformers cannot read {folder}: {line}; fix its config.json") from error
    if getattr(theirs, "quantization_config", None) is not None:
        raise WorkloadError(f"the weights in {folder} are quantised; give a folder with the whole ones")
    return theirs


def nested_configs(theirs: Any) -> Iterator[Any]:
    """A configuration and those inside it."""
    from transformers import PreTrainedConfig

    yield theirs
    for value in vars(theirs).values():
        if isinstance(value, PreTrainedConfig):
            yield from nested_configs(value)


def random_attributes(theirs: Any) -> list[str]:
    """Attributes with which a network in training draws random numbers, and which are not zero."""
    return sorted(
        name
        for name, value in vars(theirs).items()
        if any(word in name for word in RANDOM) and type(value) in (int, float) and value
    )


def root(folder: str) -> Path:
    """The folder itself, also where its config.json is named."""
    return Path(folder).parent if folder.endswith(".json") else Path(folder)
