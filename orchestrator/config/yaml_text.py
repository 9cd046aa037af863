"""Read YAML strictly: refuse what different readers understand differently."""

from __future__ import annotations

import re
from typing import Any

import yaml

_UNCLEAR = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
"""Numbers that YAML 1.1 reads as octal or as base 60, and YAML 1.2 does not."""


_HALF = re.compile("[\ud800-\udfff]")


class _Loader(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys in a mapping, numbers that YAML 1.1 and 1.2 read differently, and an
    unpaired surrogate, which no file can hold. `on` is a key, not true.
    """

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        """See `yaml.SafeLoader`."""
        node = super().compose_scalar_node(anchor)
        if _HALF.search(node.value):
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"{node.value!a} has an unpaired surrogate, which is not a character",
                node.start_mark,
            )
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """See `yaml.SafeLoader`. Merged keys are not in the node yet."""
        node = super().compose_mapping_node(anchor)
        earlier_keys = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in earlier_keys and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key '{key.value}' appears twice; remove one", key.start_mark
                )
            earlier_keys.add(key.value)
            if key.tag == "tag:yaml.org,2002:bool":
                key.tag = "tag:yaml.org,2002:str"
        return node

    def number(self, node: yaml.ScalarNode) -> int | float:
        """Return the number of an unquoted node."""
        if _UNCLEAR.fullmatch(node.value):
            raise yaml.constructor.ConstructorError(
                None,
                None,
                f"{node.value} is one number in YAML 1.1 and another, or text, in 1.2; "
                "write it without a leading 0 or colons, or as text in quotes",
                node.start_mark,
            )
        read = self.construct_yaml_int if node.tag.endswith(":int") else self.construct_yaml_float
        try:
            return read(node)
        except ValueError:  # Python's own limit
            raise yaml.constructor.ConstructorError(
                None, None, "a number has thousands of digits", node.start_mark
            ) from None


for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.number)


def read_yaml(text: str) -> Any:
    """Return the value of the text. Raises yaml.YAMLError, ValueError for an impossible date, and RecursionError."""
    return _Loader(text).get_single_data()


def yaml_problem(error: Exception) -> str:
    """Return what is wrong with an invalid YAML text, without details of the parser and of Python."""
    if isinstance(error, yaml.reader.ReaderError):
        return f"it has the character {error.character:#04x}, which no text has"
    return str(getattr(error, "problem", None) or error)
