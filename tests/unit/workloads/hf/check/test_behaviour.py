"""Hugging Face classes that run as they are: which are accepted, what they compute, what leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils.checkpoint import checkpoint

from workloads.errors import WorkloadError
from workloads.hf.as_they_are import network as hf_network
from workloads.hf.as_they_are.hf_class import HuggingFaceModel, describe_hf_class
from workloads.hf.as_they_are.workload import HuggingFaceWorkload
from workloads.hf.check import class_table as class_table
from workloads.hf.check.behaviour import check_behaviour, trained_model
from workloads.load import load
from workloads.model.masks import attends
from workloads.objectives.samples import Samples
from workloads.workload import Batch, Vocabulary

PACKED, ISOLATED = class_table.CHECKS["decoder"]
MASKED, PERMUTED = class_table.CHECKS["encoder"]
(DENOISED,) = class_table.CHECKS["encoder-decoder"]
ACCEPTED = {
    # Eager attention, which adds whatever mask it is given.
    "gemma2": ISOLATED, "gptj": ISOLATED, "codegen": ISOLATED, "gpt_neo": ISOLATED, "gpt_oss": PACKED,
    "mpnet": PERMUTED,
    # Windows, in all layers or in some.
    "mistral": ISOLATED, "phi3": ISOLATED, "gemma3_text": ISOLATED, "modernbert": MASKED,
    # Routers.
    "qwen3_moe": ISOLATED, "olmoe": ISOLATED,
    # State spaces, attention without soft-max, relative positions.
    "mamba": PACKED, "bloom": PACKED, "deberta-v2": MASKED,
    # Two networks, and a class in two mappings.
    "pegasus": DENOISED, "fsmt": DENOISED, "camembert": PACKED, "xlm": MASKED,
}  # fmt: skip
REFUSED = {
    "gpt_oss": (ISOLATED, "must not see"),
    "mamba": (ISOLATED, "must not see|fails"),
    "bloom": (ISOLATED, "must not see"),
    "modernbert": (PERMUTED, "replaces the attention windows of the class"),
    "deberta-v2": (PERMUTED, "fails"),
    "xlnet": (PACKED, "must not see|fails"),
    "prophetnet": (DENOISED, "must not see"),
    "nllb-moe": (DENOISED, "balances its routers"),
}
QUICK = {
    "gptj", "gpt_oss", "mpnet", "mistral", "modernbert", "olmoe", "mamba", "bloom", "pegasus", "camembert",
    "xlnet", "nllb-moe",
}  # fmt: skip
VOCABULARY = Vocabulary(97, eos=4, pad=1, bos=2, cls=3, sep=5, mask=6, sentence_end=np.ones(97, bool))


def architecture(trial: class_table.ClassCheck) -> str:
    return next(name for name, trials in class_table.CHECKS.items() if trial in trials)


def some_slow(model_types: Iterable[str]) -> list[Any]:
    """For parametrize: those that are not quick are slow."""
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in model_types]


@pytest.mark.parametrize("model_type", some_slow(ACCEPTED))
def test_what_is_accepted_holds_to_its_masks_and_leaves(model_type: str) -> None:
    trial = ACCEPTED[model_type]
    assert class_table.outcome(model_type, architecture(trial), trial) == ""


@pytest.mark.parametrize("model_type", some_slow(REFUSED))
def test_what_would_be_wrong_without_a_word_is_refused(model_type: str) -> None:
    trial, why = REFUSED[model_type]
    found = class_table.outcome(model_type, architecture(trial), trial)
    assert any(word in found for word in why.split("|")), found


EVERY = [(kind, model_type) for kind in class_table.CHECKS for model_type in class_table.classes(kind)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "model_type"), EVERY)
def test_the_table_says_what_every_class_does(kind: str, model_type: str) -> None:
    """docs/hugging-face-classes.md is made by this sweep."""
    found = [class_table.outcome(model_type, kind, trial) or "yes" for trial in class_table.CHECKS[kind]]
    rows = (Path(__file__).parents[5] / "docs/hugging-face-classes.md").read_text().splitlines()
    assert class_table.row(model_type, class_table.classes(kind)[model_type], found) in rows


MINISTRAL: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "head_dim": 8, "sliding_window": 5, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {**MINISTRAL, **EXPERTS, "router_aux_loss_coef": 0.1}


def loaded(folder: Path, theirs: Any, objective: str = "causal_lm", **options: Any) -> HuggingFaceWorkload:
    theirs.save_pretrained(folder)
    asked: dict[str, Any] = {"options": options, "sequence_length": 24, "implementation": "transformers"}
    workload = load(f"hf:{folder}", objective, VOCABULARY, **asked)
    assert isinstance(workload, HuggingFaceWorkload)
    return workload


def batch_of(workload: HuggingFaceWorkload, samples: int = 4) -> Batch:
    def read(sample: int) -> np.ndarray:
        tokens = np.random.default_rng(sample).integers(7, 97, workload.objective.window(24))
        tokens[sample + 3 :: 7] = VOCABULARY.eos
        return tokens

    return workload.objective.collate(Samples(read, samples), range(samples), 0)


def a_mask_for_all(model: hf_network.HuggingFaceNetwork, batch: Batch) -> Any:
    """As it was: one mask in place of what the class makes itself."""
    seen = attends(batch)
    assert seen is not None
    mask = hf_network._additive(seen)
    logits = model.network(
        input_ids=batch["tokens"], position_ids=batch["positions"], attention_mask=mask, use_cache=False
    ).logits
    return hf_network.Output(logits, logits=logits)


def a_mask_of_booleans(allowed: torch.Tensor) -> torch.Tensor:
    return allowed.unsqueeze(1)


def test_a_lost_window_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = loaded(tmp_path, transformers.MinistralConfig(**MINISTRAL), documents="isolate")
    check_behaviour(workload)
    plain = hf_network.HuggingFaceNetwork.forward
    monkeypatch.setattr(
        hf_network.HuggingFaceNetwork,
        "forward",
        lambda self, batch: a_mask_for_all(self, batch) if "segments" in batch else plain(self, batch),
    )
    with pytest.raises(WorkloadError, match="packed documents have other outputs"):
        check_behaviour(workload)


def test_a_mask_of_booleans_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = transformers.MPNetConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    workload = loaded(tmp_path, theirs, "permuted_lm")
    check_behaviour(workload)
    monkeypatch.setattr(hf_network, "_additive", a_mask_of_booleans)
    with pytest.raises(WorkloadError, match="must not see"):
        check_behaviour(workload)


def test_an_encoder_does_not_predict_what_it_sees(tmp_path: Path) -> None:
    theirs = transformers.CamembertConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        architectures=["CamembertForCausalLM"],
    )  # fmt: skip
    with pytest.raises(WorkloadError, match=r"must not see; set workload\.changes\.is_decoder to true"):
        check_behaviour(loaded(tmp_path, theirs))
    check_behaviour(
        load(f"hf:{tmp_path}", "causal_lm", VOCABULARY, changes={"is_decoder": True}, sequence_length=24)
    )  # type: ignore[arg-type]


def test_positions_that_count_from_the_padding_on_are_counted(tmp_path: Path) -> None:
    """A class of RoBERTa's kind with 26 positions has 24 beside padding 1."""
    theirs = transformers.CamembertConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=25,
    )  # fmt: skip
    with pytest.raises(WorkloadError, match=r"fails with .* out of"):
        check_behaviour(loaded(tmp_path, theirs, "masked_lm"))
    theirs.max_position_embeddings = 26
    check_behaviour(loaded(tmp_path, theirs, "masked_lm"))


