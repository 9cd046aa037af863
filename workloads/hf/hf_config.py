"""Reading the configuration (config.json) of a Hugging Face folder as transformers' own object."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

from workloads.errors import WorkloadError

FOLDER = "hf:"
"""How the name of a model begins that is in a folder of transformers."""
HUB = re.compile(r"(?!\.)[\w.-]+(/(?!\.)[\w.-]+)?")
"""Names of the Hub: one or two parts."""
FILES = (".json", ".yaml", ".tiktoken")
"""How a name ends that is of a file."""
RANDOM = ("drop", "jitter")
"""Parts of the names of attributes with which a network draws random numbers in training."""


def read_hf_config(
    folder: str, changes: Mapping[str, Any] | None = None, quantised: Container[str] = ()
) -> Any:
    """The configuration object of transformers for a folder (or its config.json), with `changes` of its attributes.

    Raises WorkloadError if transformers cannot read it, or if the weights are quantised by a method that is not among
    `quantised`.
    """
    path = root(folder)
    if not (path / "config.json").exists():
        raise WorkloadError(
            f"{folder} has no config.json; give a folder that save_pretrained wrote, or put it there"
            f"{of_the_hub(folder)}"
        )
    from transformers import AutoConfig  # takes a second, which a wrong folder need not

    try:
        hf_config = AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, **(changes or {})
        )
    except Exception as error:  # each class checks its configuration in its own way
        line = " ".join(str(error).split())[:200]
        raise WorkloadError(f"transformers cannot read {folder}: {line}; fix its config.json") from error
    if method_of(hf_config) and method_of(hf_config) not in quantised:
        raise WorkloadError(f"the weights in {folder} are quantised; give a folder with the full ones")
    return hf_config


def of_the_hub(path: str) -> str:
    """The end of a hint: how to get what `path` names on the Hugging Face Hub; empty if that is no name of something
    there, or is here."""
    named = path.removeprefix(f"{Path.cwd()}/")
    if not HUB.fullmatch(named) or named.endswith(FILES) or Path(path).exists():
        return ""
    return f". Nothing is fetched from the Hub; `hf download {named} --local-dir {named}` does that"


def method_of(hf_config: Any) -> str:
    """By which method the weights are quantised; empty if they are not."""
    given = getattr(hf_config, "quantization_config", None)
    if given is None:
        return ""
    given = given if isinstance(given, Mapping) else vars(given)
    return str(given.get("quant_method") or "unknown")


def nested_configs(hf_config: Any) -> Iterator[Any]:
    """A configuration and all configurations nested in it (text, vision, ...)."""
    from transformers import PreTrainedConfig

    yield hf_config
    for value in vars(hf_config).values():
        if isinstance(value, PreTrainedConfig):
            yield from nested_configs(value)


def random_attributes(hf_config: Any) -> list[str]:
    """The names of attributes, not zero, with which a network draws random numbers in training."""
    return sorted(
        name
        for name, value in vars(hf_config).items()
        if any(word in name for word in RANDOM) and type(value) in (int, float) and value
    )


def root(folder: str) -> Path:
    """The folder, also if the path of its config.json is given."""
    return Path(folder).parent if folder.endswith(".json") else Path(folder)
