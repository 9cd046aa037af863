"""The page docs/peers.md: what other projects wrote for themselves, run against this project, and its contract tests by
older and newer releases of other libraries.

`python tests/peers.py` writes the page from the tables below. Tests compare the stored page with it, and count the
cases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from differences import ROOT, linked, pinned

from orchestrator.launch.doctor import are_among

PAGE = ROOT / "docs" / "peers.md"


@dataclass(frozen=True)
class Suite:
    """What another project wrote, and how it went.

    Attributes:
        library: the project, by its name in constraints.txt if it is there.
        what: what was run, and what it is compared with.
        cases: how many cases.
        differ: how many of them are refused or differ on purpose.
        first: what failed first, and what became of it.
        tests: the tests that run it, as `path below tests::name`.
        commit: the commit of a checkout, where no package has the files.
        counts: whether the test itself compares the number of its cases with this one.
    """

    library: str
    what: str
    cases: int
    first: str
    tests: tuple[str, ...]
    differ: int = 0
    commit: str = ""
    counts: bool = False

    @property
    def version(self) -> str:
        """The version that was run."""
        return self.commit or pinned()[self.library]


ANSWERS = "unit/orchestrator/data/prepare/test_predicted_answers.py"
SHIPPED = "unit/orchestrator/data/prepare/test_shipped_templates.py"
PAIRS = "unit/workloads/objectives/test_preferences_parity.py"
REWARDED = "unit/workloads/objectives/test_rewarded_parity.py"
GENERATE = "unit/workloads/model/test_generate.py"
MEANING = "unit/workloads/hf/files/test_meaning.py"
TASKS = "unit/orchestrator/evaluate/test_tasks_of_lm_eval.py"
SAMPLES = "unit/orchestrator/extensions/render/test_samples_of_kuberay.py"
LLAMA_FACTORY = "unit/orchestrator/data/prepare/test_rows_of_llama_factory.py"
FILES = "unit/orchestrator/data/sources/test_files_of_pyarrow.py"

ROWS_OF_LLAMA_FACTORY = {
    "alpaca_en_demo": 999, "alpaca_zh_demo": 1000, "identity": 91, "glaive_toolcall_en_demo": 300,
    "glaive_toolcall_zh_demo": 300, "dpo_en_demo": 300, "dpo_zh_demo": 300, "kto_en_demo": 300,
}  # fmt: skip
"""How many rows each file has."""
OF_VERSION_1 = 560
"""Rows of LLaMA-Factory's demonstration data in the form of its version 1."""
TASK_FILES = 1218
"""How many of every tenth of lm-eval's files may be included in a task."""
REFUSED_TASK_FILES = {"task": 87, "metric_list.metric": 86, "generation_kwargs": 6, "class": 2}
"""How many of the others are refused, by the key that is not taken."""

