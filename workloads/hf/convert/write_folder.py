"""Export of complete checkpoints of our models in the Hugging Face format."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workloads.errors import WorkloadError
from workloads.hf.files.hf_config import GENERATOR
from workloads.hf.files.meaning import as_written, generates, write_settings
from workloads.hf.files.older_form import write_both_forms
from workloads.hf.files.weight_files import write
from workloads.hf.tables.convert import Shapes, to_hf
from workloads.hf.tables.families import family_of
from workloads.hf.tables.family import Family
from workloads.model.config import TransformerConfig
from workloads.model.mup import folded
from workloads.workload import PLAIN, Generation, Vocabulary

NO_STRUCTURE = ("family", "architecture", "head", "sentence_head", "classes", "generator", "initial",
                "initial_std", "residual_scaling", "base", "dropout", "attention_dropout", "layer_drop",
                "embedding_noise", "head_gates")  # fmt: skip


def export(
    config: TransformerConfig,
    vocabulary: Vocabulary,
    shapes: Shapes,
    read: Callable[[str], Tensor],
    folder: str,
    decoder_start: int | None = None,
    labels: Sequence[str] = (),
    problem: str | None = None,
    generation: Generation = PLAIN,
) -> None:
    """Write config.json and model.safetensors (fp32) of a model; if it generates text, also generation_config.json.

    ELECTRA's discriminator goes to `folder`, its generator to the folder `generator` in it.

    Args:
        config: the model.
        vocabulary: its vocabulary.
        shapes: the shapes of its tensors.
        read: returns the tensor of a name.
        folder: where to write.
        decoder_start: the first token of an encoder-decoder's decoder; by default the padding.
        labels: the names of a classifier's labels.
        problem: transformers' name of its loss.
        generation: how a text continues and ends.

    Raises WorkloadError if transformers has no such model.
    """
    if not config.generator:
        hf_config = hf_config_of(config, vocabulary, decoder_start, generation)
        hf_config.problem_type = problem
        if labels:
            hf_config.id2label = dict(enumerate(labels))
            hf_config.label2id = {label: number for number, label in enumerate(labels)}
        _export_one(config, hf_config, shapes, read, folder)
        if generates(config):
            write_settings(folder, generation, hf_config)
        return
    for part, prefix, path in electra_pair(config, folder):
        names = {within(prefix, n): s for n, s in shapes.items() if belongs(prefix, n)}
        outside = partial(_outside, prefix)
        _export_one(part, hf_config_of(part, vocabulary), names, lambda n, o=outside: read(o(n)), path)  # type: ignore[misc]


def check_export(
    config: TransformerConfig, vocabulary: Vocabulary, shapes: Shapes, decoder_start: int | None = None
) -> None:
    """Raise WorkloadError if `export` would. Needs no weights.

    Successful checks are remembered on this machine, because importing transformers' class takes several seconds.
    """
    if config.causal and config.head == "sequence" and vocabulary.pad is None:
        raise WorkloadError(
            "cannot export: transformers needs a pad token to find the last token, and this tokenizer has "
            "none; give it one, or set checkpoint.export to null"
        )
    passed = _passed(config, vocabulary, shapes, decoder_start)
    if passed.exists():
        return
    parts = electra_pair(config, "") if config.generator else ((config, "", ""),)
    for part, prefix, _ in parts:
        hf_config = hf_config_of(part, vocabulary, decoder_start)
        names = {within(prefix, n): s for n, s in shapes.items() if belongs(prefix, n)}
        blank = {name: torch.empty(shape, device="meta") for name, shape in names.items()}
        written = to_hf(family_of(part), part, names, blank.__getitem__)
        _check_fits(hf_config, {name: tensor.shape for name, tensor in written})
    with contextlib.suppress(OSError):  # then the check runs again next time
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.touch()


def hf_names(config: TransformerConfig, shapes: Shapes) -> list[str]:
    """Return the names of transformers' tensors for a model with one network."""
    blank = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    return [name for name, _ in to_hf(family_of(config), config, shapes, blank.__getitem__)]