def test_nothing_is_drawn_at_random_and_it_is_said(tmp_path: Path) -> None:
    theirs = transformers.GPTNeoXConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        attention_dropout=0.5, hidden_dropout=0.5,
    )  # fmt: skip
    workload = loaded(tmp_path / "folder", theirs)
    assert workload.config.zeroed == ("attention_dropout", "classifier_dropout", "hidden_dropout")
    model, batch = trained_model(workload, 0), batch_of(workload)
    assert model.training
    assert torch.equal(model(batch).logits, model(batch).logits)
    workload.to_hf(
        {name: t.detach() for name, t in model.state_dict().items()}.__getitem__, str(tmp_path / "out")
    )
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").attention_dropout == 0.5


def test_the_loss_of_routers_is_theirs_however_a_batch_is_cut(tmp_path: Path) -> None:
    workload = loaded(tmp_path, transformers.OlmoeConfig(**ROUTED))
    assert workload.config.balanced
    model, batch = trained_model(workload, 0), batch_of(workload)
    whole = workload.loss(model, batch).extra
    assert whole is not None
    parts = [workload.loss(model, {k: v[i : i + 1] for k, v in batch.items()}).extra for i in range(4)]
    torch.testing.assert_close(whole, torch.stack([part for part in parts if part is not None]).mean())
    theirs = model.network(
        input_ids=batch["tokens"][:1], labels=batch["tokens"][:1], use_cache=False, output_router_logits=True
    )
    torch.testing.assert_close(parts[0], 0.1 * theirs.aux_loss)
    whole.backward()
    assert any(
        "gate" in name and p.grad is not None and p.grad.abs().sum() > 0
        for name, p in model.named_parameters()
    )
    without = load(
        f"hf:{tmp_path}", "causal_lm", VOCABULARY, changes={"router_aux_loss_coef": 0.0}, sequence_length=24
    )
    assert without.loss(trained_model(without, 0), batch).extra is None  # type: ignore[arg-type]


