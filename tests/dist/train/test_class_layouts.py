"""Classes of transformers that have no table here, divided: tensors by transformers' own plan, layers at their list."""

from pathlib import Path
from typing import Any

import pytest
from harness import Results, check_equal

from cluster.workers.process_gang import ProcessGang

SIZES = {"vocab_size": 160, "max_position_embeddings": 64, "num_hidden_layers": 4, "hidden_size": 32}
LORA = {"kind": "lora", "rank": 2, "alpha": 8, "targets": ["*_proj"]}
QUICK: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("neox", 2, {"pp": 2, "schedule": "zbv"}, {}),
    ("ministral", 4, {"tp": 2, "dp": 2, "zero": 3}, {}),
    ("ministral", 2, {"tp": 2}, {"adapter": LORA}),
    ("olmoe", 2, {"tp": 2}, {"optimizer": {"name": "muon"}}),
]
MORE: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("neox", 2, {"tp": 2}, {}),
    ("ministral", 2, {"tp": 2, "recompute": "full"}, {}),
    ("olmoe", 2, {"tp": 2}, {}),
    ("olmoe", 2, {"dp": 2, "zero": 1}, {"optimizer": {"name": "lamb"}}),
    ("deepseek", 2, {"tp": 2}, {}),
    ("ministral", 2, {"pp": 2, "schedule": "1f1b"}, {}),
    ("glm", 2, {"tp": 2}, {}),
    *(("neox", 2, {"pp": 2, "schedule": s}, {}) for s in ("gpipe", "1f1b", "interleaved", "zero_bubble")),
    ("neox", 4, {"pp": 4}, {}),
    ("neox", 4, {"tp": 2, "pp": 2}, {}),
    ("neox", 4, {"pp": 2, "dp": 2, "zero": 1}, {}),
    ("ministral", 4, {"pp": 2, "dp": 2, "zero": 3}, {}),
    ("ministral", 4, {"pp": 2, "tp": 2, "schedule": "zero_bubble", "recompute": "full"}, {}),
    ("modernbert", 2, {"pp": 2, "schedule": "zbv"}, {"objective": "masked_lm"}),
    ("ministral", 2, {"tp": 2}, {"train": {"compile": True}}),
    ("ministral", 2, {"pp": 2}, {"train": {"compile": True}}),
    ("ministral", 2, {"pp": 2, "schedule": "zbv"}, {"adapter": LORA}),
    ("ministral", 4, {"tp": 2, "pp": 2}, {"adapter": LORA}),
    ("ministral", 4, {"tp": 2, "dp": 2, "zero": 3}, {"adapter": LORA | {"kind": "dora"}}),
    ("neox", 2, {"tp": 2}, {"adapter": LORA | {"targets": ["*.dense*"]}}),
    ("sinks", 2, {"tp": 2}, {}),
    ("olmoe", 4, {"tp": 4}, {}),
    ("olmoe", 4, {"tp": 2, "dp": 2, "zero": 3}, {"optimizer": {"name": "muon"}}),
    ("olmoe", 4, {"tp": 2, "dp": 2, "zero": 3}, {"optimizer": {"name": "lamb"}}),
    ("olmoe", 2, {"dp": 2, "zero": 2}, {"optimizer": {"name": "lars", "lr": 1.0}}),
    ("olmoe", 2, {"tp": 2, "recompute": "full"}, {}),
    ("olmoe", 4, {"tp": 2, "dp": 2, "zero": 1}, {}),
    ("olmoe", 4, {"tp": 2, "dp": 2, "zero": 3}, {}),
    ("olmoe", 2, {"tp": 2}, {"train": {"compile": True}}),
    ("olmoe", 2, {"tp": 2}, {"adapter": LORA}),
    ("deepseek", 2, {"pp": 2, "schedule": "1f1b"}, {}),
    ("deepseek", 2, {"pp": 2, "schedule": "zbv"}, {}),
    ("deepseek", 4, {"tp": 2, "pp": 2}, {}),
    ("deepseek", 4, {"tp": 2, "dp": 2, "zero": 3}, {}),
    (
        "deepseek",
        2,
        {"tp": 2},
        {"adapter": LORA | {"targets": ["*_proj", "*kv_a_proj_with_mqa", "*_b_proj"]}},
    ),
    ("glm", 4, {"tp": 2, "dp": 2, "zero": 2}, {}),
    ("glm", 2, {"tp": 2}, {"train": {"compile": True}}),
    ("glm", 2, {"tp": 2}, {"adapter": LORA}),
    ("glm", 2, {"tp": 2}, {"adapter": LORA | {"kind": "dora"}}),
]


