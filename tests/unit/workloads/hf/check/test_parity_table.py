"""Every class gives the logits and the loss of transformers for the same weights."""

import pytest
from thin import every

from workloads.hf.check.parity_table import CASES, TOLERANCE, Case, compare


def objective_of(case: Case) -> str:
    """The objective that trains the head of a case."""
    config = case.config
    heads = {
        "sequence": "sequence_classification",
        "token": "token_classification",
        "span": "span_extraction",
        "discriminator": "replaced_token_detection",
        "masked": "masked_lm",
    }
    language = "seq2seq" if config.architecture == "encoder-decoder" else "causal_lm"
    return heads.get(config.head, language)


OBJECTIVES = {case.title: objective_of(case) for case in CASES}


@pytest.mark.contract
@pytest.mark.proves("loss", objective={"case.title": OBJECTIVES}, family="case.config.family")
@pytest.mark.proves("export", objective={"case.title": OBJECTIVES}, family="case.config.family")
@pytest.mark.parametrize("case", every(5, CASES), ids=lambda case: case.title)
def test_the_class_equals_transformers(case: Case) -> None:
    found = compare(case)
    assert found.logits < TOLERANCE
    assert found.loss < TOLERANCE
