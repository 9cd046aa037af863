"""The price of `determinism: bitwise`: a step beside one of `rerun`, in turns in one run, with one thread each.

    python tests/bench/bench_determinism.py

Both have the micro-batch of the virtual shards. The script prints the median ratio of the slowest rank's step, and the
quartiles.
"""

from __future__ import annotations

import argparse
from statistics import quantiles
from typing import Any

import paths  # noqa: F401
from harness import MODELS, finished
from lasting_gang import lasting_gang

from orchestrator.parallel.layout import Layout

BITWISE = {"determinism": "bitwise", "virtual_shards": 4}


def main() -> None:
    """Measure dense and with experts, on one and on two ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--hidden", type=int, default=128)
    options = parser.parse_args()
    print("| model | ranks | bitwise over rerun, median | quartiles |\n|---|---|---|---|")
    for model in ("decoder", "moe"):
        sizes = {"hidden": options.hidden, "intermediate": 4 * options.hidden}
        changes: dict[str, Any] = {**MODELS[model]["changes"], **sizes}
        if model == "moe":
            changes["moe"] = {**changes["moe"], "intermediate": 2 * options.hidden}
        for ranks in (1, 2):
            layout = Layout(dp=ranks, micro_batch=2)
            config = {**MODELS[model], "changes": changes, "layout": layout.to_json(), "turns": options.turns}
            config["trains"] = [{}, BITWISE]
            by_rank = finished(ranks, config, "determinism_rank:main", lasting_gang())
            slowest = [[max(each) for each in zip(*turn, strict=True)] for turn in zip(*by_rank, strict=True)]
            ratios = [bitwise / rerun for rerun, bitwise in slowest[4:]]
            low, middle, high = quantiles(ratios, n=4)
            print(f"| {model} | {ranks} | {middle:.2f} | {low:.2f} to {high:.2f} |", flush=True)


if __name__ == "__main__":
    main()
