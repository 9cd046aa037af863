"""Reading the configuration (config.json) of a Hugging Face folder as transformers' own object."""

from __future__ import annotations

import json
import re
import shlex
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


def read_hf_config(
    folder: str, changes: Mapping[str, Any] | None = None, quantised: Container[str] = ()
) -> Any:
    """The configuration object of transformers for a folder (or its config.json), with `changes` of its attributes.

    Raises WorkloadError if transformers cannot read it, or if the weights are quantised by a method that is not among
    `quantised`.
    """
    path = root(folder)
    if not (path / "config.json").exists():
        check_no_adapter(str(path))
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
