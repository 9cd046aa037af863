"""Build the rollouts of a job from the job's parts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, cast

from tokenizers import Tokenizer

from cluster.workers.worker_context import WorkerContext
from orchestrator.data.store.tokens import Tokens
from orchestrator.parallel.device import Device
from orchestrator.resolve.chat import chat_of
from orchestrator.resolve.prompts import speaking, spoken
from orchestrator.resolve.training_inputs import TrainingInputs
from orchestrator.train.rollouts.config import RolloutSpec, trains_as_it_reads
from orchestrator.train.rollouts.judge import Judge
from orchestrator.train.rollouts.passes import PassSpec
from orchestrator.train.rollouts.queued_sampler import QueuedSampler, generate_until_stopped
from orchestrator.train.rollouts.reward_model import RewardModel
from orchestrator.train.rollouts.rollouts import Rollouts
from orchestrator.train.rollouts.sampler import OwnSampler, UnitSampler
from orchestrator.train.rollouts.training_pass import training_pass
from orchestrator.train.rollouts.vllm_sampler import VllmSampler
from orchestrator.train.task import Task
from workloads.workload import Ended

if TYPE_CHECKING:
    from workloads.transformer_workload import TransformerWorkload


def rollouts_of(
    inputs: TrainingInputs,
    tokens: Tokens,
    task: Task,
    device: Device,
    context: WorkerContext,
) -> Rollouts | None:
    """Return what makes the rollouts of a job; None if its objective does not learn from rewards.

    Args:
        inputs: the job's workload and samples.
        tokens: the prepared data, with the tokenizer.
        task: says how the ranks divide the work, and who generates answers.
        device: this rank's device.
        context: this rank's number, and its connection to the controller.

    Raises:
        InputError: if a reward cannot be computed here.
    """
    spec = inputs.job.spec
    rollout = spec.rollout
    if rollout is None:
        return None
    tokenizer = tokens.tokenizer()
    chat = chat_of(spec.data, spec.workload.objective, tokens)
    address = task.rollout_address
    judge = Judge(
        spec.rewards,
        decode=lambda ids: spoken(tokenizer, ids, chat),
        prompt_text=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)),
        together=rollout.together,
        models={
            reward.title: RewardModel(reward.model, f"rewards.{number}.model", tokens, device)
            for number, reward in enumerate(spec.rewards)
            if reward.model
        },
        roots=task.code_roots,
    )
    return Rollouts(
        spec=rollout,
        sequence_length=spec.data.sequence_length,
        dropout_seed=spec.seed if spec.workload.draws else None,
        workload=inputs.workload,
        layout=task.parsed_layout,
        context=context,
        sampler=QueuedSampler(address, task.attempt, context)
        if address
        else own_sampler(inputs, tokens, rollout, device, context),
        judge=judge,
        prompts_ahead=spec.reading.samples * rollout.steps * rollout.staleness,
        is_bitwise=bool(spec.train.bitwise_shards),
        trains_as_it_reads=trains_as_it_reads(
            spec.workload,
            spec.train,
            has_experts=bool(inputs.workload.config.moe),
            on_gpu=device.device.type != "cpu",
        ),
        passes=PassSpec(spec.evaluate.answers, spec.evaluate.sizes, spec.rewards[0].title)
        if spec.evaluate and spec.evaluate.answers
        else None,
    )


def make_rollouts(
    inputs: TrainingInputs, tokens: Tokens, task: Task, device: Device, context: WorkerContext
) -> dict[str, int]:
    """Generate answers for the ranks of a run until this worker is stopped. Return how many units of work.

    Args:
        inputs: the job's workload and samples.
        tokens: the prepared data, with the tokenizer.
        task: where the queue of work is.
        device: this worker's device.
        context: the connection to the controller.
    """
    rollout = inputs.job.spec.rollout
    assert rollout is not None
    make_sampler = vllm_sampler if rollout.engine == "vllm" else own_sampler
    sampler: UnitSampler = make_sampler(inputs, tokens, rollout, device, context)
    return {"units": generate_until_stopped(task, sampler, context)}


def own_sampler(
    inputs: TrainingInputs, tokens: Tokens, rollout: RolloutSpec, device: Device, context: WorkerContext
) -> OwnSampler:
    """Return what generates answers in this process.

    Args:
        inputs: the job's workload.
        tokens: the prepared data, with the tokenizer.
        rollout: how answers are generated.
        device: this process's device.
        context: the connection to the controller.
    """
    spec = inputs.job.spec
    return OwnSampler(
        inputs.workload,
        device,
        seed=spec.seed,
        spec=rollout,
        ends=_ends(inputs, tokens),
        ended=_stops(tokens.tokenizer(), rollout.stop),
        progressed=context.lives,
        training_pass=training_pass(inputs.workload, spec.train, rollout, spec.data.sequence_length, device),
    )


def vllm_sampler(
    inputs: TrainingInputs, tokens: Tokens, rollout: RolloutSpec, device: Device, context: WorkerContext
) -> VllmSampler:
    """Return what generates answers with vLLM. Raises InputError if that is not installed.

    Args:
        inputs: the job's workload.
        tokens: the prepared data, with the tokenizer.
        rollout: how answers are generated.
        device: this worker's device.
        context: the connection to the controller.
    """
    spec = inputs.job.spec
    context.set_waiting(True)  # it compiles, which may take longer than any step
    sampler = VllmSampler(
        cast("TransformerWorkload", inputs.workload),
        device,
        seed=spec.seed,
        spec=rollout,
        ends=_ends(inputs, tokens),
        sequence_length=spec.data.sequence_length,
        tokenizer=tokens.tokenizer(),
        progressed=context.lives,
    )
    context.set_waiting(False)
    return sampler


def _ends(inputs: TrainingInputs, tokens: Tokens) -> Collection[int]:
    """Return the tokens that end an answer."""
    spec = inputs.job.spec
    chat = chat_of(spec.data, spec.workload.objective, tokens)
    workload = inputs.workload
    return speaking(workload, chat).generation.ending(workload.vocabulary.eos).ends


def _stops(tokenizer: Tokenizer, stop: Sequence[str]) -> Ended | None:
    """Return whether an answer's tokens contain a text that ends it; None without such texts."""
    if not stop:
        return None
    # A token has at least a byte, so that the last tokens hold a text that has just become complete.
    last = max(len(text.encode()) for text in stop) + 4

    def ended(tokens: Sequence[int]) -> bool:
        text = tokenizer.decode(list(tokens[-last:]), skip_special_tokens=True)
        return any(stop_text in text for stop_text in stop)

    return ended