def hf_weights(
    config: TransformerConfig, shapes: Shapes, chosen: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """Return the names of transformers' matrices that consist of our tensors `chosen`, with the tensors of each.

    Raises WorkloadError if one of them holds others too.
    """
    numbers = {name: number for number, name in enumerate(chosen, 1)}
    marks = {name: torch.full((), float(numbers.get(name, 0))).expand(size) for name, size in shapes.items()}
    names = {float(number): name for name, number in numbers.items()}
    result = {}
    for name, tensor in to_hf(family_of(config), config, shapes, marks.__getitem__):
        low, high = (float(each) for each in tensor.aminmax())
        if tensor.dim() != 2 or high not in names:
            continue
        found = [low] if low == high else tensor.unique().tolist()
        if not found[0]:
            raise WorkloadError(
                f"transformers joins quantised weights and others in {name}; quantise all of them or none"
            )
        result[name] = tuple(names[number] for number in found)
    return result


def hf_config_of(
    config: TransformerConfig,
    vocabulary: Vocabulary,
    decoder_start: int | None = None,
    generation: Generation = PLAIN,
) -> Any:
    """Return transformers' configuration object for a model. Raises WorkloadError if it cannot describe the model."""
    from transformers import AutoConfig

    family = family_of(config)
    ids: dict[str, Any] = {
        "pad_token_id": vocabulary.pad,
        "bos_token_id": vocabulary.bos,
        "eos_token_id": vocabulary.eos,
    }
    if config.architecture == "encoder-decoder":
        start = vocabulary.pad if decoder_start is None else decoder_start
        forced = generation.settings.get("forced_eos_token_id")
        ids |= {"decoder_start_token_id": start, "forced_eos_token_id": forced}
    if generates(config):
        ids["eos_token_id"] = as_written(generation.ending(vocabulary.eos).ends)
    values = {**ids, **family.write_config(config)}
    hf_config = AutoConfig.for_model(
        family.model_type, architectures=[family.head(config).kind], dtype="float32", **values
    )
    _check_config(family, config, hf_config)
    return hf_config


def electra_pair(config: TransformerConfig, folder: str) -> tuple[tuple[TransformerConfig, str, str], ...]:
    """Return the configurations of ELECTRA's two networks, the prefixes of their tensors' names, and their folders."""
    generator = str(Path(folder) / GENERATOR)
    return (
        (config.changed({"generator": 0}), "discriminator.", folder),
        (config.generator_config(), "generator.", generator),
    )


def belongs(prefix: str, name: str) -> bool:
    """Return whether a tensor of the pair belongs to the network with that prefix."""
    return name.startswith(prefix) or shared(name)


def shared(name: str) -> bool:
    """Return whether both networks of the pair have the tensor."""
    return name.startswith(("tokens.", "embeddings."))


def within(prefix: str, name: str) -> str:
    """Return the name of a tensor of the pair within its network."""
    return name.removeprefix(prefix)


def _outside(prefix: str, name: str) -> str:
    return name if shared(name) else prefix + name


def state(
    config: TransformerConfig, shapes: Shapes, read: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield transformers' tensors (fp32) of a model with one network by name."""
    scaled = lambda name: read(name).detach().float() * folded(config, name)  # noqa: E731
    return to_hf(family_of(config), config, shapes, scaled)


def _export_one(
    config: TransformerConfig, hf_config: Any, shapes: Shapes, read: Callable[[str], Tensor], folder: str
) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    write(state(config, shapes, read), folder)
    # The configuration is written last, so a folder with a configuration is complete.
    hf_config.save_pretrained(folder)
    write_both_forms(folder)


def _check_config(family: Family, config: TransformerConfig, hf_config: Any) -> None:
    """Raise WorkloadError if the written configuration would be read as another model."""
    read_back = structure(family.read_config(hf_config))
    wanted = structure(config)
    pools = config.sentence_head or config.head == "sequence"
    for name in wanted.keys() - {*family.unsaid, *(() if pools else ("pooler",))}:
        for part, value, other in _parts(name, wanted[name], read_back[name]):
            if value != other:
                raise WorkloadError(
                    f"{family.model_type} of transformers cannot have {part} {value!r}; "
                    f"set {part} to {_written(other)} or checkpoint.export to null"
                )


def _parts(name: str, wanted: Any, actual: Any) -> list[tuple[str, Any, Any]]:
    """Yield a field with its expected and its actual value, or its nested fields with theirs."""
    if not (is_dataclass(wanted) and is_dataclass(actual)):
        return [(name, wanted, actual)]
    return [(f"{name}.{f.name}", getattr(wanted, f.name), getattr(actual, f.name)) for f in fields(wanted)]


def _written(value: Any) -> str:
    """Return a value as a job file writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def _check_fits(hf_config: Any, written: dict[str, torch.Size]) -> None:
    """Raise WorkloadError if a tensor of the export has another shape in the transformers class."""
    import transformers

    if any(".experts." in name for name in written):
        return  # transformers renames stacked experts as it loads
    with torch.device("meta"):
        made = getattr(transformers, hf_config.architectures[0])(hf_config).state_dict()
    for name, shape in written.items():
        if name not in made or made[name].shape != shape:
            has = list(made[name].shape) if name in made else "none"
            raise WorkloadError(
                f"{hf_config.architectures[0]} of transformers has {has} for {name} {list(shape)}; change the model's "
                "options or set checkpoint.export to null"
            )


def _passed(
    config: TransformerConfig, vocabulary: Vocabulary, shapes: Shapes, decoder_start: int | None
) -> Path:
    """Return the file that marks a successful check of this model, in this version of transformers and of this
    package.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    ids = vocabulary.pad, vocabulary.bos, vocabulary.eos
    identity = repr([metadata.version("transformers"), config, ids, decoder_start, sorted(shapes.items())])
    digest = hashlib.sha256(identity.encode())
    for source in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(source.read_bytes())
    return Path(cache, "orchestrator", "exports", digest.hexdigest())


def structure(config: TransformerConfig) -> dict[str, Any]:
    """Return the fields that decide what the body computes, without initialisation, training and heads."""
    values = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in NO_STRUCTURE}
    if config.moe:
        plain = {"auxiliary": 0.0, "z_loss": 0.0}
        values["moe"] = replace(config.moe, **plain)  # type: ignore[arg-type]
    return values
