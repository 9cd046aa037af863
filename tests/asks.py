"""The page docs/asks.md: public requests of users of other projects, and what of them is here.

`python tests/asks.py` writes the page from the table below. A test compares the stored page with it, and checks that
the name or the docstring of each named test holds the repository and the number of its request.
"""

from __future__ import annotations

from dataclasses import dataclass

from differences import ROOT

PAGE = ROOT / "docs" / "asks.md"
PLACES = {
    "NeMo-RL": "NVIDIA-NeMo/RL",
    "trl": "huggingface/trl",
    "Automodel": "NVIDIA-NeMo/Automodel",
    "dstack": "dstackai/dstack",
    "kuberay": "ray-project/kuberay",
    "prime-rl": "PrimeIntellect-ai/prime-rl",
    "ray": "ray-project/ray",
    "skypilot": "skypilot-org/skypilot",
    "torchft": "meta-pytorch/torchft",
    "torchtitan": "pytorch/torchtitan",
    "verl": "verl-project/verl",
}
"""Where the threads of a repository are."""


@dataclass(frozen=True)
class Ask:
    """One request that was read at its source.

    Attributes:
        thread: repository and number, as in ray#48224.
        wants: what is asked for.
        command: a command or keys of a job file that do it here.
        test: the test that holds it, as `path below tests::name`.
        lacks: what of the request is not here; empty if nothing.
    """

    thread: str
    wants: str
    command: str
    test: str
    lacks: str = ""


MIXTURE = "dist/test_mixture_run.py::test_a_killed_run_goes_on_at_another_width_with_its_quiet_twins_bits"
SMALLER = "ray/test_failures.py::test_a_lost_node_makes_the_gang_smaller"
HEAD = "ray/test_head.py::test_the_head_may_die_and_come_back"
ANSWERS = "dist/test_rollouts_run.py::test_kills_change_no_answer_and_no_bit"
STORED = "dist/test_distillation_run.py::test_few_stored_logits_are_read_again_and_a_damaged_one_is_told"
RESHARDED = "dist/train/test_resharding.py::test_a_run_that_changes_its_layout_is_the_same_run"

ASKS = (
    Ask(
        "NeMo-RL#3599",
        "A resume of GRPO skips no prompt and repeats none, and loses no long answer.",
        "`orchestrator verify-resume RUN`",
        ANSWERS,
    ),
    Ask(
        "trl#5911",
        "A resume of GRPO goes on at the prompt of its checkpoint, and generates nothing that is thrown away.",
        "`orchestrator run JOB`, again",
        ANSWERS,
    ),
    Ask(
        "trl#3055",
        "Store only a teacher's largest logits before training, and learn from them.",
        "`distill: {teacher: hf:FOLDER, logits: {source: stored, k: 64}}`",
        STORED,
    ),
    Ask(
        "trl#2255",
        "Learn from logits that the teacher has computed before training.",
        "the same",
        STORED,
    ),
    Ask(
        "ray#48224",
        "Resume at the position in the data set after a failure or with another number of workers.",
        "`orchestrator chaos JOB --fault kill@1:6`",
        MIXTURE,
    ),
    Ask(
        "ray#37633",
        "An iterator that survives failures without changing the order of samples.",
        "`orchestrator verify-resume RUN`",
        MIXTURE,
    ),
    Ask(
        "ray#20647",
        "Train with 4 to 10 workers: go on with fewer when a node leaves, with more when one comes.",
        "`resources: {workers: {min: 4, max: 10}}`",
        "ray/test_autoscaling.py::test_a_run_shrinks_with_a_lost_node_and_grows_into_the_one_that_replaces_it",
    ),
    Ask(
        "ray#66225",
        "Keep the survivors' checkpoint when a rank is reclaimed before it has saved.",
        "`checkpoint: {snapshot_every: auto}`",
        "ray/test_failures.py::test_snapshots_in_the_memory_of_other_nodes_lose_no_step",
    ),
    Ask(
        "ray#63968",
        "A notice of preemption leads to a checkpoint, and a preemption does not count as a failure.",
        "`orchestrator chaos JOB --fault drain@1:6`",
        "unit/orchestrator/controller/test_decide.py::"
        "test_a_preemption_with_notice_is_a_stop_with_a_commit_and_no_failure",
        "a budget of its own for preemptions without notice: these count in `limits.restarts`",
    ),
    Ask(
        "ray#64993",
        "At a hang, say which rank is the cause, with its collectives and the state of its GPU.",
        "`orchestrator chaos JOB --fault stop@1:6`; then `profiles/hang-attempt-1/` and `logs/` of the run",
        "dist/test_profile.py::test_a_gang_that_hangs_leaves_the_collectives_that_it_waits_in",
        "NCCL's own service for hangs (RAS), and nvidia-smi's report",
    ),
    Ask(
        "kuberay#2155",
        "When the head's pod is killed, the next driver begins from the last checkpoint.",
        "`orchestrator cluster render kuberay JOB`",
        HEAD,
        "a trial on Kubernetes: heads are killed on local nodes, and manifests are checked by their schemas",
    ),
    Ask(
        "kuberay#2153",
        "A training that survives the draining of its head's node.",
        "`orchestrator cluster render kuberay JOB --redis ADDRESS`",
        HEAD,
        "the same",
    ),
    Ask(
        "kuberay#2363",
        "Schedules of jobs, chains of jobs, and training that goes on from an earlier model.",
        "`stages: [...]`, `train: {continue_from: RUN}`",
        "dist/test_chain.py::test_stages_begin_with_what_others_made",
        "schedules",
    ),
    Ask(
        "skypilot#3907",
        "The preemption of one node does not tear down the others.",
        "`orchestrator chaos JOB --fault node@1:6`",
        SMALLER,
    ),
    Ask(
        "dstack#2123",
        "Configure what the failure of a node does: end, replace it, or go on with the rest.",
        "`resources: {workers: {min: 2, max: 4}}`",
        SMALLER,
    ),
    Ask(
        "torchft#186",
        "Keep the global batch when replicas come and go.",
        "`train: {global_batch: 512}`",
        "unit/orchestrator/parallel/test_layout.py::test_fit_keeps_the_batch_and_cuts_the_micro_batch",
    ),
    Ask(
        "torchft#309",
        "The position of the data loader is restored with the weights, and no rank is a batch behind.",
        "`orchestrator verify-resume RUN`",
        "unit/orchestrator/checkpoint/test_commit_store.py::test_meta_must_hold_position_and_receipt",
    ),
    Ask(
        "torchtitan#811",
        "Load a checkpoint, data position included, at another data-parallel degree.",
        "`orchestrator run JOB --set resources.workers=2`, after a stop with 4",
        RESHARDED,
    ),
    Ask(
        "Automodel#533",
        "The same.",
        "the same",
        RESHARDED,
    ),
    Ask(
        "verl#7401",
        "A resume from the end of an epoch trains the next epoch.",
        "`orchestrator run JOB`, again",
        "unit/orchestrator/data/samples/test_batches.py::test_a_batch_may_straddle_epochs",
    ),
    Ask(
        "prime-rl#3332",
        "A resume does not read the data from its beginning.",
        "`orchestrator verify-resume RUN`",
        "unit/orchestrator/data/samples/sections/test_order.py::"
        "test_any_resume_at_any_width_reads_the_same_samples",
    ),
)

