"""What was measured of the exports of a chain: the rows of its exports.json.

It imports no torch, because `status` and `list` read it.
"""

from __future__ import annotations

from typing import Any

from orchestrator.config.chain import COMPRESS, ChainSpec, CompressSpec
from orchestrator.storage.run_directory import RunDir

EXPORTS = "exports.json"
"""What was measured: {"metric", "held_out", "teacher", "samples", "rows": {name: the row of `measure.to_json` and its
`mark`}}. A name is that of a stage, or the folder of the teacher's export."""


def shares(chain: ChainSpec, root: RunDir) -> dict[str, float]:
    """Return the share of the teacher's metric that each measured stage keeps; empty without `compress`."""
    rows = stored(chain, root).get("rows", {})
    return {name: row["share"] for name, row in rows.items()}


def compared(chain: ChainSpec) -> tuple[str, ...]:
    """Return the names of the compared exports, the teacher first: stages, or the folder of an export for the
    teacher."""
    if chain.compress is None:
        return ()
    return tuple(dict.fromkeys([str(chain.compress.teacher), *(stage.name for stage in chain.exporting)]))


def rows_of(chain: ChainSpec, root: RunDir) -> list[dict[str, Any]]:
    """Return what was measured of each export, the teacher first."""
    rows = stored(chain, root).get("rows", {})
    return [rows[name] for name in compared(chain) if name in rows]


def shortfall(chain: ChainSpec, root: RunDir, name: str) -> str:
    """Return why a stage fails because its export keeps too little of the teacher's metric; empty if it keeps enough,
    or was not measured."""
    share = shares(chain, root).get(name)
    if chain.compress is None or share is None or share >= chain.compress.keep:
        return ""
    metric = stored(chain, root)["metric"]
    kept = f"{100 * share:.1f} % of {chain.compress.teacher}'s {metric}"
    return f"its export keeps {kept}, less than {COMPRESS}.keep of {100 * chain.compress.keep:g} %"


def comparison_context(compress: CompressSpec) -> dict[str, Any]:
    """Return the context of the numbers in exports.json, besides the metric."""
    return {"held_out": compress.held_out, "teacher": compress.teacher, "samples": compress.samples}


def stored(chain: ChainSpec, root: RunDir) -> dict[str, Any]:
    """Return exports.json; empty without one, and where it is about another metric, teacher, or other rows."""
    compress = chain.compress
    result = root.read_json_or_empty(EXPORTS) if compress else {}
    if not compress or any(result.get(key) != value for key, value in comparison_context(compress).items()):
        return {}
    return result if compress.metric in (None, result["metric"]) else {}