SUITES: Mapping[str, Suite] = {
    "templates": Suite(
        "trl",
        "Its 41 chat templates, each on one turn, two turns, calls of tools, and a thought. transformers' "
        "`apply_chat_template` writes the same tokens, and each answer stands after what a server shows.",
        164,
        "Templates that leave something out: 24 thoughts, 2 calls; 13 write no tools, 2 fail on two calls. Such rows "
        "are refused, or counted by `data.on_error`.",
        (f"{ANSWERS}::test_each_answer_stands_behind_what_a_server_shows",),
        differ=41,
    ),
    "training-templates": Suite(
        "trl",
        "Its 31 templates for training, on the same conversations: what they mark is what is predicted here.",
        124,
        "GLM 4 MoE's marks the token of the next turn, and DiffusionGemma's leaves out a tool's result: this project "
        "predicts what the model's own template writes. The others are refused as above.",
        (f"{ANSWERS}::test_what_is_predicted_is_what_trl_marks_without_what_a_server_shows",),
        differ=38,
    ),
    "shipped-templates": Suite(
        "trl",
        "The templates for training of ten families beside those that this project ships, on six conversations.",
        60,
        "25 conversations are not compared: a family's template writes no tools, no thoughts or no system message.",
        (f"{SHIPPED}::test_what_is_written_and_predicted_is_that_of_trl",),
        differ=25,
    ),
    "losses": Suite(
        "trl",
        "Its trainers for preferences (twenty steps) and its `GRPOTrainer` and `RLOOTrainer` (loss and gradient), "
        "called on the same batches.",
        26,
        "ORPO's mean over all tokens of a batch, and RLOO's clip of whole answers: rows of the differences.",
        (
            f"{PAIRS}::test_twenty_steps_have_the_losses_of_trl",
            f"{PAIRS}::test_twenty_steps_of_orpo_have_the_losses_of_trl",
            f"{REWARDED}::test_loss_and_gradient_are_those_of_trl",
            f"{REWARDED}::test_the_gradient_of_reinforce_is_that_of_rloo",
        ),
    ),
    "tasks": Suite(
        "lm-eval",
        "Its own task files, included by a file that names local rows: every answer of `hf` for the export, and the "
        "metrics.",
        29,
        "DROP ended with an error: its own F1 was taken for that of a classifier. Mended: a task with "
        "`process_results` computes its numbers alone.",
        (f"{TASKS}::test_the_export_answers_what_we_do",),
    ),
    "task-files": Suite(
        "lm-eval",
        "Every tenth of its 13,986 task files, included in the same way: whether a run would take the file.",
        TASK_FILES + sum(REFUSED_TASK_FILES.values()),
        "Refused are 87 groups and templates without a task, 86 metrics that `evaluate` would load from a hub or that "
        "the kind of task has not, 6 with beams or other settings of generation, and 2 Python classes.",
        (f"{TASKS}::test_nearly_every_task_file_may_be_included",),
        differ=sum(REFUSED_TASK_FILES.values()),
        counts=True,
    ),
    "greedy": Suite(
        "transformers",
        "Greedy `generate` of 18 classes through their exports: the same tokens.",
        18,
        "None of them now.",
        (f"{GENERATE}::test_greedy_search_is_that_of_transformers",),
    ),
    "settings": Suite(
        "transformers",
        "The 13 generation settings that change a text, each alone and all together, for a decoder and an "
        "encoder-decoder: the same tokens from the folder and from its export.",
        4,
        "Beams and contrastive search are not applied, and a note says so.",
        (f"{MEANING}::test_the_settings_of_a_folder_are_applied",),
    ),
    "shares": Suite(
        "transformers",
        "Its samplers at 48 combinations of temperature, top_k and top_p: the share of each token within 1/4096.",
        48,
        "Ties: it keeps all tokens as probable as the k-th, and this project k. A row of the differences.",
        (f"{GENERATE}::test_shares_of_tokens_are_those_of_transformers",),
    ),
    "files": Suite(
        "pyarrow",
        "Parquet and Feather files of its own tests: files of version 0.7.1 with indexes, and LZ4 blocks.",
        5,
        "Nothing.",
        (f"{FILES}::test_rows_are_those_that_pyarrow_reads",),
    ),
    "kuberay-samples": Suite(
        "kuberay",
        "Its sample RayClusters and RayJobs, through the schema and the checks of `cluster render kuberay`.",
        71,
        "A sample with `generateName` ended with an error, and `RAY_ENABLE_K8S_TOKEN_AUTH: true` was taken for a "
        "secret. Mended. 70 samples break rules of this project: they run as root, take no token, or have no limits.",
        (f"{SAMPLES}::test_no_sample_is_refused_but_by_our_own_rules",),
        commit="feeaf72",
        counts=True,
    ),
    "llama-factory": Suite(
        "LLaMA-Factory",
        "Its demonstration data in Alpaca's and ShareGPT's shapes, with calls of tools, pairs and judged answers: the "
        "tokens that transformers writes of each row.",
        sum(ROWS_OF_LLAMA_FACTORY.values()) + OF_VERSION_1,
        "`function_call`, a speaker, was an unknown role: 310 rows. `kto` could not read `messages`: 300. Mended. Rows "
        "of its version 1 stay refused, since their `loss_weight` would be lost: write `weight`, and `text` for "
        "`value`.",
        (f"{LLAMA_FACTORY}::test_every_row_has_the_tokens_of_transformers",
         f"{LLAMA_FACTORY}::test_rows_of_its_version_1_are_refused"),
        differ=OF_VERSION_1,
        commit="ff6d4d1",
        counts=True,
    ),
}  # fmt: skip

