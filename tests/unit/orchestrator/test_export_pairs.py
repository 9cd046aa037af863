"""Every preset with every objective that trains it: some steps, an export, and transformers computes the same of it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
import transformers
from jobs import job
from prepared import prepare_here
from thin import every

from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec, parse
from orchestrator.data.store.tokens import Tokens
from orchestrator.export import hugging_face as export
from orchestrator.launch.job_checks import check_workload
from orchestrator.resolve.resolved_job import resolve
from orchestrator.resolve.training_inputs import training_inputs, workload_of
from workloads import objectives
from workloads.describe import SENTENCES, describe
from workloads.hf.check.compare import TOLERANCE
from workloads.model.presets import PRESETS

STEPS = 3
SMALL = {"hidden": 32, "heads": 4, "layers": 2}
MORE = {"albert": {"embedding_size": 16}, "electra": {"embedding_size": 16, "generator": 16}}
NEEDS = {"replaced_token_detection": "electra-tiny", "blank_infilling": "glm-tiny"}
PAIRS = [
    (model, objective)
    for model in PRESETS
    for objective in objectives.OF_TEXT
    if model.endswith("-tiny")
    and describe(model).architecture in objectives.architectures(objective)
    and NEEDS.get(objective, model) == model
]
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "masked_lm": [{}, {"static": True}],
    "entity_masking": [{"entities": [[number] for number in range(300, 512)]}],
}
UNKNOWN = [
    (m, o) for m, o in PAIRS if m == "glm-tiny" or (m in ("roberta-tiny", "electra-tiny") and o in SENTENCES)
]
"""Pairs for which transformers has no class."""
CASES = [(m, o, options) for m, o in PAIRS for options in OPTIONS.get(o, [{}]) if (m, o) not in UNKNOWN]


def spec_of(model: str, objective: str, text: Path, options: dict[str, Any]) -> JobSpec:
    changes = SMALL | MORE.get(describe(model).family, {})
    document = job(str(text))
    document["workload"] = {"model": model, "objective": objective, "options": options, "changes": changes}
    if model == "gpt-tiny":
        document["workload"]["dropout"] = 0.1
    document["data"]["sequence_length"] = 48
    if objective == "translation_lm":
        document["data"]["sources"] = [{"uri": str(text), "field": ["name", "words"]}]
    document["checkpoint"]["export"] = "hf"
    return parse(document)


@pytest.fixture(scope="module")
def tokens_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Text and prepared data for an objective, made once for all that read the same."""
    folder = tmp_path_factory.mktemp("corpus")

    @cache
    def prepared(text: Path, special: tuple[str, ...], objective: str) -> Tokens:
        return Tokens.open(prepare_here(spec_of("gpt-tiny", objective, text, {}), str(folder / "cache")))

    def of(objective: str) -> tuple[Path, Tokens]:
        text = folder / ("pairs.jsonl" if objective == "translation_lm" else "prose.txt")
        if not text.exists():
            pairs = [
                json.dumps({"name": key, "words": " ".join(topics[key].split()[:12])})
                for key in sorted(topics)
            ]
            prose = "\n<|endoftext|>\n".join(topics[key] for key in sorted(topics))[:60_000]
            text.write_text("\n".join(pairs) if objective == "translation_lm" else prose)
        special = objectives.special_tokens(objective)
        same = {"translation_lm": "translation_lm"}.get(
            objective, "span_corruption" if special else "causal_lm"
        )
        return text, prepared(text, special, objective if len(special) not in (0, 100) else same)

    return of


