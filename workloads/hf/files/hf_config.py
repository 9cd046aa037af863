"""Read the configuration (config.json) of a Hugging Face folder as transformers' own object."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import tempfile
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workloads.errors import WorkloadError

FOLDER = "hf:"
"""Prefix of a model's name for a folder in transformers' format."""
CONFIG, GENERATION = "config.json", "generation_config.json"
"""Files of a folder that describe its model and its generation."""
GENERATOR = "generator"
"""The folder of ELECTRA's generator, inside that of its discriminator."""
HUB = re.compile(r"(?!\.)[\w.-]+(/(?!\.)[\w.-]+)?")
"""Names on the Hub: one or two parts."""
FILES = (".json", ".yaml", ".tiktoken")
"""Suffixes of file names."""
ADAPTER = "adapter_config.json"
"""The file that marks a folder as a peft adapter. transformers' `from_pretrained` then loads it onto its base."""
PEFT_CLASSES = {
    "CAUSAL_LM": "AutoPeftModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoPeftModelForSeq2SeqLM",
    "SEQ_CLS": "AutoPeftModelForSequenceClassification",
    "TOKEN_CLS": "AutoPeftModelForTokenClassification",
    "QUESTION_ANS": "AutoPeftModelForQuestionAnswering",
}
"""peft's class that loads an adapter and its base, by the adapter's task."""
BESIDE = ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "MULTITASK_PROMPT_TUNING", "ADAPTION_PROMPT")
"""Kinds of adapters that cannot be merged into the weights of the base."""
HEADS = (".score.weight", ".classifier.weight", ".classifier.out_proj.weight")
"""Suffix of a matrix with a row for each label."""
RANDOM = ("drop", "jitter")
"""Parts of the names of attributes that make a network draw random numbers in training."""


@dataclass(frozen=True)
class FolderConfig:
    """The configuration files of a pretrained folder as they are when a run begins.

    The run keeps them, because the files may be edited or removed while it continues.

    Attributes:
        config: the text of config.json.
        generator: the text of the config.json of ELECTRA's generator; empty without one.
        generation: the text of generation_config.json; empty without one.
        tied: whether the output projection is the embedding, for a class of this project. The weights in the folder
            decide this, and may be gone later. None if unknown.
    """

    config: str
    generator: str = ""
    generation: str = ""
    tied: bool | None = None

    @property
    def of_generator(self) -> FolderConfig | None:
        """Return the configuration of ELECTRA's generator alone; None without one."""
        return FolderConfig(self.generator) if self.generator else None


def folder_config(folder: str) -> FolderConfig:
    """Read the configuration files in a folder (or beside its config.json). Raises WorkloadError if there are none."""
    path = root(folder)
    names = (CONFIG, f"{GENERATOR}/{CONFIG}", GENERATION)
    try:
        config, generator, generation = (
            (path / name).read_text() if (path / name).is_file() else "" for name in names
        )
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"the configuration in {folder} cannot be read ({error})") from None
    if not (path / CONFIG).exists():
        raise _no_config(folder)
    return FolderConfig(config, generator, generation)


def read_hf_config(
    folder: str,
    changes: Mapping[str, Any] | None = None,
    quantised: Container[str] = (),
    kept: FolderConfig | None = None,
) -> Any:
    """Return transformers' configuration object for a folder (or its config.json), with `changes` of its attributes.

    It is read from the text that a run has `kept`, if any, else from the folder. Raises WorkloadError if transformers
    cannot read it, or if the weights are quantised by a method that is not in `quantised`.
    """
    path = root(folder)
    if kept is None and not (path / CONFIG).exists():
        raise _no_config(folder)
    from transformers import AutoConfig  # takes a second, so check the folder first

    try:
        with _place_of(path, kept) as source:
            hf_config = AutoConfig.from_pretrained(
                source, local_files_only=True, trust_remote_code=False, **(changes or {})
            )
        hf_config.name_or_path = str(path)
    except Exception as error:  # each class checks its configuration in its own way
        line = " ".join(str(error).split())[:200]
        raise WorkloadError(f"transformers cannot read {folder}: {line}; fix its config.json") from error
    if method_of(hf_config) and method_of(hf_config) not in quantised:
        raise WorkloadError(f"the weights in {folder} are quantised; give a folder with the full ones")
    return hf_config


UNUSED = frozenset(
    {"transformers_version", "_name_or_path", "name_or_path", "dtype", "torch_dtype", "use_cache"}
)
"""Keys of a configuration that affect no number here: who wrote it, and how it is loaded or run."""


def config_differences(folder: str, kept: FolderConfig) -> list[tuple[str, str, str, str]]:
    """Return the differences between the configuration files in a folder and those that a run has `kept`.

    Each has the file, the key, and both values as text. Empty if the folder no longer has a configuration.
    """
    try:
        now = folder_config(folder)
    except WorkloadError:
        return []
    differing = []
    for file, theirs, ours in (
        (CONFIG, kept.config, now.config),
        (f"{GENERATOR}/{CONFIG}", kept.generator, now.generator),
    ):
        if theirs == ours:
            continue
        was, is_now = (_flat(_resolved(folder, text)) for text in (theirs, ours))
        keys = [key for key in sorted(was.keys() | is_now.keys()) if was.get(key) != is_now.get(key)]
        differing += [
            (file, key, was.get(key, "not set"), is_now.get(key, "not set"))
            for key in keys
            if UNUSED.isdisjoint(key.split("."))
        ]
    return differing