def write(name: str, folder: Path) -> str:
    """A small configuration; its weights are the class's own."""
    import transformers

    kind, more = {
        "neox": ("GPTNeoX", {"num_attention_heads": 4, "intermediate_size": 64, "tie_word_embeddings": True}),
        "ministral": (
            "Ministral",
            {
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "intermediate_size": 64,
                "sliding_window": 6,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
        ),
        "glm": (
            "Glm",
            {
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "intermediate_size": 64,
                "pad_token_id": 1,
            },
        ),
        "olmoe": (
            "Olmoe",
            {"num_attention_heads": 4, "intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2},
        ),
        "deepseek": (
            "DeepseekV2",
            {
                "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64, "first_k_dense_replace": 1,
                "moe_intermediate_size": 16, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
                "topk_method": "greedy", "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 8, "v_head_dim": 8,
            },
        ),
        "sinks": (
            "GraniteSWA",
            {
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 64,
                "sliding_window": 6,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
        ),
        "modernbert": (
            "ModernBert",
            {"num_attention_heads": 4, "intermediate_size": 64, "local_attention": 8, "pad_token_id": 1},
        ),
    }[name]  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**SIZES, **more)
    config.architectures = [f"{kind}For{'MaskedLM' if kind == 'ModernBert' else 'CausalLM'}"]
    config.save_pretrained(folder)
    return str(folder)


def case_of(name: str, layout: dict[str, Any], fields: dict[str, Any], folder: str = "") -> dict[str, Any]:
    given = {"model": f"hf:{folder}", "changes": {}, "steps": 3, "layout": {"micro_batch": 2, **layout}}
    return {**given, **fields, "id": f"{name} {layout} {fields}"}


def alone_of(name: str, fields: dict[str, Any], folder: str = "") -> dict[str, Any]:
    return case_of(name, {}, {n: v for n, v in fields.items() if n != "train"}, folder)


def trained(
    folder: Path, gang: ProcessGang, cases: list[tuple[str, int, dict[str, Any], dict[str, Any]]]
) -> Results:
    found = Results(folder, gang)
    folders = {name: write(name, folder / name) for name, *_ in cases}
    alone = [alone_of(name, fields, folders[name]) for name, _, _, fields in cases]
    found.run(1, list({case["id"]: case for case in alone}.values()))
    for world in (2, 4):
        found.run(world, [case_of(n, lay, fields, folders[n]) for n, w, lay, fields in cases if w == world])
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, gang: ProcessGang) -> Results:
    return trained(tmp_path_factory.mktemp("classes"), gang, QUICK)


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory, gang: ProcessGang) -> Results:
    return trained(tmp_path_factory.mktemp("more"), gang, MORE)


def check_trained(results: Results, name: str, layout: dict[str, Any], fields: dict[str, Any]) -> None:
    """As one process, and of an adapter nothing but its own tensors."""
    found = results.of(case_of(name, layout, fields))
    check_equal(found, results.of(alone_of(name, fields)))
    names = [key for key in found["state"] if key.startswith("model.")]
    assert names
    assert "adapter" not in fields or all("lora_" in key or "magnitude" in key for key in names)


@pytest.mark.parametrize(("name", "world", "layout", "fields"), QUICK, ids=str)
def test_a_divided_class_trains_as_one_process_does(
    results: Results, name: str, world: int, layout: dict[str, Any], fields: dict[str, Any]
) -> None:
    check_trained(results, name, layout, fields)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world", "layout", "fields"), MORE, ids=str)
def test_so_it_does_under_further_layouts(
    more: Results, name: str, world: int, layout: dict[str, Any], fields: dict[str, Any]
) -> None:
    check_trained(more, name, layout, fields)