NOT_RUN = {
    "torchtitan's loss curves": "`tests/assets/losses` has them for its debug model on CUDA. The first loss depends on "
    "weights that CUDA's generator draws, and the text (`c4_test`) is not in a package, so no number can be compared.",
    "Megatron-LM's golden values": "They are for GPUs and text that is not public in a package.",
    "Tests of transformers, TRL and peft": "No package has them. Their behaviour is compared by calling the libraries.",
    "mistral-common": "It is no dependency. The template `shipped:mistral` is compared with its model card.",
}
"""What was looked at and not run, and why."""


@dataclass(frozen=True)
class Broken:
    """A contract that does not hold with some versions.

    Attributes:
        versions: a specifier for each library. All must apply.
        does: what is different.
        became: what was done about it.
        tests: a pattern that the names of the failing tests match.
    """

    versions: Mapping[str, str]
    does: str
    became: str
    tests: str

    def applies(self, installed: Mapping[str, str]) -> bool:
        """Return whether these versions are installed."""
        return are_among(installed, self.versions)


BROKEN: tuple[Broken, ...] = (
    Broken(
        {"transformers": "<5.4"},
        "Configurations are no dataclasses, so no pretrained folder is read.",
        "The lower bound is 5.4.",
        "with_transformers|equals_transformers|transformers_loads|of_trl|of_peft|settings_of_a_folder",
    ),
    Broken(
        {"transformers": "<5.5"},
        "Gemma 2 (by 0.07) and gpt-oss's class for sequences (by 0.8) have other logits in 5.0.0 and 5.4.0 than in "
        "5.23.0 and 5.24.0, which agree with this project. `AutoTokenizer` keeps the tokenizer class that a folder of "
        "Qwen 2 names, where 5.23.0 makes its own anew. The releases between were not run.",
        "`orchestrator doctor` warns.",
        r"equals_transformers\[(Gemma 2|gpt-oss, sequence classes)\]|would_make_anew_is_told",
    ),
    Broken(
        {"torch": ">=2.14"},
        "torch 2.15 refuses a second step of zero-bubble schedules: a receive buffer still belongs to the step before.",
        "pyproject.toml allows torch 2.13 alone.",
        r"test_parity::test_(two|four)_ranks_train_what_one_trains",
    ),
    Broken(
        {"deepspeed": "<0.19.8"},
        "In 0.18.0 a model under ZeRO 2 has another loss (by 0.07 %), and ZeRO 3 does not say which rank has a "
        "partition. The releases between were not run.",
        "The lower bound is 0.19.8.",
        "test_deepspeed::test_it_trains_what_one_process_trains",
    ),
    Broken(
        {"pydantic": "<2.12.2"},
        "A validator is given a field that its model does not have yet, so no job file is read. 2.12.1 cannot be "
        "installed: its core was withdrawn.",
        "The lower bound is 2.12.2.",
        ".",
    ),
)


@dataclass(frozen=True)
class Seen:
    """A run of the contract tests in one set of versions.

    Attributes:
        versions: the version of each library of SHOWN.
        result: how many tests passed and failed, or why they did not run.
    """

    versions: Mapping[str, str]
    result: str


SHOWN = (
    *(
        "transformers",
        "torch",
        "ray",
        "mlflow",
        "peft",
        "trl",
        "deepspeed",
        "lm-eval",
        "optuna",
        "tokenizers",
    ),
    "pydantic",
)
"""The libraries whose versions the page has."""


def versions_of(text: str) -> dict[str, str]:
    """The versions of the libraries of SHOWN, in their order."""
    return dict(zip(SHOWN, text.split(), strict=True))


