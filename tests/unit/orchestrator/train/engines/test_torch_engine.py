"""The engine on one rank: a reference that is held gives the steps of one that is given; its memory ends with it."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rendezvous import recorded

from orchestrator.parallel.arithmetic import NEWEST, Arithmetic
from orchestrator.parallel.device import Device
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.rank_messages import agree
from orchestrator.train.engines.torch_engine import TorchEngine
from workloads.load import load

sys.path.append(str(Path(__file__).parents[4] / "dist" / "train"))


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_a_held_reference_gives_the_steps_of_a_given_one(objective: str) -> None:
    from rank_cases import job, micro_batches, workload_of

    seen: dict[str, list[Any]] = {}
    with recorded(0, 1):
        group = dist.group.WORLD
        assert group is not None
        for reference in ("precomputed", "held"):
            case = {"model": "gpt-tiny", "objective": objective, "train": {"reference": reference}}
            spec = job(case)
            workload, layout = workload_of(spec), Layout(micro_batch=4)
            engine = TorchEngine(
                spec.engine, workload, layout, Device(torch.device("cpu"), torch.float32, group)
            )
            engine.hold_reference(3)
            batches = [micro_batches(workload, spec, layout, step) for step in range(3)]
            for each in (batch for step in batches for batch in step):
                del each["reference"]
            if reference == "precomputed":
                for step in batches:
                    for batch, said in zip(step, engine.log_probabilities(step), strict=True):
                        batch["reference"] = said
            found = [engine.train_step(step, 1e-2) for step in batches]
            told = engine.eval_step(batches[0])
            state = torch.cat([p.detach().flatten() for p in engine.parallel.stages[0].parameters()])
            seen[reference] = [[(m.loss, m.grad_norm) for m in found], told.sums, state]
    assert seen["held"][0] == seen["precomputed"][0]
    assert seen["held"][1] == seen["precomputed"][1]
    assert torch.equal(seen["held"][2], seen["precomputed"][2])


@pytest.mark.parametrize(("objective", "leaves_out"), [("conversation", True), ("causal_lm", False)])
def test_tokens_without_a_label_are_left_out_where_many_have_none(objective: str, leaves_out: bool) -> None:
    """Unless the run began before that was so. It changes the order in which the loss is added, and nothing else."""
    from rank_cases import job, micro_batches, workload_of

    with recorded(0, 1):
        group = dist.group.WORLD
        assert group is not None
        found, logits = [], []
        for arithmetic in (NEWEST, Arithmetic.CUT_ROWS):
            spec, layout = job({"model": "gpt-tiny", "objective": objective}), Layout(micro_batch=4)
            workload = workload_of(spec)
            device = Device(torch.device("cpu"), torch.float32, group)
            engine = TorchEngine(spec.engine, workload, layout, device)
            engine.initialise(3)
            losses = engine.passes.losses
            losses.arithmetic = arithmetic
            batches = micro_batches(workload, spec, layout, 0)
            chunked = losses.in_chunks(batches[0])
            assert chunked is not None
            logits.append(chunked.leaves_out)
            found.append(engine.train_step(batches, 1e-2))
    assert logits == [leaves_out, False]
    assert found[0].loss == pytest.approx(found[1].loss, rel=1e-6)
    assert found[0].grad_norm == pytest.approx(found[1].grad_norm, rel=1e-5)


def test_a_step_has_no_mean_of_what_it_does_not_predict() -> None:
    """Of a batch without good answers their reward, and of one whose labels are all masked the loss."""
    from rank_cases import job, micro_batches, workload_of

    with recorded(0, 1):
        group = dist.group.WORLD
        assert group is not None
        found = []
        for objective in ("kto", "causal_lm"):
            spec, layout = job({"model": "gpt-tiny", "objective": objective}), Layout(micro_batch=4)
            workload = workload_of(spec)
            engine = TorchEngine(
                spec.engine, workload, layout, Device(torch.device("cpu"), torch.float32, group)
            )
            engine.initialise(3)
            batches = micro_batches(workload, spec, layout, 0)
            for batch in batches:
                if objective == "kto":
                    batch["desirable"] = torch.zeros_like(batch["desirable"])
                else:
                    batch["labels"] = torch.full_like(batch["labels"], -100)
            found.append(engine.train_step(batches, 1e-2))
    kto, masked = found
    assert kto.extra.keys() >= {"rejected_reward", "rejected_log_probability", "accuracy", "divergence"}
    assert not kto.extra.keys() & {"chosen_reward", "chosen_log_probability", "reward_margin"}
    assert (masked.loss, masked.grad_norm) == (None, 0.0)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_an_engine_that_is_closed_has_no_memory_though_others_refer_to_it(zero: int) -> None:
    from rank_cases import job, micro_batches, workload_of

    with recorded(0, 2):
        group = dist.group.WORLD
        assert group is not None
        spec = job({"model": "gpt-tiny", "train": {"optimizer": {"name": "adamw", "lr": 1e-3}}})
        workload, layout = workload_of(spec), Layout(dp=2, zero=zero, micro_batch=2)
        engine = TorchEngine(spec.engine, workload, layout, Device(torch.device("cpu"), torch.float32, group))
        engine.initialise(3)
        engine.train_step(micro_batches(workload, spec, layout, 0), 1e-3)
        held = {kind: list(tensors) for kind, tensors in engine.resident_tensors().items()}
        kept = {t.untyped_storage().data_ptr() for tensors in held.values() for t in tensors}
        pieces = [piece.data for piece in engine.state() if piece.data.dim()]
        assert {t.untyped_storage().data_ptr() for t in pieces} <= kept  # a snapshot makes none of its own
        assert all(sum(t.untyped_storage().nbytes() for t in tensors) for tensors in held.values())
        engine.close()
    assert not sum(t.untyped_storage().nbytes() for tensors in held.values() for t in tensors)


@pytest.mark.parametrize("name", ["muon", "lamb"])
def test_experts_of_a_class_that_is_run_as_it_is_are_parameters_of_their_own(
    name: str, tmp_path: Path
) -> None:
    """As plain torch updates them one by one: their matrices alone are made orthogonal or scaled and decayed."""
    import transformers
    from rank_cases import LENGTH, VOCABULARY, job, micro_batches

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.GptOssConfig(
        **sizes, num_key_value_heads=1, head_dim=8, vocab_size=160, num_local_experts=4, num_experts_per_tok=2
    )
    config.architectures = ["GptOssForCausalLM"]
    config.save_pretrained(tmp_path)
    optimizer = {"name": name, "lr": 1e-2, "weight_decay": 0.5, "clip": None, "eps": 1e-6}
    asked = {"model": f"hf:{tmp_path}", "changes": {}, "optimizer": optimizer}
    spec, layout = job(asked), Layout(micro_batch=8)
    workload = load(
        spec.workload.model, "causal_lm", VOCABULARY, sequence_length=LENGTH, implementation="transformers"
    )
    with recorded(0, 1):
        group = dist.group.WORLD
        assert group is not None
        engine = TorchEngine(spec.engine, workload, layout, Device(torch.device("cpu"), torch.float32, group))
        engine.initialise(3)
        (batch,) = micro_batches(workload, spec, layout, 0)
        ours = dict(engine.parallel.stages[0].named_parameters())
        start = {n: p.detach().clone() for n, p in ours.items()}
        loss = workload.loss(engine.parallel.stages[0], dict(batch))
        mean = loss.total / loss.count + (0.0 if loss.extra is None else loss.extra)
        gradients = dict(zip(ours, torch.autograd.grad(mean, list(ours.values())), strict=True))
        engine.train_step([batch], 1e-2)
    for key, found in ours.items():
        experts = ".experts." in key
        starts = start[key].unbind() if experts else (start[key],)
        slopes = gradients[key].unbind() if experts else (gradients[key],)
        inside = 0 < workload.depth(key) < 3
        plain = [_updated(name, w, g, inside) for w, g in zip(starts, slopes, strict=True)]
        wanted = torch.stack(plain) if experts else plain[0]
        torch.testing.assert_close(
            found.detach(), wanted, rtol=0, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}"
        )


def _updated(name: str, weight: torch.Tensor, gradient: torch.Tensor, inside: bool) -> torch.Tensor:
    """After one step of plain torch, of a layer's parameter or of another."""
    decay = 0.5 if weight.dim() == 2 else 0.0
    if name == "lamb":
        update = gradient / (gradient.abs() + 1e-6) + decay * weight
        return weight - 1e-2 * update * (weight.norm() / update.norm() if weight.dim() == 2 else 1.0)
    found = torch.nn.Parameter(weight.clone())
    found.grad = gradient
    peer: Any
    if weight.dim() == 2 and inside:
        peer = torch.optim.Muon([found], lr=1e-2, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
            peer.step()
    else:
        peer = torch.optim.AdamW([found], lr=1e-2, eps=1e-6, weight_decay=decay)
        peer.step()
    return found.detach()


def test_groups_and_smoothed_labels_train_as_plain_torch_does() -> None:
    from rank_cases import job, micro_batches, workload_of

    groups = [
        {"match": ["tokens.*"], "lr_scale": 0.1, "weight_decay": 0.0},
        {"match": ["layers.0.*"], "weight_decay": 0.7},
    ]
    optimizer = {"lr": 1e-2, "eps": 1e-4, "clip": None, "weight_decay": 0.1, "groups": groups}
    spec = job({"model": "gpt-tiny", "optimizer": optimizer, "train": {"label_smoothing": 0.2}})
    workload, layout = workload_of(spec), Layout(micro_batch=8)
    with recorded(0, 1):
        group = dist.group.WORLD
        assert group is not None
        engine = TorchEngine(spec.engine, workload, layout, Device(torch.device("cpu"), torch.float32, group))
        engine.initialise(3)
        model = copy.deepcopy(engine.parallel.stages[0])
        named = dict(model.named_parameters())

        def of(name: str) -> dict[str, Any]:
            decay = 0.0 if name.startswith("tokens.") else 0.7 if name.startswith("layers.0.") else 0.1
            scale = 0.1 if name.startswith("tokens.") else 1.0
            decay = decay if named[name].dim() > 1 else 0.0
            return {"params": [named[name]], "lr": 1e-2 * scale, "weight_decay": decay}

        plain = torch.optim.AdamW(list(map(of, named)), betas=spec.train.optimizer.betas, eps=1e-4)
        for step in range(3):
            (batch,) = micro_batches(workload, spec, layout, step)
            sums = engine.eval_step([dict(batch)])
            metrics = engine.train_step([dict(batch)], 1e-2)
            logits, labels = model(batch).logits.flatten(0, 1), batch["labels"].flatten()
            told = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100)
            loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, label_smoothing=0.2)
            plain.zero_grad()
            loss.backward()
            plain.step()
            assert metrics.loss == pytest.approx(float(told.detach()), rel=1e-6)
            assert sums.loss / sums.tokens == pytest.approx(float(told.detach()), rel=1e-6)
        for name, ours in engine.parallel.stages[0].named_parameters():
            torch.testing.assert_close(
                ours, named[name], rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_rank_alone_waits_for_no_other(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does at the end of a step is not communication, and nobody is there to send to."""
    from rank_cases import job, micro_batches, workload_of

    def sent(*_: Any, **__: Any) -> None:
        raise AssertionError("a message in a group of one")

    with recorded(0, 1):
        group = dist.group.WORLD
        assert group is not None
        spec, layout = job({"model": "gpt-tiny"}), Layout(micro_batch=4, zero=zero)
        workload = workload_of(spec)
        engine = TorchEngine(spec.engine, workload, layout, Device(torch.device("cpu"), torch.float32, group))
        engine.initialise(1)
        for collective in ("all_reduce", "all_gather_single", "reduce_scatter_single"):
            if zero != 3:  # FSDP2 calls them whatever the size of the group
                monkeypatch.setattr(dist, collective, sent)
        engine.train_step(micro_batches(workload, spec, layout, 0), 1e-2)
        assert agree(1, False).digest == 1
        assert set(engine.clock.take()) == {"forward", "backward", "optimizer"}
