"""The seconds of a rollout by part, and the memory of a rollout worker. Torch-free and ray-free.

Answers are taken to be as long as `rollout.max_tokens`, and prompts as long as fits before them, so that the seconds of
generation are those of the longest rollout.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from orchestrator.config.errors import InputError
from orchestrator.parallel.layout import ModelShape
from orchestrator.planner.choose_layout import Plan
from orchestrator.planner.demand import Demand
from orchestrator.planner.device import Machine
from orchestrator.planner.memory import PROCESS, generation_bytes, offered
from orchestrator.planner.simulation.collectives import Group
from orchestrator.planner.simulation.operators import Program, ends, layer, with_length

DRAW_BYTES = 72.0
"""Bytes read and written to draw a token, for each entry of the vocabulary: logits in fp32, their log-softmax, and in
fp64 the probabilities, the entropy and the cumulative sums (`workloads/model/answers.py`)."""
DRAW_SECONDS = 6e-6
"""Seconds of the process for each token that is drawn, on one CPU."""
CACHE_OPERATIONS = 8.0
"""Operations that keep and read the keys and values of a layer, for each token."""
UNRECORDED = 0.8
"""Seconds of a launch without autograd, as a share of one in training."""
FORWARD = 1.0 / 3.0
"""A forward pass as a share of the passes of a step."""
REWARD_SECONDS, REWARDS_SECONDS = 2e-4, 1e-3
"""Seconds for an answer's text and its reward by a rule, and for the round trip to the processes that compute rewards.
`tests/bench/bench_rollout_plan.py` measures both."""


@dataclass(frozen=True)
class RolloutTime:
    """Seconds of a step with its share of a rollout.

    Attributes:
        transfer: weights on their way from the ranks, which wait for it.
        generate: generation of the step's answers; rollout workers read the weights first.
        reward: their rewards by rules. Own functions and reward models are not predicted.
        train: the optimizer step, and its share of the forward passes before a rollout's first step, whose
            log-probabilities the later ones compare with.
        overlaps: whether generation goes on while the gang trains.
    """

    transfer: float
    generate: float
    reward: float
    train: float
    overlaps: bool

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        gang_seconds = self.reward + self.train
        if self.overlaps:
            return self.transfer + max(self.generate, gang_seconds)
        return self.transfer + self.generate + gang_seconds

    def by_part(self) -> dict[str, float]:
        """Return the seconds that a step waits for each part of the rollout, as the rows of a run have them."""
        waited = max(self.generate - self.reward - self.train, 0.0) if self.overlaps else self.generate
        return {"transfer": self.transfer, "generate": waited, "reward": self.reward}


def with_rollout_time(plan: Plan, time: RolloutTime) -> dict[str, Any]:
    """Return what a step with its share of a rollout changes in `predicted` of a plan's JSON.

    Args:
        plan: the plan of the training workers.
        time: seconds of its step.
    """
    compared = time.train - plan.chosen.seconds
    slow_steps = {
        share: dataclasses.replace(time, train=seconds + compared)
        for share, seconds in plan.quantiles.items()
    }
    by_part = plan.chosen.time.to_json()
    by_part["compute"] += compared
    return {
        "step_seconds": time.seconds,
        "step_seconds_quantiles": {share: slow_step.seconds for share, slow_step in slow_steps.items()},
        "tokens_per_second": plan.tokens / time.seconds,
        "seconds_by_part": by_part | time.by_part(),
    }


def check_rollout_workers(demand: Demand, shape: ModelShape, machine: Machine) -> None:
    """Raise InputError unless a rollout worker fits the memory of a worker, or the job says that it need not.

    Args:
        demand: what the job asks of the planner.
        shape: the sizes of its model.
        machine: one worker.
    """
    if problem := memory_problem(demand, shape, machine):
        hint = "lower rollout.together or rollout.group, or take workers with more memory"
        raise InputError(problem, "rollout.workers", f"{hint}; must_fit: false runs it all the same")


def memory_problem(demand: Demand, shape: ModelShape, machine: Machine) -> str:
    """Return why a rollout worker does not fit the memory of a worker; empty if it does, or need not.

    Args:
        demand: what the job asks of the planner.
        shape: the sizes of its model.
        machine: one worker.
    """
    if demand.rollout is None or demand.rollout.workers is None or not demand.resources.must_fit:
        return ""
    return too_large("rollout", worker_bytes(demand, shape), demand, machine)


def too_large(kind: str, needed: float, demand: Demand, machine: Machine) -> str:
    """Return that a worker needs more memory than a worker offers; empty if it does not.

    Args:
        kind: what the worker is called.
        needed: bytes that it needs.
        demand: what the job asks of the planner.
        machine: one worker.
    """
    available = offered(machine, not demand.on_gpu)
    if needed <= available:
        return ""
    return f"a {kind} worker needs {needed / 1e9:.1f} GB, and a worker offers {available / 1e9:.1f} GB"


def worker_bytes(demand: Demand, shape: ModelShape) -> float:
    """Return the bytes of a rollout worker: the weights in fp32, and what it decodes at once.

    Args:
        demand: what the job asks of the planner.
        shape: the sizes of its model.
    """
    rollout = demand.rollout
    assert rollout is not None
    weights, cache = generation_bytes(demand.precision, shape, rollout.group * rollout.together)
    # fp64 [answers, vocabulary], three at once: probabilities, those after the cuts, and cumulative sums.
    logits = 3.0 * 8.0 * rollout.group * rollout.together * shape.vocabulary
    if demand.shards:
        # A pass of training's shape reads the answers: logits, at their temperature, their log-softmax; a gated layer.
        tokens = demand.batch // demand.shards * shape.sequence_length
        logits += 4.0 * tokens * max(3.0 * shape.vocabulary, 4.0 * shape.feedforward)
    process = 0.0 if demand.on_gpu else PROCESS
    return weights + cache + logits + process


def rollout_time(demand: Demand, shape: ModelShape, plan: Plan) -> RolloutTime:
    """Return the seconds of a step under a plan of its training workers.

    Args:
        demand: what the job asks of the planner.
        shape: the sizes of its model.
        plan: of its training workers.
    """
    rollout = demand.rollout
    assert rollout is not None
    machine = plan.machine
    ranks = plan.chosen.layout.world
    generating = rollout.workers.max if rollout.workers else 0
    overlaps = bool(rollout.staleness and generating)
    # The units of all steps of a rollout are queued together only if the gang trains meanwhile.
    queued = rollout.steps if overlaps else 1
    # A worker does whole units: with 5 units on 4 workers one of them does two, and all wait. Units of several steps
    # that are queued together fill such gaps.
    rounds = math.ceil(queued * rollout.units(demand.batch) / (generating or ranks)) / queued
    sent = sent_bytes(shape)
    if generating:
        transfer, read = _through_servers(sent, ranks, generating, machine)
    else:
        transfer, read = Group(ranks, 1, machine).gather(sent), 0.0
    return RolloutTime(
        transfer=transfer / rollout.updates,
        generate=rounds * unit_seconds(demand, shape, machine) / rollout.epochs + read / rollout.updates,
        reward=(REWARDS_SECONDS + REWARD_SECONDS * demand.batch / ranks) / rollout.epochs,
        train=plan.chosen.seconds + _compared(demand, shape) * FORWARD * plan.chosen.time.compute,
        overlaps=overlaps,
    )


def _compared(demand: Demand, shape: ModelShape) -> float:
    """Return how many forward passes a step has for the log-probabilities that it compares with.

    The first step compares with its own, and answers that were generated ahead have theirs. So have answers that were
    read by training's program, see `orchestrator.train.rollouts.config.trains_as_it_reads`.
    """
    rollout = demand.rollout
    assert rollout is not None
    if rollout.staleness or (demand.trains_as_it_reads and not shape.experts):
        return 0.0
    return (rollout.steps - (rollout.epochs == 1)) / rollout.updates


def sent_bytes(shape: ModelShape) -> float:
    """Return the bytes of the weights that a rollout sends: the trained ones, in fp32."""
    return 4.0 * shape.parameters * shape.trained_share


def _through_servers(sent: float, ranks: int, generating: int, machine: Machine) -> tuple[float, float]:
    """Return the seconds in which ranks send weights to the servers, and in which a rollout worker reads them.

    A server is a process on the host of each node with rollout workers, and on two nodes if there are two. Both ways
    copy between device and host. Each server takes all weights at the rate of one link. Links between GPUs carry none.
    """
    copied = sent / machine.host_bandwidth if machine.launches_ahead else 0.0
    local_rate = machine.host_bandwidth if machine.launches_ahead else machine.inside.bandwidth
    servers = math.ceil(generating / machine.per_node)
    is_alone = ranks + generating <= machine.per_node
    rate = local_rate if is_alone else min(local_rate, machine.between.bandwidth)
    return copied + (servers if is_alone else max(servers, 2)) * sent / rate, copied + sent / local_rate


def unit_seconds(demand: Demand, shape: ModelShape, machine: Machine) -> float:
    """Return the seconds in which one worker generates the answers to `rollout.together` prompts.

    It reads the prompts in one pass, and then each token of all answers in one pass over the weights. Under
    `determinism: bitwise` it then reads all answers once more, as training does.

    Args:
        demand: what the job asks of the planner.
        shape: the sizes of its model.
        machine: one worker.
    """
    rollout = demand.rollout
    assert rollout is not None
    machine = dataclasses.replace(machine, launch=UNRECORDED * machine.launch)
    program = dataclasses.replace(demand.program, in_8_bits=0, dropout=False, compiled=False, reference=False)
    prompt = max(shape.sequence_length - rollout.max_tokens, 1)
    read = pass_seconds(with_length(shape, prompt), machine, program, rollout.together)
    sequences = rollout.together * rollout.group
    token = pass_seconds(with_length(shape, 1), machine, program, sequences)
    context = prompt + rollout.max_tokens / 2.0  # in the middle of the answer
    cached = sequences * context * 2.0 * shape.kv_heads * shape.head_size * program.width
    token += shape.layers * (machine.elements(cached) + CACHE_OPERATIONS * machine.launch)
    drawn = machine.elements(DRAW_BYTES * sequences * shape.vocabulary) + DRAW_SECONDS * sequences
    # One pass over all weights for each token: decoding is bound by the memory's bandwidth, so `together` answers cost
    # little more than one.
    seconds = read + rollout.max_tokens * (token + drawn)
    if not demand.shards:
        return seconds
    rows = demand.batch // demand.shards
    again = pass_seconds(shape, machine, program, rows, shape.sequence_length)
    return seconds + math.ceil(sequences / rows) * again + rollout.max_tokens * drawn


def pass_seconds(
    shape: ModelShape, machine: Machine, program: Program, sequences: int, predicted: int = 1
) -> float:
    """Return the seconds of a forward pass, with the head of so many tokens of each sequence."""
    shape = dataclasses.replace(shape, chunked_head=False)  # only a loss has a chunked head
    part = (sequences, 1, 1, 1, 0)
    embedding, _ = ends(shape, machine, program, part)
    _, head = ends(with_length(shape, predicted), machine, program, part)
    forward = layer(shape, machine, program, part, "none").forward
    return shape.layers * forward + embedding.forward + head.forward
