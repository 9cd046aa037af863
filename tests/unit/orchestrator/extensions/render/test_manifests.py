"""What a rendered file says to readers of YAML."""

import pytest
import yaml

from orchestrator.extensions.render.manifests import yaml_of


@pytest.mark.parametrize(
    "text", ["n", "Y", "1e6", "0x1f", "1:30", "-", "~", ".5", "1_000", "yes", "null", "0b1", "12e3"]
)
def test_text_is_quoted_that_some_reader_takes_for_something_else(text: str) -> None:
    """kubectl's reader takes n for no and 1e6 for a number, Python's does not."""
    written = yaml_of({"key": text})
    assert written == f"key: '{text}'\n"
    assert yaml.safe_load(written) == {"key": text}


def test_other_text_and_numbers_are_plain_and_parts_are_written_where_they_are_used() -> None:
    part = {"memory": 1, "on": "500m"}
    assert yaml_of({"a": part, "b": part}) == "a:\n  memory: 1\n  'on': 500m\nb:\n  memory: 1\n  'on': 500m\n"
