from collections.abc import Collection

import pytest
import torch

from workloads.adapters.adapter import linear_layers
from workloads.adapters.frozen import matching
from workloads.errors import WorkloadError
from workloads.hf.tables.our_names import in_our_names
from workloads.model.presets import preset
from workloads.transformer_workload import build_model


def names_of(name: str) -> tuple[object, list[str], list[str]]:
    config = preset(name)
    with torch.device("meta"):
        model = build_model(config)
    return config, [each for each, _ in model.named_parameters()], linear_layers(model)


@pytest.mark.parametrize(
    ("model", "pattern", "parameters", "layers"),
    [
        ("gpt-tiny", "transformer.h.0.*", "layers.0.*", "layers.0.*"),
        ("gpt-tiny", "h.1.attn.*", "layers.1.attention.*", "layers.1.attention.*"),
        (
            "gpt-tiny",
            "c_attn",
            *(
                " and ".join(f"layers.*.attention.{part}{leaf}" for part in ("query", "key", "value"))
                for leaf in (".*", "")
            ),
        ),
        ("gpt-tiny", "transformer.wte.weight", "tokens.weight", None),
        ("gpt-tiny", "query", "'*.query.*'", "'*.query'"),
        ("gpt-tiny", "q_proj", "layers.*.attention.query.*", "layers.*.attention.query"),  # of other classes
        ("gpt-tiny", "nothing.like.it", None, None),
        ("llama-tiny", "q_proj", "layers.*.attention.query.*", "layers.*.attention.query"),
        ("llama-tiny", "model.layers.1.*", "layers.1.*", "layers.1.*"),
        ("llama-tiny", "all-linear", "'*'", "'*'"),
        ("bert-tiny", "bert.encoder.layer.0.*", "layers.0.*", "layers.0.*"),
        (
            "t5-tiny",
            "SelfAttention.q",
            *(f"{'encoder'}.layers.*.attention.query{a} and decoder.layers.*.attention.query{a}" for a in (".*", "")),
        ),
    ],
)  # fmt: skip
def test_what_transformers_calls_so_is_told(
    model: str, pattern: str, parameters: str | None, layers: str | None
) -> None:
    config, all_parameters, all_layers = names_of(model)
    given: list[tuple[str | None, Collection[str]]] = [(parameters, all_parameters), (layers, all_layers)]
    for wanted, names in given:
        with pytest.raises(WorkloadError) as told, in_our_names(config):
            matching([pattern], names, "thing")
        hint = str(told.value).split("; ")[1]
        if wanted is None:
            assert hint.startswith("the nearest are ")
        else:
            assert hint == f"write {wanted}"
            assert matching(wanted.replace("'", "").split(" and "), names, "thing")  # and it works