@pytest.mark.parametrize(("model", "objective", "options"), every(5, CASES, unpack=True))
def test_what_was_trained_leaves_as_it_computes(
    model: str, objective: str, options: dict[str, Any], tokens_of: Any, tmp_path: Path
) -> None:
    text, tokens = tokens_of(objective)
    spec = spec_of(model, objective, text, options)
    workload = workload_of(spec.workload, spec.data, spec.train, spec.seed, tokens)
    net = workload.build().eval()  # without the masks of dropout, whose keys the trainer makes
    net.load_state_dict({name: workload.initial(name, 3) for name in workload.shapes})
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    batches = training_inputs(spec, tokens).batches
    for step in range(STEPS):
        loss = workload.loss(net, batches.batch(4 * step, 4)[0])
        mean = loss.total / loss.count + (0.0 if loss.extra is None else loss.extra)
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
    state = net.state_dict()
    apart = export.write(
        tokens,
        workload,
        lambda name: state[name].detach(),
        str(tmp_path),
        spec=spec.workload,
        data=spec.data,
        seed=spec.seed,
        own_code=spec.own_code,
    )
    assert apart <= TOLERANCE
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    begins, ends = (
        [tokens.manifest.roles[role]] if role else []
        for role in (workload.objective.begins, workload.objective.ends)
    )
    plain = tokens.tokenizer().encode("two words", add_special_tokens=False).ids
    assert tokenizer("two words")["input_ids"] == [*begins, *plain, *ends]
    assert tokenizer.model_max_length >= 512
    loaded = getattr(transformers, json.loads((tmp_path / "config.json").read_text())["architectures"][0])
    asked = tokenizer(["two words", "and some more of them"], padding=True, return_tensors="pt")
    if workload.config.architecture == "encoder-decoder":
        asked["decoder_input_ids"] = asked["input_ids"]
    with torch.no_grad():
        loaded.from_pretrained(tmp_path).eval()(**asked)


THEIRS = {
    "causal_lm": transformers.GPTNeoXConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=512
    ),
    "masked_lm": transformers.CamembertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=512,
    ),
    "denoising": transformers.PegasusConfig(
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=512,
    ),
}  # fmt: skip


@pytest.mark.parametrize("objective", THEIRS)
def test_a_class_that_runs_as_it_is_leaves_too(objective: str, tokens_of: Any, tmp_path: Path) -> None:
    THEIRS[objective].save_pretrained(tmp_path / "in")
    text, tokens = tokens_of(objective)
    document = spec_of("gpt-tiny", "causal_lm", text, {}).model_dump(mode="json")
    document["workload"] = {
        "model": f"hf:{tmp_path / 'in'}",
        "objective": objective,
        "implementation": "transformers",
    }
    spec = parse(document)
    workload = workload_of(spec.workload, spec.data, spec.train, spec.seed, tokens)
    state = {name: workload.initial(name, 3) for name in workload.shapes}
    assert (
        export.write(
            tokens,
            workload,
            state.__getitem__,
            str(tmp_path / "out"),
            spec=spec.workload,
            data=spec.data,
            seed=spec.seed,
            own_code=spec.own_code,
        )
        <= TOLERANCE
    )
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length >= 512


@pytest.mark.parametrize(
    ("model", "objective", "changes", "says"),
    [
        *((model, objective, {}, "set checkpoint.export to null") for model, objective in UNKNOWN),
        ("gpt-tiny", "causal_lm", {"norm": "rms"}, "set norm to 'layer' or checkpoint.export to null"),
        ("gpt-tiny", "causal_lm", {"positions": "sinusoidal"}, "set positions to 'learned' or checkpoint.export to"),
        ("llama-tiny", "causal_lm", {"window": 8}, "set window to 0 or checkpoint.export to null"),
        ("bart-tiny", "mass", {"norm_eps": 1e-6}, "set norm_eps to 1e-05 or checkpoint.export to null"),
        ("mixtral-tiny", "causal_lm", {"moe": {"capacity_factor": 1.5}},
         "cannot have moe.capacity_factor 1.5; set moe.capacity_factor to null or checkpoint.export to null"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_leave_does_not_begin(
    model: str, objective: str, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    document = spec_of(model, objective, tmp_path / "unread.txt", {}).model_dump(mode="json")
    document["workload"]["changes"].update(changes)
    with pytest.raises(InputError, match=r"checkpoint\.export") as told:
        check_workload(resolve(parse(document)))
    assert says in str(told.value)
    assert "\n" not in str(told.value)
    document["checkpoint"]["export"] = None
    check_workload(resolve(parse(document)))
