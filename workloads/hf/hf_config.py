"""Reading the configuration (config.json) of a Hugging Face folder as transformers' own object."""

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
"""How the name of a model begins that is in a folder of transformers."""
CONFIG, GENERATION = "config.json", "generation_config.json"
"""Files of a folder that say what its model is, and how it generates."""
GENERATOR = "generator"
"""Folder of ELECTRA's generator, inside that of its discriminator."""
HUB = re.compile(r"(?!\.)[\w.-]+(/(?!\.)[\w.-]+)?")
"""Names of the Hub: one or two parts."""
FILES = (".json", ".yaml", ".tiktoken")
"""How a name ends that is of a file."""
ADAPTER = "adapter_config.json"
"""The file that makes a folder an adapter of peft, and of transformers' `from_pretrained` one on its base."""
PEFT_CLASSES = {
    "CAUSAL_LM": "AutoPeftModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoPeftModelForSeq2SeqLM",
    "SEQ_CLS": "AutoPeftModelForSequenceClassification",
    "TOKEN_CLS": "AutoPeftModelForTokenClassification",
    "QUESTION_ANS": "AutoPeftModelForQuestionAnswering",
}
"""The class of peft that loads an adapter and its base, by the adapter's task."""
BESIDE = ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "MULTITASK_PROMPT_TUNING", "ADAPTION_PROMPT")
"""Kinds of adapters that stand beside the weights of the base."""
HEADS = (".score.weight", ".classifier.weight", ".classifier.out_proj.weight")
"""How the name of a matrix ends that has a row a label."""
RANDOM = ("drop", "jitter")
"""Parts of the names of attributes with which a network draws random numbers in training."""


@dataclass(frozen=True)
class FolderConfig:
    """The configuration files of a pretrained folder, as they are when a run begins.

    The run keeps them, since the files may be edited or removed while it goes on.

    Attributes:
        config: the text of config.json.
        generator: the text of the config.json of ELECTRA's generator; empty if there is none.
        generation: the text of generation_config.json; empty if there is none.
        tied: whether the output projection is the embedding, for a class of this project. Weights in the folder decide
            it, and they may be gone later. None if it is not known.
    """

    config: str
    generator: str = ""
    generation: str = ""
    tied: bool | None = None

    @property
    def of_generator(self) -> FolderConfig | None:
        """The configuration of ELECTRA's generator alone; None if there is none."""
        return FolderConfig(self.generator) if self.generator else None


def folder_config(folder: str) -> FolderConfig:
    """Read the configuration files in a folder (or beside its config.json). Raises WorkloadError if it has none."""
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
    """The configuration object of transformers for a folder (or its config.json), with `changes` of its attributes.

    It is read from the text that a run has `kept`, if there is one, and from the folder otherwise. Raises WorkloadError
    if transformers cannot read it, or if the weights are quantised by a method that is not among `quantised`.
    """
    path = root(folder)
    if kept is None and not (path / CONFIG).exists():
        raise _no_config(folder)
    from transformers import AutoConfig  # takes a second, which a wrong folder need not

    try:
        with _place_of(path, kept) as place:
            hf_config = AutoConfig.from_pretrained(
                place, local_files_only=True, trust_remote_code=False, **(changes or {})
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
"""What of a configuration decides no number here: who wrote it, and how it is loaded or run."""


def config_differences(folder: str, kept: FolderConfig) -> list[tuple[str, str, str, str]]:
    """In which keys the configuration files in a folder say something else than those that a run has `kept`: the file,
    the key, and both values as text. Empty if the folder has no configuration any more."""
    try:
        now = folder_config(folder)
    except WorkloadError:
        return []
    found = []
    for file, theirs, ours in (
        (CONFIG, kept.config, now.config),
        (f"{GENERATOR}/{CONFIG}", kept.generator, now.generator),
    ):
        if theirs == ours:
            continue
        was, is_now = (_flat(_resolved(folder, text)) for text in (theirs, ours))
        keys = [key for key in sorted(was.keys() | is_now.keys()) if was.get(key) != is_now.get(key)]
        found += [
            (file, key, was.get(key, "not set"), is_now.get(key, "not set"))
            for key in keys
            if UNUSED.isdisjoint(key.split("."))
        ]
    return found


def _resolved(folder: str, text: str) -> dict[str, Any]:
    """What transformers reads of the text of a config.json; what the text says, where transformers cannot read it."""
    try:
        found: dict[str, Any] = read_hf_config(
            folder, quantised=AnyMethod(), kept=FolderConfig(text)
        ).to_dict()
        return found
    except WorkloadError:
        pass
    try:
        said = json.loads(text)
    except ValueError:
        return {"": text}
    return said if isinstance(said, dict) else {"": said}


def _flat(value: Any, key: str = "") -> dict[str, str]:
    """The values of a mapping, and of those within it, as text by their dotted keys."""
    if not isinstance(value, Mapping) or not value:
        return {key: json.dumps(value, sort_keys=True, default=str)}
    found: dict[str, str] = {}
    for name, inner in value.items():
        found |= _flat(inner, f"{key}.{name}" if key else str(name))
    return found


class AnyMethod:
    """Contains every method by which weights are quantised."""

    def __contains__(self, _: object) -> bool:
        return True


def _no_config(folder: str) -> WorkloadError:
    check_no_adapter(str(root(folder)))
    return WorkloadError(
        f"{folder} has no config.json; give a folder that save_pretrained wrote, or put it there"
        f"{of_the_hub(folder)}"
    )


def _is_there(file: Path, text: str) -> bool:
    """Whether a file has this text."""
    try:
        return file.read_text() == text
    except (OSError, UnicodeDecodeError):
        return False


@contextlib.contextmanager
def _place_of(path: Path, kept: FolderConfig | None) -> Iterator[Path]:
    """The folder itself, or a temporary one with the configuration that a run has kept, if that is another."""
    if kept is None or _is_there(path / CONFIG, kept.config):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="config-") as place:
        (Path(place) / CONFIG).write_text(kept.config)
        yield Path(place)


def check_no_adapter(folder: str) -> None:
    """Raise WorkloadError if `folder` holds an adapter of peft, which is for a base that is elsewhere."""
    place = Path(folder, ADAPTER)
    if not place.exists():
        return
    try:
        about = json.loads(place.read_text())
        base, kind, task = (about.get(key) for key in ("base_model_name_or_path", "peft_type", "task_type"))
    except (OSError, ValueError, AttributeError) as error:
        raise WorkloadError(f"{place} cannot be read ({error})") from None
    what = f"{folder} is an adapter of peft for {base}, and a model is read whole here"
    if kind in BESIDE:
        raise WorkloadError(f"{what}; {kind} is merged into no weights, so name hf:{base} and train it anew")
    merged = f"{folder.rstrip('/')}-merged"
    more = f", num_labels={count}" if (count := _labels_of(Path(folder), task)) else ""
    code = (
        f"import peft; peft.{PEFT_CLASSES.get(task, 'AutoPeftModel')}.from_pretrained({folder!r}{more})"
        f".merge_and_unload().save_pretrained({merged!r})"
    )
    raise WorkloadError(f"{what}; merge both with `python -c {shlex.quote(code)}` and name hf:{merged}")


def _labels_of(folder: Path, task: str | None) -> int:
    """How many labels the head in an adapter's folder predicts; 0 if it has none."""
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
