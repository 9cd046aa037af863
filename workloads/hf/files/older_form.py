"""Make a config.json that transformers 4 reads in the same way as transformers 5.

Version 5 writes the base and the scaling of rotary positions only in `rope_parameters`, and does not state that
T5-like models untie their embeddings. Version 4 silently ignores both: it uses its class's default base, usually
10,000, and for T5 1.1 and mT5 the embedding as the head. So the file holds both forms; version 5 reads its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from workloads.hf.files.weight_files import Weights


class _Names(NamedTuple):
    """Version 4's names for the base, for that of layers with a window, and for the rotated share of a head."""

    base: str = "rope_theta"
    near: str = "rope_local_base_freq"
    share: str = "partial_rotary_factor"


OTHER_NAMES: Mapping[str, _Names] = {
    "gpt_neox": _Names(base="rotary_emb_base", share="rotary_pct"),
    "gpt_neox_japanese": _Names(base="rotary_emb_base", share="rotary_pct"),
    "modernbert": _Names(base="global_rope_theta", near="local_rope_theta"),
    "modernbert-decoder": _Names(base="global_rope_theta", near="local_rope_theta"),
}
"""Classes with other names than most, by model_type."""
SCALING = "rope_scaling"
LONG = ("short_factor", "long_factor")
THREE_FIELDS = ("phi3", "phi4_multimodal")
"""Version 4 classes that accept only a scaling with three fields."""

UNSCALED = ("mt5", "umt5")
"""T5-like classes that never scale the input of their head."""
HEAD = "lm_head.weight"


def write_both_forms(folder: str) -> None:
    """Add the form of transformers 4 to the config.json in `folder`, which transformers 5 wrote beside the weights.

    The file stays unchanged if version 5 would read the two forms together differently, or not at all.
    """
    from transformers import AutoConfig

    path = Path(folder, "config.json")
    before = path.read_text()
    config = json.loads(before)
    added = [_add_positions(config), _add_experts(config), _add_head(config, folder)]
    if not any(added):
        return
    wanted = _plain(
        AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).to_dict()
    )
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    try:
        read_back = _plain(
            AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).to_dict()
        )
    except Exception:  # of any class of transformers, such as Gemma 4, which version 4 does not have
        read_back = {}
    if {name: read_back.get(name) for name in wanted} != wanted:
        path.write_text(before)


def _plain(config: Any) -> Any:
    """Return a configuration without the old name of a scaling's kind, which version 5 keeps in addition to the new
    one."""
    if not isinstance(config, dict):
        return config
    return {name: _plain(value) for name, value in config.items() if name != "type"}


def _add_positions(part: dict[str, Any]) -> bool:
    """Add the fields to a configuration and its nested ones; return whether anything was added."""
    nested = [value for name, value in part.items() if isinstance(value, dict) and name != "rope_parameters"]
    added = [_add_positions(each) for each in nested]
    parameters = part.get("rope_parameters")
    if not isinstance(parameters, dict) or not parameters:
        return any(added)
    kind = str(part.get("model_type"))
    names = OTHER_NAMES.get(kind, _Names())
    layers = {name: value for name, value in parameters.items() if isinstance(value, dict)}
    far = parameters
    if layers:
        far = layers.get("full_attention") or next(iter(layers.values()))
    near = layers.get("sliding_attention")
    part[names.base] = far.get("rope_theta")
    part[SCALING] = _scaling(far, kind)
    if near:
        part[names.near] = near.get("rope_theta")
    if far.get("partial_rotary_factor") is not None:
        part[names.share] = far["partial_rotary_factor"]
    return True


def _add_experts(config: dict[str, Any]) -> bool:
    """Add the number of experts under Qwen 3's old name; return whether anything was added."""
    if config.get("model_type") != "qwen3_moe" or "num_local_experts" not in config:
        return False
    config["num_experts"] = config["num_local_experts"]
    return True


def _add_head(config: dict[str, Any], folder: str) -> bool:
    """State that a T5-like head is not the embedding, if the weights have a separate one without scaling; return
    whether anything was added.

    Version 4 scales the input of a tied head.
    """
    scaled = config.get("scale_decoder_outputs", config.get("model_type") not in UNSCALED)
    if config.get("model_type") not in ("t5", *UNSCALED) or scaled or HEAD not in Weights(folder):
        return False
    config["tie_word_embeddings"] = False
    return True


def _scaling(rope: Mapping[str, Any], kind: str) -> dict[str, Any] | None:
    """Return the scaling in version 4's form; None without one."""
    named = rope.get("rope_type", "default")
    if kind in THREE_FIELDS and all(name in rope for name in LONG):
        return {"type": named, **{name: rope[name] for name in LONG}}
    rest = {
        k: v for k, v in rope.items() if k not in ("rope_theta", "rope_type", "type", "partial_rotary_factor")
    }
    return {"rope_type": named, **rest} if rest or named != "default" else None
