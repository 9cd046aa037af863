"""The tokenizer of an exported model: it adds the same special tokens around a text as training did."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, processors

from orchestrator.data.config import DataSpec
from orchestrator.data.encoding.auto_tokenizer import BY_FILE, FILE, is_read
from orchestrator.data.encoding.tokenizer import LANGUAGES
from orchestrator.data.prepare.chat_template import MORE_TEMPLATES, named_template, templates_in
from orchestrator.data.store.data_folder import DataFolder

if TYPE_CHECKING:
    from orchestrator.data.store.tokens import Tokens
    from workloads.workload import Workload

ACCOMPANYING = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt", "vocab.json", "merges.txt",
    "spiece.model", "tokenizer.model", "sentencepiece.bpe.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""Files that may accompany a tokenizer.json in its folder."""


def write_tokenizer(tokens: Tokens, workload: Workload, data: DataSpec, folder: str) -> None:
    """Write the tokenizer of the prepared data, with the files that came with it.

    A tokenizer that adds special tokens itself stays unchanged. Any other gets those of the objective.

    Args:
        tokens: the prepared data.
        workload: the model and its objective.
        data: the key `data` of the job.
        folder: a local folder.
    """
    tokenizer = tokens.tokenizer()
    if not _adds_tokens(tokenizer):
        tokenizer = _with_special_tokens(tokenizer, workload, tokens.manifest.roles)
    source = data.tokenizer
    template_reference = data.chat_template
    tokenizer_folder = _folder(source) if isinstance(source, str) else None
    templates = templates_in(DataFolder(str(tokenizer_folder))) if tokenizer_folder else {}
    if not (isinstance(source, str) and _copied_whole(tokenizer, tokenizer_folder, folder)):
        for name in ACCOMPANYING:  # they would describe another tokenizer
            (Path(folder) / name).unlink(missing_ok=True)
        _wrapped(tokens, tokenizer, workload).save_pretrained(folder)
        _name_for_all(Path(folder) / "tokenizer_config.json")
    named = _given(tokens, template_reference)
    _write_templates({"default": named} if named else templates, Path(folder))


def _write_templates(templates: Mapping[str, str], folder: Path) -> None:
    """Write the chat templates that the model was trained with, as transformers stores them."""
    for name, text in templates.items():
        if name == "default":
            (folder / "chat_template.jinja").write_text(text)
        elif Path(name).name == name:
            (folder / MORE_TEMPLATES).mkdir(exist_ok=True)
            (folder / MORE_TEMPLATES / f"{name}.jinja").write_text(text)


def _given(tokens: Tokens, template_reference: str | None) -> str | None:
    """Return the chat template that the job names, as it was when it wrote the data; None if the job names none.

    Data of an earlier version lacks it. Then it is read again, and None is returned if it is missing.
    """
    if template_reference and tokens.manifest.chat:
        return str(tokens.manifest.chat["template"])
    return named_template(template_reference) if template_reference else None


def longest(workload: Workload) -> int:
    """Return the longest input of the model in tokens, transformers' VERY_LARGE_INTEGER if unlimited."""
    from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

    bounded = getattr(workload.config, "positions", "learned") in ("learned", "rotary")
    return int(workload.config.max_positions if bounded else VERY_LARGE_INTEGER)


def _adds_tokens(tokenizer: Tokenizer) -> bool:
    return tokenizer.num_special_tokens_to_add(is_pair=False) > 0


def _with_special_tokens(tokenizer: Tokenizer, workload: Workload, roles: dict[str, int]) -> Tokenizer:
    """Return `tokenizer` with the special tokens of the objective, such as <cls> text <sep>. A pair of texts has two
    types.
    """
    begins, ends = (roles.get(role) for role in (workload.objective.begins, workload.objective.ends))
    if begins is None and ends is None:
        return tokenizer
    names = {number: tokenizer.id_to_token(number) for number in (begins, ends) if number is not None}
    begin, end = ([names[number]] if number is not None else [] for number in (begins, ends))
    second = int(getattr(workload.config, "token_types", 0) > 1)
    frame = processors.TemplateProcessing(
        single=[*begin, "$A", *end],
        pair=[*begin, "$A", *end, f"$B:{second}", *(f"{name}:{second}" for name in end)],
        special_tokens=[(name, number) for number, name in names.items()],
    )
    before = tokenizer.post_processor
    tokenizer.post_processor = processors.Sequence([before, frame]) if before else frame
    return tokenizer


def _wrapped(tokens: Tokens, tokenizer: Tokenizer, workload: Workload) -> Any:
    """Return a transformers tokenizer that produces the inputs of this model."""
    from transformers import PreTrainedTokenizerFast

    roles = {role: number for role, number in tokens.manifest.roles.items() if role not in LANGUAGES}
    named = {f"{role}_token": tokenizer.id_to_token(number) for role, number in roles.items()}
    inputs = ["input_ids", "attention_mask"]
    if getattr(workload.config, "token_types", 0) > 1:
        inputs.insert(1, "token_type_ids")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=longest(workload),
        model_input_names=inputs,
        clean_up_tokenization_spaces=False,
        **named,
    )


def _name_for_all(path: Path) -> None:
    """Write the class name of transformers 4, which 5 accepts too. Version 4 refuses the name that 5 writes."""
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"tokenizer_class": BY_FILE}, indent=2, ensure_ascii=False) + "\n")


def _copied_whole(tokenizer: Tokenizer, source: Path | None, folder: str) -> bool:
    """Copy the files from `source`. Return whether transformers makes the same tokenizer from them."""
    _copy(source, folder, ACCOMPANYING)
    if not (Path(folder) / "tokenizer_config.json").exists():
        return False
    tokenizer.save(str(Path(folder) / FILE))
    return is_read(tokenizer, folder)  # otherwise it is wrapped like any other tokenizer


def _folder(location: str) -> Path | None:
    """Return the local folder of a path to a file or folder; None if it does not exist (any more)."""
    path = Path(location)
    path = path.parent if path.suffix == ".json" else path
    return path if location and path.is_dir() else None


def _copy(source: Path | None, folder: str, names: tuple[str, ...]) -> None:
    for name in names if source else ():
        if source and (source / name).is_file():
            shutil.copyfile(source / name, Path(folder) / name)
