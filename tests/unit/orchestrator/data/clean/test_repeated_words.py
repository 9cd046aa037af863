from __future__ import annotations

import random

from cleaning_texts import PROSE
from datatrove.data import Document
from datatrove.pipeline.filters.gopher_repetition_filter import GopherRepetitionFilter

from orchestrator.data.clean.config import GopherRepetition
from orchestrator.data.clean.datatrove_rules import _words, repeated_words

OFF = dict.fromkeys(("dup_line_frac", "dup_para_frac", "dup_line_char_frac", "dup_para_char_frac"))


def test_repeated_words_are_counted_as_by_theirs_on_random_texts() -> None:
    draw = random.Random(3)
    decided = set()
    for _ in range(200):
        text = " ".join(
            draw.choice(PROSE.split()[: draw.randint(2, 40)]) for _ in range(draw.randint(1, 120))
        )
        for length in range(2, 11):
            share = draw.uniform(0.02, 0.4)
            for top in (True, False):
                one, none = [(length, share)], []
                ours = repeated_words(
                    text, GopherRepetition(top=one if top else none, repeated=none if top else one)
                )
                theirs = GopherRepetitionFilter(
                    top_n_grams=one if top else none,
                    dup_n_grams=none if top else one,
                    language=_words(),
                    **OFF,
                ).filter(Document(text=text, id=""))
                assert (ours == "") == (theirs is True), (length, share, top, text)
                decided.add((top, ours == ""))
    assert len(decided) == 4


def test_a_table_of_numbers_in_which_nothing_repeats_is_kept() -> None:
    """datatrove joins the words of an n-gram, so rows of the same digits are equal to it wherever they are divided."""
    draw = random.Random(5)
    rows = []
    for _ in range(20):
        ends = sorted(draw.sample(range(1, 10), 4))
        rows.append(" ".join("1234567890"[a:b] for a, b in zip([0, *ends], [*ends, 10], strict=True)))
    text = "\n".join(dict.fromkeys(rows))
    assert GopherRepetitionFilter(language=_words()).filter(Document(text=text, id="")) == (
        False,
        "duplicated_5_n_grams",
    )
    assert repeated_words(text, GopherRepetition()) == ""


def test_a_share_of_0_disables_a_rule() -> None:
    text = "again and again " * 30
    assert repeated_words(text, GopherRepetition())
    assert repeated_words(text, GopherRepetition(top=[(2, 0.0)], repeated=[(5, 0.0)])) == ""
