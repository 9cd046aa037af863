"""The keys of a job that learns from rewards: what they follow from, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.config.errors import InputError
from orchestrator.config.spec import JobSpec, dump, parse
from orchestrator.config.spec import load as load_job


def document(**parts: Any) -> dict[str, Any]:
    return {
        "name": "small",
        "workload": {"model": "gpt-tiny", "objective": "grpo", **parts.pop("workload", {})},
        "data": {
            "sources": [{"uri": "rows.jsonl", "field": {"prompt": "q", "answer": "a", "level": "l"}}],
            "tokenizer": "tokenizer",
            "sequence_length": 64,
        },
        "train": {"steps": 8, "global_batch": 16, **parts.pop("train", {})},
        "rollout": {"max_tokens": 32},
        "rewards": [{"kind": "exact_match"}],
        "checkpoint": {"every": 4},
        **parts,
    }


def refusal(**parts: Any) -> str:
    with pytest.raises(InputError) as caught:
        parse(document(**parts))
    return str(caught.value)


def test_a_step_reads_a_prompt_for_each_group() -> None:
    assert parse(document()).reading.samples == 2
    assert parse(document(rollout={"max_tokens": 32, "group": 4})).reading.samples == 4


def test_rollouts_have_defaults_and_a_divergence_holds_its_reference(tmp_path: Any) -> None:
    found = document()
    del found["rollout"]
    found["data"]["sequence_length"] = 256
    job = parse(found)
    assert job.rollout is not None
    assert (job.rollout.group, job.train.reference) == (8, "precomputed")
    job = parse(document(workload={"options": {"beta": 0.1}}))
    assert job.train.reference == "held"
    (tmp_path / "job.yaml").write_text(dump(job))
    assert load_job(tmp_path / "job.yaml") == job


def test_rollout_workers_are_counted_with_the_run_s() -> None:
    job = parse(document(rollout={"max_tokens": 32, "together": 1, "workers": {"min": 1, "max": 2}}))
    assert (job.all_workers.min, job.all_workers.max) == (2, 3)
    assert job.rollout is not None
    assert (job.rollout.decoded_by_ranks, parse(document()).rollout.decoded_by_ranks) == (0, 64)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"rewards": []}, "grpo learns from rewards, and this job has none; list them in rewards"),
        ({"train": {"global_batch": 12}}, "train.global_batch 12 counts answers, and is not a multiple of"),
        ({"rollout": {"max_tokens": 64}}, "rollout.max_tokens 64 leaves no room for a prompt"),
        ({"rollout": {"max_tokens": 32, "steps": 3}}, "train.steps 8 is not a multiple of rollout.steps 3"),
        (
            {"rollout": {"max_tokens": 32, "steps": 8}},
            "checkpoint.every 4 is not a multiple of rollout.steps 8",
        ),
        (
            {"rollout": {"max_tokens": 32, "steps": 2, "epochs": 3}},
            "train.steps 8 is not a multiple of rollout.steps 2 x rollout.epochs 3",
        ),
        (
            {"workload": {"dropout": 0.1}, "rollout": {"max_tokens": 32, "epochs": 2}},
            "rollout.epochs 2 compares probabilities in training with those before it, without dropout",
        ),
        ({"rollout": {"max_tokens": 32, "epochs": 0}}, "rollout.epochs"),
        ({"rollout": {"max_tokens": 32, "group": 1}}, "rollout.group"),
        ({"rollout": {"max_tokens": 32, "temperature": 0}}, "rollout.temperature"),
        ({"workload": {"objective": "causal_lm"}}, "rollout is for grpo and reinforce"),
        (
            {"workload": {"options": {"beta": 0.1}}, "train": {"reference": "precomputed"}},
            "train.reference precomputed cannot know generated answers",
        ),
        (
            {"rollout": {"max_tokens": 32, "workers": 2}},
            "rollout.workers.max 2 is more than can work: a step has 1 unit of rollout.together 8 prompts",
        ),
        ({"rollout": {"max_tokens": 32, "workers": {"min": 2, "max": 1}}}, "min 2 is above max 1; swap them"),
        ({"rollout": {"max_tokens": 32, "workers": 0}}, "rollout.workers"),
        (
            {"rollout": {"max_tokens": 32, "staleness": 2}},
            "staleness: should be less than or equal to 1 (got 2)",
        ),
        (
            {"rollout": {"max_tokens": 32, "staleness": -1}},
            "staleness: should be greater than or equal to 0 (got -1)",
        ),
        (
            {"workload": {"objective": "reinforce"}, "rollout": {"max_tokens": 32, "staleness": 1}},
            "rollout.staleness 1 needs the ratio of probabilities that reinforce lacks; use objective grpo",
        ),
        *(
            (
                {"workload": {key: 0.1}, "rollout": {"max_tokens": 32, "staleness": 1}},
                "rollout.staleness 1 compares probabilities in training with those in generation, which has no",
            )
            for key in ("dropout", "layer_drop")
        ),
        (
            {"rollout": {"max_tokens": 32, "engine": "vllm"}},
            "rollout.engine vllm needs rollout workers; give rollout.workers, or set rollout.engine to own",
        ),
        (
            {
                "rollout": {"max_tokens": 32, "engine": "vllm", "workers": 1},
                "train": {"determinism": "bitwise", "virtual_shards": 4},
            },
            "rollout.engine vllm gives answers that depend on its batches, which determinism bitwise excludes",
        ),
        *(
            (
                {"rollout": {"max_tokens": 32, "engine": "vllm", "workers": 1, **cut}},
                "rollout.engine vllm returns log-probabilities after the cuts of top_k and top_p",
            )
            for cut in ({"top_k": 5}, {"top_p": 0.9})
        ),
        ({"rewards": [{"kind": "exact_match"}] * 2}, "two rewards are called exact_match"),
    ],
)
def test_what_cannot_be_is_refused_with_the_key_and_the_way_out(parts: dict[str, Any], told: str) -> None:
    assert told in refusal(**parts)


def test_what_changes_no_answer_is_not_part_of_a_run_s_identity() -> None:
    def identity(**rollout: Any) -> Any:
        return parse(document(rollout={"max_tokens": 32, **rollout})).identity()

    assert identity() == identity(keep_every=3)
    assert identity() == identity(workers=1)
    assert identity() != identity(temperature=0.5)
    assert identity() != identity(together=2)
    assert identity() != identity(staleness=1)
    assert identity() != identity(engine="vllm", workers=1)
    assert {"staleness", "engine"}.isdisjoint(identity()["rollout"])  # as in runs that began before
    plain = document()
    first = parse(plain).identity()
    plain["rewards"][0]["timeout"] = 7.0
    assert parse(plain).identity() == first
    plain["rewards"][0]["weight"] = 2.0
    assert parse(plain).identity() != first


def test_other_jobs_keep_their_identity() -> None:
    found = document()
    del found["rollout"], found["rewards"]
    found["workload"]["objective"] = "causal_lm"
    found["data"]["sources"] = [{"uri": "text.txt"}]
    job: JobSpec = parse(found)
    assert job.identity().keys() == {"seed", "workload", "data", "train"}
