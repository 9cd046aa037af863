"""The label names in a dataset card: `dataset_info` in the README.md of a dataset on Hugging Face's Hub.

Tables hold these names in their schema. JSON lines and CSV hold only the numbers, so the card in the same folder
names the label of each number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from orchestrator.config.errors import InputError, Unreachable
from orchestrator.config.fields import columns_of
from orchestrator.config.records import LABELS
from orchestrator.data.sources.arrow_files import label_names, names_of_labels
from orchestrator.data.sources.files import TABLES, SourceFile, Span
from orchestrator.data.sources.table_rows import schema_in
from orchestrator.storage.retry import Retry, transient

CARD = "README.md"
ABOVE = 3
"""How many folders above a file's folder may hold its card."""
LIMIT = 2**20
"""Maximum bytes of a card."""
FENCE = "---"


class Cards:
    """Reads the cards above files; each folder's card once."""

    def __init__(self) -> None:
        self._read: dict[str, Any] = {}

    def labels_of(self, file: SourceFile, fs: Any, path: str) -> dict[str, list[str]]:
        """Return the names of the labels in each label column of a file that its card, but not its schema, names.

        Args:
            file: the file.
            fs: its file system.
            path: its path there.

        Raises InputError if the card cannot be read, or names the labels of a column differently in several
        configurations.
        """
        result: dict[str, list[str]] = {}
        for column in _label_columns(file):
            folder, card = self._card_above(fs, path)
            names = _names_in(card, column, path[len(folder) + 1 :], f"{folder}/{CARD}") if card else ()
            if names and not _named_in_schema(file, column):
                result[column] = list(names)
        return result

    def _card_above(self, fs: Any, path: str) -> tuple[str, Mapping[str, Any]]:
        """Return the nearest folder above `path` whose card describes a dataset, and the card; an empty one without
        any.
        """
        folder = path
        for _ in range(ABOVE + 1):
            folder = folder.rpartition("/")[0]
            if not folder or folder.endswith(":/"):
                break
            if folder not in self._read:
                self._read[folder] = _card_in(fs, folder)
            if self._read[folder]:
                return folder, self._read[folder]
        return "", {}


def write_card(folder: str, labels: Mapping[str, Sequence[str]]) -> None:
    """Write a card that names the labels of columns, for files below a local folder."""
    features = []
    for column, names in labels.items():
        numbered = {str(number): name for number, name in enumerate(names)}
        features.append({"name": column, "dtype": {"class_label": {"names": numbered}}})
    Path(folder).mkdir(parents=True, exist_ok=True)
    front = yaml.safe_dump({"dataset_info": {"features": features}}, allow_unicode=True)
    Path(folder, CARD).write_text(f"{FENCE}\n{front}{FENCE}\n")


def _label_columns(file: SourceFile) -> list[str]:
    fields = file.field if isinstance(file.field, dict) else {}
    columns = (column for name in LABELS if name in fields for column in columns_of(fields[name]))
    return list(dict.fromkeys(columns))


def _named_in_schema(file: SourceFile, column: str) -> bool:
    if file.kind not in TABLES or not file.content:
        return False
    schema = schema_in(Span(file, 0, file.size, file.size))
    return schema is not None and bool(label_names(schema, column))


def _card_in(fs: Any, folder: str) -> Mapping[str, Any]:
    """Return the front matter of the card in a folder if it describes a dataset, else an empty mapping."""
    path = f"{folder}/{CARD}"
    try:
        text = Retry()(fs.cat_file, path, start=0, end=LIMIT).decode(errors="replace")
    except Exception as error:  # fsspec backends raise various errors, also for a file that is not there
        if not transient(error):
            return {}
        raise Unreachable(f"cannot be read ({error})", path, "check the address and credentials") from None
    lines = text.removeprefix("\ufeff").splitlines()
    if not lines or lines[0].strip() != FENCE or "dataset_info" not in text:
        return {}
    end = next((at for at, line in enumerate(lines[1:], 1) if line.strip() == FENCE), None)
    try:
        card = yaml.safe_load("\n".join(lines[1:end]))
    except yaml.YAMLError:
        raise InputError("has a dataset_info that is not YAML", path, "fix it, or remove it") from None
    return card if isinstance(card, dict) and "dataset_info" in card else {}


def _names_in(card: Mapping[str, Any], column: str, path: str, where: str) -> tuple[str, ...]:
    """Return the names that a card gives the labels in a column of the file at `path` below the card. Raises
    InputError if its configurations differ.
    """
    dataset_info = card["dataset_info"]
    infos = [
        info
        for info in (dataset_info if isinstance(dataset_info, list) else [dataset_info])
        if isinstance(info, Mapping)
    ]
    configs = _configs_of(card, path)
    chosen = [info for info in infos if str(info.get("config_name", "default")) in configs] or infos
    result = {
        names: str(info.get("config_name", "default"))
        for info in chosen
        if (names := names_of_labels(_features(info.get("features")), column))
    }
    if len(result) > 1:
        named = ", ".join(result.values())
        problem = f"names the labels of '{column}' differently in its configurations {named}"
        raise InputError(problem, where, f"add {path} to one of them under configs in the card")
    return next(iter(result), ())


def _configs_of(card: Mapping[str, Any], path: str) -> set[str]:
    """Return the configurations that list the file at `path` among their data files."""
    result = set()
    configs = card.get("configs")
    for config in configs if isinstance(configs, list) else []:
        patterns = _patterns(config.get("data_files")) if isinstance(config, Mapping) else []
        if any(fnmatchcase(path, pattern.replace("**/", "*")) for pattern in patterns):
            result.add(str(config.get("config_name", "default")))
    return result


def _patterns(data_files: Any) -> list[str]:
    """Return all patterns in `data_files`, which may be a pattern, a list, or mappings with a `path`."""
    if isinstance(data_files, str):
        return [data_files]
    if isinstance(data_files, Mapping):
        return _patterns(data_files.get("path", list(data_files.values())))
    return [pattern for entry in data_files or [] for pattern in _patterns(entry)]


def _features(features: Any) -> dict[str, Any]:
    """Return a card's list of features in the form of a schema's: the feature of each column by its name."""
    listed = features if isinstance(features, Sequence) and not isinstance(features, str) else []
    return {
        str(feature["name"]): _feature(feature)
        for feature in listed
        if isinstance(feature, Mapping) and "name" in feature
    }


def _feature(feature: Any) -> Any:
    if isinstance(feature, list):
        return _features(feature)
    if not isinstance(feature, Mapping):
        return feature
    for kind in ("sequence", "list", "large_list"):
        if kind in feature:
            return {"_type": "List", "feature": _feature(feature[kind])}
    if "struct" in feature:
        return _features(feature["struct"])
    if "class_label" in feature:
        names = feature["class_label"].get("names", [])
        in_order = [names[key] for key in sorted(names, key=int)] if isinstance(names, Mapping) else names
        return {"_type": "ClassLabel", "names": in_order}
    return _feature(feature["dtype"]) if "dtype" in feature else None
