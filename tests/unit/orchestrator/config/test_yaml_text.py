"""Numbers mean what they look like, in a job file and in --set."""

import pytest

from orchestrator.config.document import parse_yaml
from orchestrator.config.errors import InputError
from orchestrator.config.overrides import override


@pytest.mark.parametrize("number", ["010", "-007", "1:30", "1:30.5", "00", "0_7", "190:20:30"])
def test_a_number_that_is_two_numbers_is_refused(number: str) -> None:
    with pytest.raises(InputError, match=f"job.yaml:2: is not YAML \\({number} is one number in YAML 1.1"):
        parse_yaml(f"train:\n  steps: {number}\n", "job.yaml")
    with pytest.raises(InputError, match=f"--set train.steps={number}: the value is not YAML"):
        override({}, f"train.steps={number}")


@pytest.mark.parametrize(
    ("written", "read"),
    [
        *(("0", 0), ("10", 10), ("-3", -3), ("0x1F", 31), ("1_000", 1000)),
        *(("0.5", 0.5), ("-0.01", -0.01), (".5", 0.5), ("1.5e+6", 1.5e6)),
        *(("'010'", "010"), ("00:1", "00:1"), ("1e6", "1e6"), ("08x", "08x")),
    ],
)
def test_other_values_are_what_they_look_like(written: str, read: object) -> None:
    found = parse_yaml(f"value: {written}\n", "job.yaml")["value"]
    assert (found, type(found)) == (read, type(read))
    document: dict[str, object] = {}
    override(document, f"value={written}")
    assert document == {"value": read}


@pytest.mark.parametrize("text", ['name: "a\\ud800"', '"\\udc00": 1', '{a: ["\\ud83d"]}'])
def test_half_a_surrogate_pair_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"job.yaml:1: is not YAML \(.* has an unpaired surrogate"):
        parse_yaml(text, "job.yaml")
