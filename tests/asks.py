"""The page docs/asks.md: public requests of users of other projects, and what of them is here.

`python tests/asks.py` writes the page from the table below. A test compares the stored page with it, and checks that
the name or the docstring of each named test holds the repository and the number of its request.
"""

from __future__ import annotations

from dataclasses import dataclass

from differences import ROOT

PAGE = ROOT / "docs" / "asks.md"
PLACES = {
    "DeepSpeed": "deepspeedai/DeepSpeed",
    "Megatron-LM": "NVIDIA/Megatron-LM",
    "ModernBERT": "AnswerDotAI/ModernBERT",
    "NeMo-RL": "NVIDIA-NeMo/RL",
    "Oumi": "oumi-ai/oumi",
    "OpenRLHF": "OpenRLHF/OpenRLHF",
    "trl": "huggingface/trl",
    "Automodel": "NVIDIA-NeMo/Automodel",
    "axolotl": "axolotl-ai-cloud/axolotl",
    "llm-compressor": "vllm-project/llm-compressor",
    "maxtext": "AI-Hypercomputer/maxtext",
    "miles": "radixark/miles",
    "ms-swift": "modelscope/ms-swift",
    "streaming": "mosaicml/streaming",
    "dstack": "dstackai/dstack",
    "kuberay": "ray-project/kuberay",
    "monarch": "meta-pytorch/monarch",
    "prime-rl": "PrimeIntellect-ai/prime-rl",
    "ray": "ray-project/ray",
    "skypilot": "skypilot-org/skypilot",
    "torchft": "meta-pytorch/torchft",
    "torchtitan": "pytorch/torchtitan",
    "transformers": "huggingface/transformers",
    "verl": "verl-project/verl",
    "AReaL": "inclusionAI/AReaL",
    "unsloth": "unslothai/unsloth",
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
FROZEN = "dist/test_rollouts_run.py::test_a_frozen_rank_is_replaced_and_changes_no_bit"
SCORED = "unit/orchestrator/rewards/test_scorer.py::test_answers_are_scored_at_the_same_time"
EPOCHS = "unit/orchestrator/data/samples/test_batches.py::test_a_batch_may_straddle_epochs"
ANY_WIDTH = "unit/orchestrator/data/samples/sections/test_order.py::test_any_resume_at_any_width_reads_the_same_samples"
COMMITS = "unit/orchestrator/checkpoint/test_commit_store.py"
CONTROLLER = "unit/orchestrator/controller/test_controller.py"
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
        "`orchestrator chaos JOB --fault stop@1:6`; then `events.jsonl` and `profiles/hang-attempt-1/` of the run",
        "dist/test_missing_rank.py::test_a_frozen_rank_of_eight_is_named",
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
        f"{COMMITS}::test_meta_must_hold_position_and_receipt",
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
        EPOCHS,
    ),
    Ask(
        "prime-rl#3332",
        "A resume does not read the data from its beginning.",
        "`orchestrator verify-resume RUN`",
        ANY_WIDTH,
    ),
    Ask(
        "OpenRLHF#1322",
        "A resume of GRPO skips no prompt whose answers were generated and not yet trained on.",
        "`orchestrator run JOB`, again",
        ANSWERS,
    ),
    Ask(
        "trl#7294",
        "Answers that are dropped do not hold back the position at which GRPO resumes. (Here none is dropped.)",
        "`orchestrator verify-resume RUN`",
        ANSWERS,
    ),
    Ask(
        "torchtitan#3751",
        "A preempted run that learns from rewards resumes at its step, and generates with the weights of that step.",
        "`orchestrator run JOB`, again",
        ANSWERS,
    ),
    Ask(
        "NeMo-RL#3312",
        "Each checkpoint of GRPO has the weights of its step, though it is written in the background.",
        "`orchestrator verify-resume RUN`",
        "dist/test_rollouts_run.py::test_a_commit_is_evaluated_and_replayed_as_the_run_was",
    ),
    Ask(
        "NeMo-RL#3589",
        "An answer that could not be generated or scored is not learned from as one with a reward of zero.",
        "`rewards: [{own: FUNCTION, on_error: skip}]`",
        "dist/test_rollouts_run.py::test_an_answer_without_a_reward_is_left_out_and_said",
    ),
    Ask(
        "NeMo-RL#4218",
        "A log-probability that the sampler does not give is not taken for 0.0.",
        "`sampler_difference` in the rows of a run with `objective: grpo`",
        "unit/workloads/objectives/test_rewarded.py::"
        "test_what_the_sampler_says_of_probabilities_enters_no_loss",
    ),
    Ask(
        "verl#7155",
        "A step does not wait for ever for an answer that never comes.",
        "`orchestrator chaos JOB --fault stop@1:5`",
        FROZEN,
    ),
    Ask(
        "AReaL#606",
        "Processes that generate answers beside the trainer come and go while it trains.",
        "`rollout: {workers: {min: 1, max: 4}}`",
        "dist/test_rollouts_run.py::test_rollout_workers_that_come_and_die_change_no_bit",
    ),
    Ask(
        "trl#6797",
        "Weights that cannot be handed to those who generate are an error within a bound, and no hang.",
        "`orchestrator chaos JOB --fault stop@1:5`",
        FROZEN,
    ),
    Ask(
        "verl#1962",
        "Own reward functions are computed in parallel.",
        "`rewards: [{own: FUNCTION}]`",
        SCORED,
    ),
    Ask(
        "verl#2236",
        "Rewards that ask another model are computed in parallel.",
        "the same",
        SCORED,
    ),
    Ask(
        "transformers#41723",
        "SIGTERM leads to a checkpoint of the present step, and the same command resumes from it.",
        "`kill -TERM PID` of `orchestrator run JOB`",
        "ray/test_interrupted.py::test_a_signal_to_all_of_the_group_ends_the_run_with_a_commit",
    ),
    Ask(
        "Automodel#2972",
        "A run that its machine or its time limit ends has a checkpoint of the last step.",
        "`kill -TERM PID` of `orchestrator run JOB`",
        "ray/test_interrupted.py::test_a_signal_to_all_of_the_group_ends_the_run_with_a_commit",
    ),
    Ask(
        "transformers#38961",
        "What was trained since the last checkpoint is kept if hardware or memory fails.",
        "`checkpoint: {snapshot_every: auto}`",
        "ray/test_failures.py::test_snapshots_in_the_memory_of_other_nodes_lose_no_step",
        "a save at the moment of the failure: the last snapshot is kept, in the memory of another node",
    ),
    Ask(
        "miles#1724",
        "A process that replaces a lost one generates no answer before it has the weights of the step.",
        "`rollout: {workers: {min: 1, max: 4}}`",
        "dist/test_rollouts_run.py::test_rollout_workers_that_come_and_die_change_no_bit",
    ),
    Ask(
        "streaming#869",
        "Resume after the first epoch of a mixture whose sources are read in part or several times.",
        "`orchestrator run JOB`, again",
        ANY_WIDTH,
    ),
    Ask(
        "llm-compressor#2509",
        "Fine-tune with simulated quantisation, under sharding, and export what vLLM reads.",
        "`quantize: {weights: int4}`, `orchestrator checkpoint export RUN`",
        "dist/test_quantised_export.py::test_a_run_that_trained_for_int4_is_loaded_by_transformers",
        "NVFP4, and a trial with vLLM: transformers loads the folder through compressed-tensors",
    ),
    Ask(
        "transformers#35782",
        "A resume passes over a checkpoint whose save was cut short.",
        "`orchestrator chaos JOB --fault torn@6`",
        f"{CONTROLLER}::test_a_commit_without_its_manifest_never_was",
    ),
    Ask(
        "ray#55350",
        "A checkpoint that cannot be uploaded for a while does not end the training.",
        "`orchestrator chaos JOB --fault outage@6`",
        f"{CONTROLLER}::test_a_save_that_fails_is_told_and_training_goes_on",
    ),
    Ask(
        "ray#54576",
        "A machine on which work keeps failing gets none for a while.",
        "`orchestrator run JOB`",
        "unit/orchestrator/controller/test_health.py::"
        "test_a_node_where_ranks_keep_failing_gets_none_for_a_while",
    ),
    Ask(
        "DeepSpeed#7200",
        "Resume a training of 4 GPUs without ZeRO on 8.",
        "`orchestrator run JOB --set resources.workers=8`, after a stop with 4",
        RESHARDED,
    ),
    Ask(
        "verl#2265",
        "Resume with another number of nodes.",
        "the same",
        RESHARDED,
    ),
    Ask(
        "transformers#43718",
        "Resume with another batch per device at the same global batch, and end at the same step.",
        "`orchestrator run JOB --set parallel.micro_batch=4`, after a stop with another",
        RESHARDED,
    ),
    Ask(
        "transformers#40691",
        "A resume after the first epoch keeps the order of samples.",
        "`orchestrator verify-resume RUN`",
        EPOCHS,
    ),
    Ask(
        "torchtitan#4686",
        "Weights and position in the data are restored from the same step.",
        "`orchestrator verify-resume RUN`",
        f"{COMMITS}::test_meta_must_hold_position_and_receipt",
    ),
    Ask(
        "ModernBERT#246",
        "A resume does not take hours to pass over the data that was used.",
        "`orchestrator run JOB`, again",
        ANY_WIDTH,
    ),
    Ask(
        "verl#1314",
        "The failure of a node of hundreds does not end a training that learns from rewards, which goes on by itself.",
        "`orchestrator chaos JOB --fault node@1:6`",
        "ray/test_rollout_workers.py::test_nodes_that_are_lost_while_answers_are_generated_change_no_bit",
        "a trial with hundreds of nodes: five real nodes of Ray on one machine were tried",
    ),
    Ask(
        "verl#7216",
        "Two runs of the same reinforcement learning have the same bits.",
        "`train: {determinism: bitwise}`",
        "dist/test_rollouts_run.py::test_any_width_has_the_same_bits_where_bits_are_asked_for",
        "a trial on GPUs",
    ),
    Ask(
        "Megatron-LM#5785",
        "Two runs have the same bits, and a resumed run those of one that nothing disturbed, at a small price.",
        "`train: {determinism: bitwise}`, `orchestrator verify-resume RUN`",
        "dist/test_bitwise_run.py::test_kills_that_change_the_width_change_no_bit",
        "a trial on GPUs, and the price there",
    ),
    Ask(
        "OpenRLHF#1146",
        "Learn from the k largest logits of a teacher, on several GPUs and machines.",
        "`distill: {teacher: hf:FOLDER, logits: {source: stored, k: 64}}`",
        "dist/test_distillation_run.py::test_logits_are_stored_under_every_layout",
        "a trial on GPUs, or on several machines",
    ),
    Ask(
        "axolotl#3394",
        "Quantise a model that was trained for it, whatever version loads it.",
        "`quantize: {weights: int4}`, `orchestrator checkpoint export RUN`",
        "dist/test_quantised_export.py::test_a_run_that_trained_for_int4_is_loaded_by_transformers",
        "a trial with Gemma 3; other versions of the libraries were tried by hand, with a Llama",
    ),
    Ask(
        "ray#58878",
        "Say why the workers of some machines take long to find each other.",
        "`orchestrator status RUN`, `orchestrator logs RUN`",
        "unit/orchestrator/controller/test_hang_diagnosis.py::test_missing_is_who_does_not_wait_while_others_do",
        "the cause in the network: which rank is silent or missing is said, and its node",
    ),
    Ask(
        "ray#60376",
        "Workers that are slow to start are not taken for a lack of room, and not started over for ever.",
        "`limits: {restarts: 10}`",
        f"{CONTROLLER}::test_a_placement_that_fails_takes_the_same_road",
        "a key for the limits: 30 seconds for room, and 180 more for the processes to start",
    ),
    Ask(
        "ray#66002",
        "Two runs at once are not placed on the same capacity.",
        "`orchestrator submit JOB --priority 1`",
        "ray/test_queue.py::test_a_lower_job_makes_room_with_a_commit_and_goes_on",
        "what programs outside of this queue ask Ray's autoscaler for: a run does not count it",
    ),
    Ask(
        "torchft#329",
        "One that comes back gets its state quickly.",
        "`checkpoint: {snapshot_every: auto}`",
        "ray/test_failures.py::test_snapshots_in_the_memory_of_other_nodes_lose_no_step",
        "a trial on GPUs; measured with small models on CPUs",
    ),
    Ask(
        "monarch#2684",
        "The process at the root may fail, or its machine, without a service outside of the cluster.",
        "`orchestrator cluster render kuberay JOB`",
        HEAD,
        "a head without Redis or a disk that comes back, and workers that go on without it: they end, and the run "
        "resumes from its checkpoint",
    ),
    Ask(
        "Oumi#2007",
        "A training on several nodes of Slurm begins, and does not wait for ever.",
        "`orchestrator cluster render slurm JOB --runs DIR --to .`, `sbatch NAME.sbatch`",
        "ray/test_slurm.py::test_it_commits_at_the_signal_is_requeued_and_goes_on",
        "a trial on a Slurm cluster: real nodes of Ray are started by a stand-in for srun",
    ),
    Ask(
        "kuberay#5211",
        "Each attempt has a number, and what an earlier one still writes does no harm.",
        "`orchestrator cluster render kuberay JOB`",
        f"{COMMITS}::test_an_attempt_that_was_overtaken_commits_nothing",
        "waiting until all pods of the attempt before are gone, which only KubeRay can do",
    ),
    Ask(
        "torchtitan#4324",
        "A step is computed again and compared, so that silent corruption stops the training before the update.",
        "`resources: {verify: {every: 200}}`; `orchestrator chaos JOB --set resources.verify.every=5 "
        "--fault product@1:7`",
        "dist/test_verified_run.py::test_a_wrong_rank_leaves_no_bit_behind",
    ),
    Ask(
        "ray#41700",
        "What a save that some ranks never finished leaves behind is no checkpoint, and no part of a later one.",
        "`orchestrator chaos JOB --fault torn@6`",
        f"{COMMITS}::test_a_late_writer_of_a_dead_attempt_changes_nothing",
    ),
    Ask(
        "torchtitan#1210",
        "Held-out loss while a model trains, under any parallelism, and lm-eval's tasks for its checkpoints.",
        "`data: {validation: {share: 0.01}}` with `evaluate: {every: 200}`; `orchestrator evaluate RUN --tasks FILE`",
        "dist/test_evaluation.py::test_every_layout_gives_the_same_numbers",
        "diffusion models, and tasks on several ranks: one process answers them",
    ),
    Ask(
        "torchtitan#4152",
        "Saved checkpoints are evaluated by others while the trainer trains on.",
        "`evaluate: {every: 200, where: beside}`",
        "dist/test_evaluation_beside.py::test_the_bits_of_an_evaluation_in_the_gang",
        "tasks of each checkpoint while the trainer trains on: held-out sets are evaluated then, tasks after the run",
    ),
    Ask(
        "unsloth#2435",
        "Fine-tune on several GPUs, an adapter too.",
        "`resources: {workers: 2}` with `workload: {adapter: {kind: lora, rank: 16}}`",
        "dist/train/test_adapters.py::test_an_adapter_is_the_same_under_every_layout",
        "a trial on several GPUs: several processes on CPUs agree with one",
    ),
    Ask(
        "NeMo-RL#3297",
        "The log-probability on record is that of the token that was drawn, whichever others the sampler returns.",
        "`rollout: {engine: vllm, workers: 1}`",
        "unit/orchestrator/train/rollouts/test_vllm_sampler.py::"
        "test_the_log_probability_of_the_drawn_token_is_taken_from_among_others",
        "a trial with vLLM itself: a package with its interface stands in its place",
    ),
    Ask(
        "kuberay#4920",
        "A job keeps its progress when its pods are stopped and started elsewhere.",
        "`orchestrator cluster render kuberay JOB`",
        HEAD,
        "checkpoints of pods by Kubernetes, which the request wants KubeRay to use: a run resumes from its own",
    ),
    Ask(
        "miles#1031",
        "The log-probabilities of generation and training are equal to the bit.",
        "`train: {determinism: bitwise}`",
        "unit/orchestrator/train/rollouts/test_training_pass.py::"
        "test_probabilities_are_those_of_training_to_the_bit",
        "a trial on GPUs, generation by SGLang, and tensor parallelism",
    ),
    Ask(
        "AReaL#1426",
        "A check of an answer that hangs is ended at its time limit, and holds no worker back from later answers.",
        "`rewards: [{own: FUNCTION, timeout: 5}]`",
        "unit/orchestrator/rewards/test_scorer.py::test_a_function_that_hangs_costs_its_time_limit",
    ),
    Ask(
        "unsloth#2292",
        "Learn several times from the same answers, so that the ratio of probabilities is not always 1.",
        "`rollout: {epochs: 3}`",
        "dist/test_rollouts_run.py::test_several_updates_on_the_same_answers_are_those_of_a_plain_loop",
    ),
    Ask(
        "prime-rl#1957",
        "Each predicted token weighs the same, however ranks, micro-batches and context parallelism divide them.",
        "`parallel: {micro_batch: 2, cp: 2}` with `objective: conversation`",
        "dist/train/test_fine_tuning.py::test_fine_tuning_is_the_same_under_every_layout",
    ),
    Ask(
        "prime-rl#821",
        "Checkpoints are safetensors, and loading one unpickles nothing.",
        "`orchestrator checkpoint verify RUN`",
        "unit/orchestrator/checkpoint/test_no_pickle.py::test_nothing_is_unpickled",
    ),
    Ask(
        "ms-swift#4505",
        "A resume of streamed and packed data goes on at its position.",
        "`data: {streaming: true, packing: best_fit}`; `orchestrator run JOB`, again",
        "dist/test_streaming_run.py::test_it_trains_while_data_is_prepared_as_if_all_were_there",
    ),
    Ask(
        "maxtext#2882",
        "A learning rate that stays until it falls, so that training can go on from before its fall.",
        "`optimizer: {schedule: wsd, decay: 500}`; `orchestrator run JOB --set train.steps=9000`, after 5000",
        "dist/test_extension.py::test_an_extended_run_has_the_bits_of_a_long_one",
    ),
    Ask(
        "Megatron-LM#5533",
        "Muon for weights that are sharded, whose update needs whole matrices.",
        "`optimizer: {name: muon}` with `parallel: {zero: 3}`",
        "dist/train/test_muon.py::test_every_feature_of_a_layout_trains_what_one_process_trains",
    ),
    Ask(
        "llm-compressor#1028",
        "Fine-tune a pruned model without losing its zeros, and load the result in transformers.",
        "`workload: {init_from: RUN}` with `prune: {keep: true}`",
        "dist/test_prune_run.py::test_a_run_that_begins_with_it_trains_the_zeros_with_a_note_or_holds_them",
        "one test of both: that transformers loads the zeros of a pruned run has a test of its own",
    ),
    Ask(
        "ray#59270",
        "Evaluations of checkpoints that were under way when the driver died are made after its restart.",
        "`evaluate: {every: 200, where: beside}`; `orchestrator run JOB`, again",
        "dist/test_evaluation_beside.py::test_a_controller_that_is_killed_meanwhile",
    ),
)

