from __future__ import annotations

from orchestrator.data.progress import StageLine


def test_a_line_says_how_fast_a_stage_is_and_how_long_the_rest_takes() -> None:
    told: list[str] = []
    clock = iter([0.0, 0.0, 2.0, 5.0, 5.0, 6.0, 7.0, 7.0])
    line = StageLine(told.append, lambda: next(clock))
    line("tokens", 10, 50, 100_000_000)  # ten were there before
    line("tokens", 20, 50, 100_000_000)
    line("tokenizer", 0, 2)
    line("tokenizer", 1, 2)
    line("tokenizer", 2, 2)
    assert told == [
        "tokens: 10 of 50 parts",
        "tokens: 20 of 50 parts, 10.0 MB/s, 6 s left",
        "tokenizer: 0 of 2 parts",
        "tokenizer: 1 of 2 parts, 1 s left",
        "tokenizer: 2 of 2 parts",
    ]