def test_a_cache_lets_packed_documents_see_each_other_and_none_is_kept_here(tmp_path: Path) -> None:
    workload = loaded(tmp_path, transformers.Qwen3Config(**MINISTRAL), documents="isolate")
    model, batch = trained_model(workload, 0), batch_of(workload, 1)
    given = {"input_ids": batch["tokens"], "position_ids": batch["positions"]}
    second = int((batch["positions"][0, 1:] == 0).nonzero()[0]) + 1
    with torch.no_grad():
        own = model(batch).logits
        apart, mixed = (model.network(**given, use_cache=kept).logits for kept in (False, True))
    torch.testing.assert_close(own, apart)
    torch.testing.assert_close(mixed[:, :second], own[:, :second])
    assert (mixed[:, second:] - own[:, second:]).abs().max() > 1e-3


def passed(block: torch.nn.Module, seen: list[int]) -> Callable[..., Any]:
    forward = block.forward

    def count(*arguments: Any, **named: Any) -> Any:
        seen.append(1)
        return forward(*arguments, **named)

    return count


def test_layers_are_found_and_run_again_where_they_are_recomputed(tmp_path: Path) -> None:
    workload = loaded(tmp_path, transformers.OlmoeConfig(**ROUTED))
    model, batch = trained_model(workload, 0), batch_of(workload)
    blocks, seen = workload.blocks(model), list[int]()
    assert len(blocks) == 2
    for block in blocks:
        block.forward = partial(
            checkpoint, passed(block, seen), use_reentrant=False, preserve_rng_state=False
        )  # type: ignore[method-assign]
    loss = workload.loss(model, batch)
    assert loss.extra is not None
    (loss.total + loss.extra).backward()
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        (transformers.ViTConfig(), "vit in .* is not a language model"),
        (transformers.CLIPConfig(), "clip in .* is not a language model"),
        (transformers.WhisperConfig(), "whisper in .* is not a language model"),
    ],
)
def test_what_reads_no_text_is_refused_in_a_line(tmp_path: Path, theirs: Any, why: str) -> None:
    theirs.save_pretrained(tmp_path)
    with pytest.raises(WorkloadError, match=why):
        describe_hf_class(str(tmp_path))


def test_a_configuration_that_no_model_has_is_refused_in_a_line(tmp_path: Path) -> None:
    transformers.MinistralConfig(**{**MINISTRAL, "hidden_act": "no such"}).save_pretrained(tmp_path)
    with pytest.raises(WorkloadError, match=r"cannot build the model in .*KeyError"):
        describe_hf_class(str(tmp_path)).parameters()


def test_a_class_without_a_limit_has_none(tmp_path: Path) -> None:
    transformers.XLNetConfig(vocab_size=97, d_model=32, n_layer=1, n_head=4, d_inner=64).save_pretrained(
        tmp_path
    )
    found = describe_hf_class(str(tmp_path))
    assert isinstance(found, HuggingFaceModel)
    assert found.max_positions > 10**5


def test_code_in_a_folder_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"}}'
    )
    (tmp_path / "own.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(WorkloadError, match="cannot read"):
        load(f"hf:{tmp_path}", "causal_lm", VOCABULARY, sequence_length=24)


def test_pickled_weights_do_not_begin_anew(tmp_path: Path) -> None:
    transformers.MinistralConfig(**MINISTRAL).save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(WorkloadError, match=r"pytorch_model\.bin, and nothing is unpickled"):
        load(f"hf:{tmp_path}", "causal_lm", VOCABULARY, sequence_length=24)


def test_weights_that_are_not_there_do_not_begin_anew(tmp_path: Path) -> None:
    sizes = {name: MINISTRAL[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
    theirs = transformers.GPTNeoXConfig(**sizes, num_attention_heads=4, intermediate_size=64)
    transformers.GPTNeoXForCausalLM(theirs).save_pretrained(tmp_path)
    workload = load(
        f"hf:{tmp_path}", "causal_lm", VOCABULARY, changes={"num_hidden_layers": 3}, sequence_length=24
    )
    assert isinstance(workload, HuggingFaceWorkload)
    with pytest.raises(WorkloadError, match=r"lacks gpt_neox\.layers\.2"):
        check_behaviour(workload)
