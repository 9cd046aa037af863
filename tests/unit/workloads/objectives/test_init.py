from __future__ import annotations

from dataclasses import replace
from importlib.metadata import entry_points

import pytest

import workloads.objectives as objectives
from workloads.errors import WorkloadError
from workloads.objectives import NAMES, OF_MODELS, OF_TEXT, OTHER_NAMES, architectures, build, special_tokens


def test_the_page_lists_every_objective_with_its_architectures():
    for name in NAMES:
        line = next(row for row in (objectives.__doc__ or "").splitlines() if row.startswith(name + " "))
        assert line.endswith("  " + ", ".join(sorted(architectures(name))))


def test_architectures_are_those_of_the_models():
    assert all(architectures(name) <= {"decoder", "encoder", "encoder-decoder", "prefix"} for name in NAMES)
    assert all(architectures(name) for name in NAMES)


def test_special_tokens_are_the_sentinels_in_order():
    assert special_tokens("causal_lm") == ()
    assert special_tokens("blank_infilling") == ("<extra_id_0>", "<extra_id_1>")
    assert special_tokens("span_corruption") == tuple(f"<extra_id_{i}>" for i in range(100))


@pytest.mark.parametrize("name", OF_TEXT)
def test_the_standard_and_the_special_tokens_suffice(name, vocabulary, make):
    enough = replace(vocabulary, sentinels=vocabulary.sentinels[: len(special_tokens(name))])
    options = {"entities": [[120, 121]]} if name == "entity_masking" else {}
    assert build(name, vocabulary=enough, sequence_length=64, seed=0, **options).name == name


def test_an_unknown_name_lists_the_known_ones(vocabulary):
    with pytest.raises(WorkloadError, match="masked_lm, whole_word_masking"):
        build("nothing", vocabulary=vocabulary, sequence_length=64, seed=0)
    with pytest.raises(WorkloadError, match="there is no objective"):
        special_tokens("masked")


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("casual_lm", "did you mean causal_lm?"),
        ("MLM", "did you mean masked_lm?"),
        ("sft", "did you mean conversation?"),
        ("ppo", "grpo and reinforce learn from answers that the model generates"),
        ("RLOO", "did you mean reinforce?"),
        ("contrastive", "the model has its own: set workload.model to ext:clip"),
        ("nothing like it", "there is no objective 'nothing like it'; choose"),
    ],
)
def test_what_an_unknown_name_means_is_guessed(asked, told):
    with pytest.raises(WorkloadError) as found:
        special_tokens(asked)
    assert told in str(found.value)


def test_what_objectives_are_called_elsewhere_is_known_here():
    assert set(OTHER_NAMES.values()) <= set(NAMES)
    offered = {f"ext:{point.name}" for point in entry_points(group="training_orchestrator.models")}
    assert {*OF_MODELS.values()} <= offered


def test_an_unknown_option_lists_the_known_ones(make):
    with pytest.raises(WorkloadError, match="masked_lm has no option ratio; it has rate, static"):
        make("masked_lm", ratio=0.2)
    with pytest.raises(WorkloadError, match="no option"):
        make("masked_lm", vocab=1)


@pytest.mark.parametrize(
    ("name", "option", "hint"),
    [
        ("masked_lm", {"rate": 0.0}, "between 0 and 1"),
        ("masked_lm", {"rate": 1}, "between 0 and 1"),
        ("masked_lm", {"rate": "15%"}, "of type float"),
        ("masked_lm", {"static": 1}, "of type bool"),
        ("span_masking", {"longest": 0}, "at least 1"),
        ("span_masking", {"longest": 2.5}, "of type int"),
        ("permuted_lm", {"k": 1}, "at least 2"),
        ("causal_lm", {"documents": "split"}, "one of pack, isolate"),
        ("gap_sentences", {"choose": "best"}, "one of principal, random, lead"),
        ("span_corruption", {"rate": 0.9, "mean_span": 1.0}, "lower it"),
        ("entity_masking", {"entities": []}, "list the token ids"),
        ("entity_masking", {"entities": [[120], []]}, "list the token ids"),
        ("entity_masking", {"entities": [[120, 0]]}, "without special tokens"),
        ("entity_masking", {"entities": [[120, 99999]]}, "beyond the vocabulary"),
    ],
)
def test_an_option_out_of_range_is_refused_with_the_mend(name, option, hint, make):
    with pytest.raises(WorkloadError, match=hint):
        make(name, **option)


def test_a_sequence_too_short_is_refused(make):
    with pytest.raises(WorkloadError, match="at least 8"):
        make("causal_lm", 7)


@pytest.mark.parametrize("name", [n for n in OF_TEXT if n != "causal_lm"])
def test_a_vocabulary_that_lacks_tokens_is_refused_with_their_names(name, vocabulary):
    bare = type(vocabulary)(size=vocabulary.size, eos=vocabulary.eos)
    with pytest.raises(WorkloadError, match=r"needs the special tokens <.*train_bpe"):
        build(name, vocabulary=bare, sequence_length=64, seed=0)


def test_missing_sentinels_are_named(vocabulary):
    few = replace(vocabulary, sentinels=vocabulary.sentinels[:97])
    with pytest.raises(WorkloadError, match="<extra_id_97>, <extra_id_98>, <extra_id_99>, which"):
        build("span_corruption", vocabulary=few, sequence_length=64, seed=0)


def test_missing_tables_are_named(vocabulary):
    without = replace(vocabulary, word_start=None, sentence_end=None)
    with pytest.raises(WorkloadError, match="table"):
        build("whole_word_masking", vocabulary=without, sequence_length=64, seed=0)
    short = replace(vocabulary, sentence_end=vocabulary.sentence_end[:-1])
    with pytest.raises(WorkloadError, match="one entry a token"):
        build("denoising", vocabulary=short, sequence_length=64, seed=0)