def _resolved(folder: str, text: str) -> dict[str, Any]:
    """Return what transformers reads from the text of a config.json; the plain content if transformers cannot read
    it.
    """
    try:
        resolved: dict[str, Any] = read_hf_config(
            folder, quantised=AnyMethod(), kept=FolderConfig(text)
        ).to_dict()
        return resolved
    except WorkloadError:
        pass
    try:
        content = json.loads(text)
    except ValueError:
        return {"": text}
    return content if isinstance(content, dict) else {"": content}


def _flat(value: Any, key: str = "") -> dict[str, str]:
    """Return the values of a mapping and of nested mappings as text, by their dotted keys."""
    if not isinstance(value, Mapping) or not value:
        return {key: json.dumps(value, sort_keys=True, default=str)}
    flat: dict[str, str] = {}
    for name, inner in value.items():
        flat |= _flat(inner, f"{key}.{name}" if key else str(name))
    return flat


class AnyMethod:
    """Contains every quantisation method."""

    def __contains__(self, _: object) -> bool:
        return True


def _no_config(folder: str) -> WorkloadError:
    check_no_adapter(str(root(folder)))
    return WorkloadError(
        f"{folder} has no config.json; give a folder that save_pretrained wrote, or put it there"
        f"{of_the_hub(folder)}"
    )


def _is_there(file: Path, text: str) -> bool:
    """Return whether a file has this text."""
    try:
        return file.read_text() == text
    except (OSError, UnicodeDecodeError):
        return False


@contextlib.contextmanager
def _place_of(path: Path, kept: FolderConfig | None) -> Iterator[Path]:
    """Yield the folder itself, or a temporary one with the configuration that a run has kept, if that differs."""
    if kept is None or _is_there(path / CONFIG, kept.config):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="config-") as temporary:
        (Path(temporary) / CONFIG).write_text(kept.config)
        yield Path(temporary)


def check_no_adapter(folder: str) -> None:
    """Raise WorkloadError if `folder` holds a peft adapter, whose base is elsewhere."""
    file = Path(folder, ADAPTER)
    if not file.exists():
        return
    try:
        about = json.loads(file.read_text())
        base, kind, task = (about.get(key) for key in ("base_model_name_or_path", "peft_type", "task_type"))
    except (OSError, ValueError, AttributeError) as error:
        raise WorkloadError(f"{file} cannot be read ({error})") from None
    problem = f"{folder} is an adapter of peft for {base}, and a model is read whole here"
    if kind in BESIDE:
        raise WorkloadError(
            f"{problem}; {kind} cannot be merged into weights: name hf:{base} and train the adapter again"
        )
    merged = f"{folder.rstrip('/')}-merged"
    more = f", num_labels={count}" if (count := _labels_of(Path(folder), task)) else ""
    code = (
        f"import peft; peft.{PEFT_CLASSES.get(task, 'AutoPeftModel')}.from_pretrained({folder!r}{more})"
        f".merge_and_unload().save_pretrained({merged!r})"
    )
    raise WorkloadError(f"{problem}; merge both with `python -c {shlex.quote(code)}` and name hf:{merged}")


def _labels_of(folder: Path, task: str | None) -> int:
    """Return how many labels the head in an adapter's folder predicts; 0 without a head."""
    from safetensors import SafetensorError, safe_open

    if task not in ("SEQ_CLS", "TOKEN_CLS"):
        return 0
    try:
        with safe_open(folder / "adapter_model.safetensors", "pt") as file:
            heads = [n for n in file.keys() if n.endswith(HEADS)]  # noqa: SIM118
            return max((int(file.get_slice(name).get_shape()[0]) for name in heads), default=0)
    except (SafetensorError, OSError):
        return 0


def of_the_hub(path: str) -> str:
    """Return the end of a hint about getting `path` from the Hugging Face Hub; empty if that is not a Hub name, or
    exists locally.
    """
    named = path.removeprefix(f"{Path.cwd()}/")
    if not HUB.fullmatch(named) or named.endswith(FILES) or Path(path).exists():
        return ""
    return f". Nothing is fetched from the Hub; `hf download {named} --local-dir {named}` does that"


def method_of(hf_config: Any) -> str:
    """Return the method by which the weights are quantised; empty if they are not."""
    quantisation = quantisation_of(hf_config)
    return str(quantisation.get("quant_method") or "unknown") if quantisation else ""


def quantisation_of(hf_config: Any) -> Mapping[str, Any]:
    """Return how the weights are quantised, as config.json says it; empty if they are not."""
    quantisation = getattr(hf_config, "quantization_config", None)
    if quantisation is None or isinstance(quantisation, Mapping):
        return quantisation or {}
    return vars(quantisation)


def nested_configs(hf_config: Any) -> Iterator[Any]:
    """Yield a configuration and all configurations nested in it (text, vision, ...)."""
    from transformers import PreTrainedConfig

    yield hf_config
    for value in vars(hf_config).values():
        if isinstance(value, PreTrainedConfig):
            yield from nested_configs(value)


def random_attributes(hf_config: Any) -> list[str]:
    """Return the nonzero attributes that make a network draw random numbers in training."""
    return sorted(
        name
        for name, value in vars(hf_config).items()
        if any(word in name for word in RANDOM) and type(value) in (int, float) and value
    )


def root(folder: str) -> Path:
    """Return the folder, also for the path of its config.json."""
    return Path(folder).parent if folder.endswith(".json") else Path(folder)
