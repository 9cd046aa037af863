from __future__ import annotations

from collections.abc import Callable

import numpy as np

from orchestrator.data.samples.inspect import answers_apart, documents_cut, plain, spots
from orchestrator.data.store.tokens import Tokens
from workloads.load import load
from workloads.record_format import MARK, pack
from workloads.workload import Batch, Vocabulary, Windowing

ASKED, GOOD, BAD = [1, 2], [3 | MARK, 4 | MARK], [5 | MARK]


def shown(objective: str, record: list[int], length: int) -> dict[str, str]:
    """A sample of one record as it is printed; tokens are their numbers, 0 pads."""
    workload = load("gpt-tiny", objective, Vocabulary(9, eos=8, pad=0), sequence_length=length)

    class Text:
        def __call__(self, sample: int) -> np.ndarray:
            return np.array(record)

        def companions(self, sample: int) -> range:
            return range(2)

    batch: Batch = workload.objective.collate(Text(), [0], 0)  # type: ignore[arg-type]
    rows = answers_apart(spots(batch, 0, lambda token: f"{token} ", 8), batch)
    return {name: "".join(text for text, _ in plain(row, True)) for name, row in rows.items()}


def test_what_is_predicted_of_a_conversation_is_marked() -> None:
    """Of text that is predicted whole there is nothing to tell; the first of a row never is."""
    assert shown("conversation", [*ASKED, *GOOD, 6, *BAD], 10) == {
        "tokens": "1 2 «3 4 »6 «5 » [4 of padding]"
    }
    assert shown("causal_lm", [1, 2, 8, 3, 4, 5, 6, 7, 1], 8)["tokens"] == "1 2 8  ‖ 3 4 5 6 7 "


def test_both_answers_of_a_pair_are_shown() -> None:
    record = pack([[*ASKED, *GOOD], [*ASKED, *BAD]]).tolist()
    assert shown("dpo", record, 12) == {
        "chosen": "1 2 «3 4 » [2 of padding]",
        "rejected": "1 2 «5 » [3 of padding]",
    }
    judged = pack([[*ASKED, *GOOD], [1]]).tolist()
    assert shown("kto", judged, 12) == {
        "completion": "1 2 «3 4 » [2 of padding]",
        "completion of another row": "1 2 «3 4 » [2 of padding]",
    }


def test_a_document_is_cut_if_what_is_predicted_of_it_is_in_two_samples(
    prepare_here: Callable[..., str],
) -> None:
    words = ["some", "words", "of", "text", "that", "is", "read"]
    texts = [" ".join(words[: n % 7] * (1 + n % 4)) for n in range(70)]
    tokens = Tokens.open(prepare_here(["\n<|endoftext|>\n".join(texts)]))
    stride = 20
    ends = tokens.document_ends(0).tolist()
    cut = short = 0
    for begin, end in zip([0, *ends], ends, strict=False):
        samples = {(token - 1) // stride for token in range(begin + 1, end)}
        cut += len(samples) > 1
        short += len(samples) > 1 and end - begin <= stride + 1
    found = documents_cut(tokens, Windowing("stream", stride + 1, stride), False)
    assert found == {"documents": len(ends), "cut": cut, "cut_though_short": short}
    assert 0 < short < cut
    long = int((np.diff([0, *ends]) > stride + 1).sum())
    packed = documents_cut(tokens, Windowing("stream", stride + 1, stride), True)
    assert packed == {"documents": len(ends), "cut": long, "cut_though_short": 0}
