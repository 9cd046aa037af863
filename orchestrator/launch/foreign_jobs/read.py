"""The keys of another trainer's configuration, of any of its kinds of files; and which of them were used."""

from __future__ import annotations

import ast
import json
import operator
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from orchestrator.config.errors import InputError
from orchestrator.config.other_names import KEYS

EMPTY: tuple[Any, ...] = (None, "", [], {}, False)
"""Values that ask for nothing."""
VARIABLE = re.compile(r"\$(?:\{(?P<long>\w+)(?::?[-=](?P<usual>[^}]*))?\}|(?P<short>\w+))")
ASSIGNED = re.compile(
    r"^\s*(?:export\s+)?(?P<name>[A-Za-z_]\w*)=(?P<value>\"[^\"]*\"|'[^']*'|\$\(\(.*\)\)|[^\s;]*)\s*(?:#.*)?$"
)
PLACEHOLDER = re.compile(r"<[A-Z_]+_TOKEN>")
"""What transformers writes for a key with a token, in place of its value."""
SUM = re.compile(r"\$\(\((?P<sum>[^$]*?)\)\)")
NUMBER = re.compile(r"-?\d+(\.\d*)?([eE][-+]?\d+)?")


SCRIPT = "script"
"""The key of the name of the program that a command line starts."""
OF_LAUNCHERS = frozenset((
    "nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "local_addr", "rdzv_backend",
    "rdzv_endpoint", "rdzv_id", "rdzv_conf", "max_restarts", "monitor_interval", "start_method", "log_dir",
    "redirects", "tee", "role", "num_processes", "num_machines", "machine_rank", "main_process_ip",
    "main_process_port", "mixed_precision", "dynamo_backend", "config_file", "deepspeed_config_file",
    "zero_stage", "gpu_ids", "num_cpu_threads_per_process", "num_gpus", "num_nodes", "hostfile", "include",
    "exclude", "max_steps",
))  # fmt: skip
"""Options with a single value, most of them of torchrun, accelerate and deepspeed: the script follows them."""
SIGNS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
}  # fmt: skip


class Arguments:
    """Keys of a configuration by their dotted names."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(_flat("", values))
        self._used = set[str]()

    def __contains__(self, name: str) -> bool:
        return any(key == name or key.startswith(f"{name}.") for key in self._values)

    def take(self, *names: str, default: Any = None) -> Any:
        """Return the value of the first of these keys that is there, and count all of them as used."""
        result = [value for name in names if (value := self._take(name)) not in (None, "")]
        return result[0] if result else default

    def number(self, *names: str, default: float | None = None) -> Any:
        """Return the first of these keys that is a number."""
        result = self.take(*names)
        if isinstance(result, str) and NUMBER.fullmatch(result.strip()):
            result = float(result) if re.search(r"[.eE]", result) else int(result)
        return default if isinstance(result, bool) or not isinstance(result, int | float) else result

    def flag(self, *names: str) -> bool:
        """Return whether one of these keys is on."""
        result = [self._take(name) for name in names]
        return any(
            value not in EMPTY and str(value).lower() not in ("false", "none", "null", "0")
            for value in result
        )

    def group(self, name: str) -> Arguments:
        """Return the keys below a name, and count them as used."""
        prefix = f"{name}."
        result = {
            key.removeprefix(prefix): value for key, value in self._values.items() if key.startswith(prefix)
        }
        self._used |= {key for key in self._values if key.startswith(prefix)}
        return Arguments(result)

    def drop(self, *names: str) -> None:
        """Count keys as used whose value says what is the case here anyway. A text may have several, with blanks."""
        for name in " ".join(names).split():
            self._take(name)

    def drop_defaults(self, defaults: Mapping[str, Sequence[Any]]) -> None:
        """Count keys as used whose value is a default: a saved configuration has them though nobody set them."""
        for name, value in self._values.items():
            is_placeholder = isinstance(value, str) and bool(PLACEHOLDER.fullmatch(value))
            if is_placeholder or value in defaults.get(name, ()):
                self._used.add(name)

    def unused(self) -> Iterator[tuple[str, str]]:
        """Yield each key that asks for something and was not used, and what is nearest to it."""
        for key, value in self._values.items():
            if key not in self._used and value not in EMPTY:
                yield key, nearest(key)

    def _take(self, name: str) -> Any:
        if name in self._values:
            self._used.add(name)
        return self._values.get(name)


def nearest(key: str) -> str:
    """Return the key to use here in place of another trainer's key, or the reason why no key does the same."""
    parts = key.removeprefix("+").split(".")
    for name in (key, "_".join(parts[-2:]), parts[-1], *parts[-2::-1]):
        if hint := KEYS.get(name):
            return hint
    from orchestrator.config.described import sections

    keys = {
        f"{section.path}.{option.name}".lstrip("."): option.name
        for section in sections()
        for option in section.keys
    }
    similar = get_close_matches(parts[-1], keys.values(), 1, 0.6)
    nearest_path = next((path for path, name in keys.items() if similar and name == similar[0]), "")
    return (
        f"no such key; the nearest is {nearest_path}"
        if nearest_path
        else "no such key; `orchestrator schema job` shows all"
    )


