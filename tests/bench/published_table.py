"""Writes the tables of published steps into docs/predictions.md: `make published-table`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import paths  # noqa: F401
from fsdp_steps import FITTED, HELD_OUT
from megatron_steps import BLIND, MEGATRON_FITTED
from nvidia_steps import NVIDIA_FITTED, NVIDIA_HELD_OUT
from published_steps import ROWS, Published

from orchestrator.planner.device_profile import load

PAGE = Path(__file__).parents[2] / "docs" / "predictions.md"
HEAD = ("model", "source", "profile", "layout", "GPUs", "published, s", "predicted, s", "error", "assumed")
MEANS = ("source", "profile", "rows", "mean", "p95", "worst", "bias")


def error(row: Published) -> float:
    """How far the prediction is off, as a share of what was published."""
    return row.seconds_on(load(row.machine).machine("bf16")) / row.seconds - 1.0


def table(rows: Sequence[Published]) -> str:
    """A row each."""
    lines = [_line(HEAD), _line(["---"] * len(HEAD))]
    for row in rows:
        said = row.seconds * (1.0 + error(row))
        cells = (row.name, row.source, f"`{row.machine}`", str(row.layout), str(row.layout.world))
        lines.append(
            _line(
                [*cells, f"{row.seconds:.2f}", f"{said:.2f}", _percent(said / row.seconds - 1), row.assumed]
            )
        )
    return "\n".join(lines)


def means(rows: Sequence[Published]) -> str:
    """A line for each source and profile; LLM-foundry's long sequences, which ran an older kernel, apart."""
    lines = [_line(MEANS), _line(["---"] * len(MEANS))]
    keys = [(row.source + (", longer" if _is_old(row) else ""), row.machine) for row in rows]
    for key in dict.fromkeys(keys):
        off = np.array([error(row) for row, of in zip(rows, keys, strict=True) if of == key])
        far = np.abs(off)
        shares = (
            f"{far.mean():.1%}",
            f"{np.quantile(far, 0.95):.1%}",
            f"{far.max():.1%}",
            f"{off.mean():+.1%}",
        )
        lines.append(
            _line([key[0], f"`{key[1]}`", str(len(off)), *(each.replace("%", " %") for each in shares)])
        )
    return "\n".join(lines)


def _is_old(row: Published) -> bool:
    return row.source.startswith("LLM-foundry") and row.shape.sequence_length > 4096


def written(text: str) -> str:
    """The page with its tables made anew."""
    fitted = [*ROWS, *FITTED, *MEGATRON_FITTED, *NVIDIA_FITTED]
    held = [*HELD_OUT, *BLIND, *NVIDIA_HELD_OUT]
    parts = {"fitted": table(fitted), "means": means(held), "held out": table(held)}
    for name, part in parts.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(begin, 1)
        text = f"{before}{begin}{part}\n{end}{rest.split(end, 1)[1]}"
    return text


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _percent(share: float) -> str:
    return f"{share:+.1%}".replace("%", " %")


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
