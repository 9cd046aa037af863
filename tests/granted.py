"""The page docs/granted.md: what users of other trainers take for granted, whether it works, and where that is said.

`python tests/granted.py` writes the page from the table below. A test compares the stored page with it, and checks that
each test exists and that each page has the words that a user would look for.
"""

from __future__ import annotations

from dataclasses import dataclass

from differences import ROOT

PAGE = ROOT / "docs" / "granted.md"


@dataclass(frozen=True)
class Thing:
    """One thing that users expect.

    Attributes:
        name: what it is called elsewhere.
        how: the command or the keys that do it.
        said: the page below docs/ that says so.
        words: words that this page has.
        test: the test that holds it, as `path below tests::name`; empty if it does not work.
    """

    name: str
    how: str
    said: str
    words: str
    test: str = ""


EXPORT, TASKS, NAMES = "guides/export.md", "guides/tasks.md", "guides/names.md"
SERVER = "unit/orchestrator/evaluate/test_model_server.py"
FOREIGN = "unit/orchestrator/launch/foreign_jobs/test_translate.py"
LABELLED = "unit/orchestrator/launch/test_labelled_rows.py"
LORA = "unit/workloads/adapters/test_lora.py"
FOLLOW = "unit/orchestrator/observe/sinks/test_follow.py"
THINGS = (
    Thing("Talk to the model", "`orchestrator chat RUN`", EXPORT, "orchestrator chat", f"{SERVER}::test_the_commands"),
    Thing("An OpenAI-compatible server", "`orchestrator serve-model EXPORT`", EXPORT, "/v1/chat/completions",
          f"{SERVER}::test_a_conversation_is_answered_as_by_transformers"),
    Thing("Streamed answers, stop strings", "`stream`, `stop` of a request", EXPORT, "with streams",
          f"{SERVER}::test_text_is_continued_and_cut_at_a_stop_string"),
    Thing("Push to the Hub", "`checkpoint.push: USER/NAME`, `checkpoint export --push`", EXPORT, "--push USER/NAME",
          "unit/orchestrator/export/test_hub.py::test_an_export_arrives_and_the_token_is_in_no_message"),
    Thing("Own model in transformers", "`checkpoint export --form hf`, `trust_remote_code=True`", "guides/own-code.md",
          "trust_remote_code=True", "dist/test_own_export.py::test_a_stranger_reads_and_continues_it"),
    Thing("Classify my texts", "`init --from-hf ENCODER --data FILE`", TASKS, "Classify my texts",
          f"{LABELLED}::test_labels_are_listed_and_counted_in_every_kind_of_file"),
    Thing("Names of a ClassLabel", "the same", "guides/labelled-data.md", "ClassLabel",
          f"{LABELLED}::test_names_of_a_class_label_keep_their_order"),
    Thing("A data set of `save_to_disk`", "`init --data FOLDER`", "guides/data.md", "save_to_disk",
          f"{LABELLED}::test_a_folder_of_saved_conversations_is_seen"),
    Thing("An axolotl.yaml", "`init --from axolotl.yaml`", NAMES, "init --from", f"{FOREIGN}::test_axolotl"),
    Thing("A TRL or Trainer command", "`init --from script.sh`", NAMES, "init --from",
          f"{FOREIGN}::test_the_script_of_a_trainer"),
    Thing("A torchtitan TOML", "`init --from config.toml`", NAMES, "TOML", f"{FOREIGN}::test_torchtitan"),
    Thing("A verl script", "`init --from run.sh`", NAMES, "verl", f"{FOREIGN}::test_verl"),
    Thing("A SentencePiece model", "`data.tokenizer: tokenizer.model`", "guides/tokenizers.md", "SentencePiece",
          "unit/orchestrator/data/encoding/test_sentencepiece_file.py::test_ids_are_those_of_sentencepiece"),
    Thing("A tiktoken file", "`data.tokenizer: cl100k_base.tiktoken`", "guides/tokenizers.md", "tiktoken",
          "unit/orchestrator/data/encoding/test_tiktoken_file.py::test_what_is_no_such_file_is_told"),
    Thing("See what the model sees", "`data inspect JOB --set a.b=c`", "guides/data.md", "data inspect",
          "unit/orchestrator/cli/test_data.py::test_a_packed_sample_is_shown_as_the_model_sees_it"),
    Thing("RoPE scaling by transformers' names", "`workload.changes: {rope_scaling: {rope_type: yarn, factor: 4}}`",
          "guides/models.md", "rope_type: yarn",
          "unit/workloads/model/test_positions.py::test_llama3_stretches_long_waves_and_keeps_short_ones"),
    Thing("A warning of texts that are too long", "`plan`", "guides/models.md", "max_position_embeddings",
          "unit/orchestrator/launch/test_preflight.py::test_a_text_longer_than_the_declared_positions_is_told"),
    Thing("LoRA", "`workload.adapter: {kind: lora}`", TASKS, "kind: lora",
          f"{LORA}::test_twenty_steps_are_those_of_peft"),
    Thing("A merged adapter", "`checkpoint.export: hf`", TASKS, "adapter merged", f"{LORA}::test_the_export_is_merged"),
    Thing("QLoRA", "`workload.adapter.quantize: nf4`", NAMES, "nf4",
          "unit/workloads/adapters/test_nf4.py::test_twenty_steps_are_those_of_peft_on_a_base_in_4_bits"),
    Thing("8-bit Adam", "`train.optimizer.name: adamw_8bit`", "guides/training.md", "adamw_bnb_8bit",
          "unit/orchestrator/optim/test_adamw_8bit.py::test_twenty_steps_are_those_of_a_plain_loop"),
    Thing("Early stopping", "`stop_when`", NAMES, "stop_when",
          "dist/test_evaluation.py::test_a_run_that_gains_nothing_ends_early_with_its_best_commit"),
    Thing("SWA and EMA", "`checkpoint.average`", NAMES, "checkpoint.average",
          "dist/test_average.py::test_a_moving_average_is_that_of_a_plain_loop_and_changes_no_bit_of_training"),
    Thing("F1 and Matthews", "`evaluate.metrics: [f1, matthews]`", "guides/labelled-data.md", "matthews",
          "unit/workloads/objectives/test_metrics.py::test_metrics_of_a_class_are_scikit_learns"),
    Thing("Weights & Biases", "`sinks.wandb: {project: NAME}`", "guides/mlflow.md", "wandb",
          f"{FOLLOW}::test_weights_and_biases_has_each_step_once"),
    Thing("TensorBoard", "`sinks.tensorboard`", "guides/mlflow.md", "tensorboard",
          f"{FOLLOW}::test_tensorboard_reads_each_step_once_whoever_was_killed"),
    Thing("Go back to a checkpoint", "`checkpoint rollback RUN --step N`", "guides/run-tasks.md", "checkpoint rollback",
          "dist/test_rollback.py::test_a_run_that_went_back_makes_the_same_bits_again"),
    Thing("List and remove runs", "`orchestrator runs`", "guides/run-tasks.md", "--remove",
          "unit/orchestrator/cli/test_runs.py::test_runs_are_listed_with_their_sizes"),
    Thing("A notebook", "`examples/notebook.ipynb`", "guides/python.md", "notebook",
          "ray/test_notebook.py::test_the_notebook_runs"),
    Thing("Several seeds with mean and band", "`run JOB --seeds N`, `compare runs/NAME-seeds`", "guides/run-tasks.md",
          "--seeds", "dist/test_seeds.py::test_seeds_of_one_command_are_runs_and_what_is_missing_is_trained"),
    Thing("Norms and histograms by layer", "`train.layer_statistics: {every: 100}`", "guides/watching.md",
          "layer_statistics", "dist/train/test_layer_statistics.py::test_statistics_are_those_of_one_process"),
    Thing("A learning-rate range test", "`run JOB --lr-range 1e-6:1`", "guides/tuning.md", "--lr-range",
          "dist/test_lr_range.py::test_rates_rise_in_a_run_and_one_is_suggested"),
    Thing("Epochs", "no: `train.steps` counts steps; `init --from` computes them", NAMES, "**Epochs.**"),
    Thing("Callbacks", "no: own metrics, objectives, optimizers and sinks", NAMES, "**Callbacks.**"),
    Thing("PPO with a value network", "no: `grpo` and `reinforce` compare answers", NAMES, "**PPO**"),
    Thing("`lora_dropout`", "no: dropout is `workload.dropout`", NAMES, "lora_dropout"),
)  # fmt: skip
HEADER = """\
# What is taken for granted

This page lists what users of other trainers expect, whether it works here, and where that is said.
`python tests/granted.py` writes it; a test checks that each test exists and that each page says so.

| thing | works | how | said in | test |
|---|---|---|---|---|
"""


def page() -> str:
    """The page as Markdown."""
    return HEADER + "".join(map(row, THINGS))


def row(thing: Thing) -> str:
    """One thing as a row of the table."""
    said = f"[{thing.said.rpartition('/')[2]}]({thing.said})"
    works, test = ("yes", f"`tests/{thing.test}`") if thing.test else ("no", "")
    return f"| {thing.name} | {works} | {thing.how.removeprefix('no: ')} | {said} | {test} |\n"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