NOT_HERE = {
    "faults within a step of learning from rewards, answered without a restart": "verl#7910",
    "silent corruption, found by computing a step twice": "torchtitan#4324",
}
"""What is not here, and the threads that ask for it."""
UNREAD = (
    "ray#65891, ray#63911, ray#64179, ray#64253, ray#55275, ray#41700, ray#58878, ray#66002, ray#60376, kuberay#4920, "
    "kueue#8712, kueue#14244, skypilot#8766, Oumi#2007, torchft#329, torchtitan#850, torchtitan#1210, torchtitan#4152, "
    "Automodel#1592, pytorch/rfcs#108, transformers#41159, streaming#725, levanter#391, monarch#2684, "
    "Megatron-LM#5785, LlamaFactory#10679, unsloth#4858, unsloth#2435, verl#1314, verl#7155, verl#7216, verl#1962, "
    "OpenRLHF#1322, NeMo-RL#4218, NeMo-RL#3297, trl#7294, trl#6797, AReaL#606, miles#1295, OpenRLHF#1146, "
    "axolotl#3394, llm-compressor#1754, llm-compressor#1520"
)
"""Threads of which nothing is claimed, since their text was not at hand."""

HEADER = """\
# Requests of users elsewhere

This page lists public requests of users of other projects, and what of them a run of this project does. The requests in
the first two tables were read in a stored copy of their threads in November 2026. `python tests/asks.py` writes the
page. The test of a row names its request.

JOB is a job file and RUN a run directory. `orchestrator chaos` needs no cluster: it trains the job on local nodes, once
without the fault and once with it, and compares the two.

"""


def page() -> str:
    """The page as Markdown."""
    met = [ask for ask in ASKS if not ask.lacks]
    part = [ask for ask in ASKS if ask.lacks]
    lines = ["## Here", "", "| request | what is asked for | try it | test |", "|---|---|---|---|"]
    lines += [f"| {linked(a)} | {a.wants} | {a.command} | `tests/{a.test}` |" for a in met]
    lines += [
        "",
        "## In part",
        "",
        "| request | what is asked for | not here | try it | test |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {linked(a)} | {a.wants} | {a.lacks} | {a.command} | `tests/{a.test}` |" for a in part]
    lines += ["", "## Not here", "", "| what | requests |", "|---|---|"]
    lines += [f"| {what} | {threads} |" for what, threads in NOT_HERE.items()]
    lines += [
        "",
        "## Not claimed",
        "",
        "The text of these requests was not at hand, so nothing is claimed of them:",
        "",
    ]
    return HEADER + "\n".join(lines) + f"\n{UNREAD}. kuberay#4285 was read and not tried.\n"


def linked(ask: Ask) -> str:
    """The request with the address of its thread."""
    repository, _, number = ask.thread.partition("#")
    return f"[{ask.thread}](https://github.com/{PLACES[repository]}/issues/{number})"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