def read_foreign(path: Path) -> Arguments:
    """Return the keys of a file: YAML, JSON, TOML, or a shell script that starts a trainer. Raises InputError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read ({error})", str(path), "give a configuration file") from None
    if path.suffix == ".py":
        hint = "write the arguments as YAML or JSON, with model_name_or_path and train_file or dataset_name"
        raise InputError("is a Python file, and no code is run to find its arguments", str(path), hint)
    try:
        if path.suffix == ".toml":
            return Arguments(tomllib.loads(text))
        if path.suffix in (".sh", ".txt", ".slurm"):
            return Arguments(_arguments(text))
        result = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise InputError(
            f"cannot be read ({' '.join(str(error).split())[:200]})", str(path), "fix it"
        ) from None
    if not isinstance(result, dict):
        raise InputError(
            "has no keys", str(path), "give the configuration of a trainer, or the script that starts one"
        )
    return Arguments(result)


def _flat(before: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value):
        for name, inner in value.items():
            yield from _flat(f"{before}.{name}".lstrip("."), inner)
    else:
        yield before, value


def _arguments(script: str) -> dict[str, Any]:
    """Return the arguments of the commands in a shell script: `--key value`, `--key=value` and `a.b=value`."""
    variables: dict[str, str] = {}
    result: dict[str, Any] = {}
    joined = re.sub(r"\\\s*\n", " ", script)
    for line in joined.splitlines():
        if assigned := ASSIGNED.match(line):
            variables[assigned["name"]] = _filled(assigned["value"].strip("\"'"), variables)
        elif not line.lstrip().startswith("#"):
            result |= _words(_filled(line, variables))
    return result


def _filled(text: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match["long"] or match["short"]
        return variables.get(name, match["usual"] or "" if match["usual"] is not None else f"${name}")

    for _ in range(4):  # a default may name another variable
        text = VARIABLE.sub(value, text)
    return SUM.sub(lambda match: _computed(match["sum"], variables), text)


def _computed(text: str, variables: Mapping[str, str]) -> str:
    """Return a shell's sum of whole numbers; the text itself if it is another."""
    named = re.sub(r"[A-Za-z_]\w*", lambda match: variables.get(match[0], match[0]), text)
    try:
        return str(_integer(ast.parse(named.strip(), mode="eval").body))
    except (ArithmeticError, SyntaxError, ValueError):
        return text


def _integer(node: ast.expr) -> int:
    """Return the value of a sum of whole numbers. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in SIGNS:
        return SIGNS[type(node.op)](_integer(node.left), _integer(node.right))
    raise ValueError("no sum of whole numbers")


def _words(line: str) -> dict[str, Any]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return {}
    result: dict[str, Any] = {}
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            following = words[number + 1 :] if not equals else []
            key = name.removeprefix("--").replace("-", "_")
            values = list(_until_option(following, 1 if key in OF_LAUNCHERS else None))
            plain: Any = value if equals else values[0] if len(values) == 1 else values or True
            result[key] = _scalar(plain)
        elif word.endswith(".py") or words[number - 1 : number] == ["trl"]:
            result[SCRIPT] = word.rsplit("/", 1)[-1].removesuffix(".py")
        elif equals and "." in name and re.fullmatch(r"\+{0,2}[A-Za-z_][\w.]*", name):
            result[name.lstrip("+")] = _scalar(value)
    return result


def _until_option(words: list[str], max_values: int | None) -> Iterator[str]:
    """Yield an option's values, at most `max_values`.

    They end at the next option, at the script, or at a variable with more options.
    """
    for number, word in enumerate(words[:max_values]):
        if word.startswith("--") or word in ("|", "&&", ";", ">", "2>&1", "$@", "&") or word.endswith(".py"):
            return
        if re.fullmatch(r"-[A-Za-z]", word) or (number and word.startswith("$")):
            return
        yield word


def _scalar(value: Any) -> Any:
    """Return a word of a command line as YAML reads it."""
    if not isinstance(value, str) or "$" in value or re.fullmatch(r"\d+:[\d:]+", value):
        return value  # YAML reads 1:4 as 64
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return value