SEEN: Mapping[str, Seen] = {
    "oldest, by earlier bounds": Seen(
        versions_of("5.0.0 2.13.0 2.60.0 3.17.0 0.21.0 1.16.0 0.18.0 0.4.13 5.0.0 0.22.1 2.12.0"),
        "204 pass, 65 fail",
    ),
    "oldest": Seen(
        versions_of("5.4.0 2.13.0 2.60.0 3.17.0 0.21.0 1.16.0 0.18.0 0.4.13 5.0.0 0.22.1 2.12.2"),
        "332 pass, 9 fail: 5 by two rows of the table below (the bound of DeepSpeed was raised then), 4 because "
        "datasets 4.7.0 writes other CSV files for the test",
    ),
    "newest": Seen(
        versions_of("5.24.0 2.13.0 2.60.0 3.17.2 0.21.2 1.16.0 0.19.8 0.4.13 5.0.0 0.23.3 2.14.4"),
        "341 pass, 0 fail",
    ),
    "beyond": Seen(
        versions_of("5.24.0 2.15.0 2.60.0 3.17.2 0.21.2 1.16.0 0.19.8 0.4.13 5.0.0 0.23.3 2.14.4"),
        "333 pass, 8 fail: pipelines with zero bubbles, and what ran in the same processes",
    ),
}
"""By the name of the set, see `tests/bench/contract_by_releases.py`."""

HEADER = """\
# Other projects' suites, and other versions

This page lists what other projects wrote for themselves (templates, task files, losses, manifests, data), how it went
when it was run against this project, and what failed first. `python tests/peers.py` writes it. Tests count the cases.

A suite with a version is in a package that `make install` installs; `make test` or `make test-long` runs it. A suite
with a commit needs a checkout of its project, and is skipped without one: `pytest TEST --peers FOLDER` runs it, where
FOLDER holds the checkout.

## Suites

| project | what | cases | as there | refused or different | what failed first | test |
|---|---|---|---|---|---|---|
"""


def page() -> str:
    """The page as Markdown."""
    lines = []
    for suite in SUITES.values():
        tests = "<br>".join(f"`{linked(test)}`" for test in suite.tests)
        lines.append(
            f"| {suite.library} {suite.version} | {suite.what} | {suite.cases:,} | {suite.cases - suite.differ:,} | "
            f"{suite.differ:,} | {suite.first} | {tests} |"
        )
    lines += ["", "## Not run", "", "| what | why |", "|---|---|"]
    lines += [f"| {what} | {why} |" for what, why in NOT_RUN.items()]
    return HEADER + "\n".join(lines) + "\n" + versions_section()


VERSIONS = """
## Older and newer releases

`make test-releases` makes an environment for each of three sets of versions, and runs the tests marked `contract` in
it: `oldest` has the lowest versions that pyproject.toml allows, `newest` the highest on the package index within its
bounds, and `beyond` the highest whatever the bounds. The versions of constraints.txt pass all tests.

The table is of 30 November 2026. On that day the index had no newer Ray, peft or TRL than the pinned ones, no nightly
torch, and of MLflow 3.18.0 only one of its two packages. A set takes two minutes on two processors, without the time of
making its environment.

"""


def versions_section() -> str:
    """The part of the page about older and newer releases."""
    lines = [f"| library | pinned | {' | '.join(SEEN)} |", "|---|---|" + "---|" * len(SEEN)]
    for name in SHOWN:
        found = [seen.versions.get(name, "") for seen in SEEN.values()]
        lines.append(f"| {name} | {pinned()[name]} | {' | '.join(found)} |")
    lines.append(f"| contract tests | all pass | {' | '.join(seen.result for seen in SEEN.values())} |")
    lines += ["", "| versions | what is different | what became of it |", "|---|---|---|"]
    for row in BROKEN:
        versions = ", ".join(f"{name} {bounds}" for name, bounds in row.versions.items())
        lines.append(f"| {versions} | {row.does} | {row.became} |")
    return VERSIONS + "\n".join(lines) + "\n"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