NOT_HERE = {
    "faults within a step of learning from rewards, answered without a restart": "verl#7910",
    "quantisation by AWQ, whose calibration hangs in the request": "llm-compressor#1520",
    "what Kueue does: a job that grows in another cluster, several failed nodes replaced": "kueue#8712, kueue#14244",
}
"""What is not here, and the threads that ask for it. They were read too."""
UNREAD = (
    "ray#65891, ray#63911, ray#64179, ray#64253, ray#55275, skypilot#8766, torchtitan#850, "
    "Automodel#1592, pytorch/rfcs#108, transformers#41159, streaming#725, "
    "levanter#391, LlamaFactory#10679, unsloth#4858, miles#1295, llm-compressor#1754"
)
"""Threads of which nothing is claimed, since their text was not at hand."""
TRIED = """\
They were looked for by number and by subject among the stored threads and pages; in the histories of their
repositories, except those of ray, skypilot and transformers, which were too large; and in files that cite them. One was
cited: a tool for checkpoints names torchtitan#850 for shards that cannot be read without own code.
"""
"""How they were looked for."""

HEADER = """\
# Requests of users elsewhere

This page lists public requests of users of other projects, and what of them a run of this project does. The requests in
its tables were read in a stored copy of their threads in November 2026. `python tests/asks.py` writes the
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
    return HEADER + "\n".join(lines) + f"\n{UNREAD}.\n\n{TRIED}\nkuberay#4285 was read and not tried.\n"


def linked(ask: Ask) -> str:
    """The request with the address of its thread."""
    repository, _, number = ask.thread.partition("#")
    return f"[{ask.thread}](https://github.com/{PLACES[repository]}/issues/{number})"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
