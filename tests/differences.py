"""The page docs/differences.md: what other libraries do where a good guess is wrong, what this project does, and the
test that holds it.

`python tests/differences.py` writes the page from the table below. A test compares the stored page with it, looks up
every test that a row names, and compares versions with constraints.txt.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "differences.md"


@dataclass(frozen=True)
class Difference:
    """One behaviour of another library.

    Attributes:
        library: its name in constraints.txt.
        does: what it does.
        source: where that stands: a file of its package, a page, or a script of findings/.
        ours: what this project does.
        tests: the tests that hold it, as `path below tests::name`, perhaps with a parametrised id.
        version: a version that is not the one in constraints.txt; empty for that one.
    """

    library: str
    does: str
    source: str
    ours: str
    tests: tuple[str, ...]
    version: str = ""


TOKENIZER = "unit/orchestrator/data/encoding/test_tokenizer.py"
TRAINING = "unit/orchestrator/data/encoding/test_training.py"
AUTO = "unit/orchestrator/data/encoding/test_auto_tokenizer.py"
ANSWERS = "unit/orchestrator/data/prepare/test_predicted_answers.py"
BEHAVIOUR = "unit/workloads/hf/check/test_behaviour.py"
WEIGHTS = "unit/workloads/hf/files/test_weight_files.py"
OLDER = "unit/workloads/hf/files/test_older_form.py"
FOLDER = "unit/workloads/hf/convert/test_folder.py"
LABELS = "unit/workloads/hf/files/test_meaning_of_labels.py"
MEANING = "unit/workloads/hf/files/test_meaning.py"
RATE = "unit/orchestrator/optim/test_learning_rate.py"
EIGHT_BITS = "unit/orchestrator/optim/test_adamw_8bit.py"
DECAY = "unit/orchestrator/train/engines/test_weight_decay.py"
NORMS = "unit/orchestrator/optim/test_gradient_clipping.py"
EVALUATION = "unit/orchestrator/train/test_evaluation.py"
LORA = "unit/workloads/adapters/test_lora.py"
TRACKER = "unit/orchestrator/observe/test_mlflow_delivery.py"
MLFLOW = "unit/orchestrator/observe/test_mlflow_checks.py"
GGUF = "unit/orchestrator/extensions/gguf/test_write.py"
SPACE = "unit/orchestrator/tune/test_space.py"
SPLIT = "unit/orchestrator/data/samples/test_held_out_split.py"
SKIPPED = "dist/train/test_skipped.py"
BATCHES = "unit/orchestrator/data/samples/test_batches.py"
ORDER = "unit/orchestrator/data/samples/test_order.py"
SECTIONS = "unit/orchestrator/data/samples/sections/test_order.py"
MIXED = "unit/orchestrator/data/samples/mixture/test_mixed_order.py"
INTERLEAVE = "unit/orchestrator/data/samples/mixture/test_interleave.py"
SCHEDULERS = "unit/orchestrator/tune/test_schedulers.py"
KUBERAY = "unit/orchestrator/extensions/render/test_checks.py"
FRAMED = "unit/orchestrator/resolve/test_framed_text.py"

TARGET = "unit/orchestrator/export/test_target.py"
NAMED = "unit/orchestrator/data/prepare/test_named_tokens.py"
SHIPPED = "unit/orchestrator/data/prepare/test_shipped_templates.py"
PLAIN = "unit/workloads/objectives/test_fine_tuning_parity.py"
PAIRS = "unit/workloads/objectives/test_preferences_parity.py"
REWARDED = "unit/workloads/objectives/test_rewarded_parity.py"
CRASH = "unit/orchestrator/checkpoint/test_crash.py"
CRASH_DCP = "unit/orchestrator/checkpoint/test_crash_dcp.py"
SETUP = "unit/orchestrator/train/engines/test_deepspeed_setup.py"
CLEAN = "unit/orchestrator/data/clean/test_datatrove_rules.py"
REPEATED = "unit/orchestrator/data/clean/test_repeated_words.py"
OWN_ROWS = "ray/data/test_own_rows.py"
TABLES = "unit/orchestrator/data/sources/test_table_rows.py"
ARROW = "unit/orchestrator/data/sources/test_arrow_files.py"
IMPORT = "unit/orchestrator/extensions/importers/test_deepspeed.py"
QUEUE = "unit/cluster/jobs/test_job_queue.py"
JOBS = "unit/cluster/jobs/test_ray_jobs.py"
PROGRAM = "unit/cluster/workers/test_program.py"
SEARCH = "unit/orchestrator/tune/test_search.py"
MANIFESTS = "unit/orchestrator/extensions/render/test_manifests.py"
IMPORTANCE = "unit/orchestrator/tune/test_importance.py"
FRAMING = "unit/orchestrator/data/encoding/test_framing.py"
ROLLOUTS = "dist/test_rollouts_run.py"
ADVANTAGES = "unit/orchestrator/train/rollouts/test_advantages.py"
ROUTERS = "unit/workloads/hf/tables/test_router_weights.py"
NAMES = "unit/orchestrator/config/test_other_names.py"
PEFT = "unit/workloads/hf/export/test_adapter_folder.py"

TOPICS: dict[str, tuple[Difference, ...]] = {
    "Tokenizers": (
        Difference(
            "transformers",
            "For some kinds of models (Qwen 2) `AutoTokenizer` builds the pre-tokenizer from its class, whatever "
            "tokenizer.json says.",
            "findings/tokenizer_class_over_file.sh",
            "Training reads the file. The export says `PreTrainedTokenizerFast` where the class would cut another way.",
            (
                f"{AUTO}::test_a_tokenizer_that_transformers_would_make_anew_is_told[qwen2-PreTrainedTokenizerFast]",
            ),
        ),
        Difference(
            "transformers",
            "Truncation and padding that tokenizer.json stores are dropped when it is loaded. `tokenizers` applies "
            "them.",
            "transformers/tokenization_utils_tokenizers.py",
            "They are off.",
            (
                f"{TOKENIZER}::test_truncation_and_padding_of_a_loaded_tokenizer_are_off",
                f"{AUTO}::test_what_is_read_is_not_told_to_be_read_otherwise",
            ),
        ),
        Difference(
            "transformers",
            "A null in special_tokens_map.json erases the token that tokenizer_config.json names.",
            "findings/null_erases_end_token.sh",
            "The same.",
            (
                f"{TOKENIZER}::test_roles_are_those_of_the_tokenizer_that_transformers_loads[a null in the map]",
            ),
        ),
        Difference(
            "transformers",
            "A name such as `</s>` within a text is read as that special token.",
            "transformers/tokenization_utils_base.py, split_special_tokens",
            "It is text, unless `data.special_tokens: parse`. The preparation counts such names.",
            (f"{NAMED}::test_text_is_spelled_out_or_read_as_transformers_reads_it",),
        ),
        Difference(
            "transformers",
            "Which tokens stand around a text is decided by the post-processor alone; `add_bos_token` changes "
            "nothing for a byte-level file.",
            "findings/bos_flag_without_effect.sh",
            "The tokens around a text are those that the loaded tokenizer adds, in training, prompts and evaluation.",
            (f"{FRAMING}::test_the_frame_is_that_of_the_tokenizer",),
        ),
        Difference(
            "tokenizers",
            "Of two texts of equal length that are cut to an odd number of tokens, the second keeps the odd one.",
            "tokenizers, truncation strategy longest_first",
            "The same.",
            ("unit/workloads/objectives/test_supervised.py::test_two_texts_are_cut_as_tokenizers_cuts_them",),
        ),
        Difference(
            "tokenizers",
            "In every process, the WordPiece trainer numbers the letters inside of words in another order.",
            "findings/letters_numbered_anew.sh",
            "Equal texts give equal tokenizers in every process.",
            (f"{TRAINING}::test_equal_texts_give_equal_tokenizers_in_every_process",),
        ),
        Difference(
            "sentencepiece",
            "The number of threads decides which pieces a unigram model learns, and their ids.",
            "findings/threads_number_the_pieces.sh",
            "Equal texts give equal tokenizers with any number of threads.",
            (f"{TRAINING}::test_equal_texts_give_equal_tokenizers_in_every_process",),
        ),
    ),
    "Pretrained folders": (
        Difference(
            "transformers",
            "Version 5 writes the rotary base as `rope_parameters` alone. Version 4 does not read that and takes "
            "10,000.",
            "findings/rotary_base_between_versions.sh",
            "Exports have both forms. Version 4 computes the same logits from them.",
            (
                f"{OLDER}::test_both_forms_are_written",
                f"{OLDER}::test_transformers_4_computes_what_5_does",
            ),
        ),
        Difference(
            "transformers",
            "A GGUF file of Llama 3.1 is read without its scaling for long contexts, which is a tensor "
            "(`rope_freqs.weight`) there.",
            "findings/long_range_factors_dropped.sh",
            "A GGUF export has that tensor, as llama.cpp reads it. Train on from the folder, not from the GGUF file.",
            (f"{GGUF}::test_transformers_reads_the_same_model[llama-3.1, tied]",),
        ),
        Difference(
            "transformers",
            "`T5Config` turns `tie_word_embeddings: false` into true, and version 4 needs false for T5 1.1.",
            "findings/t5_head_stays_tied.sh",
            "The export says it.",
            (f"{OLDER}::test_an_export_says_what_transformers_4_asks_for[T5 1.1-wanted1]",),
        ),
        Difference(
            "transformers",
            "Saving one file over shards leaves their index behind. Loading ignores the index beside a whole file.",
            "findings/save_leaves_old_weights.sh",
            "The same file is read. An export into a bucket removes what an earlier export left.",
            (
                f"{WEIGHTS}::test_the_weights_are_those_that_transformers_loads[whole_after_shards]",
                f"{TARGET}::test_an_object_store_keeps_nothing_of_an_earlier_export_that_would_be_read_first",
            ),
        ),
        Difference(
            "transformers",
            "Saving shards over one file leaves the file, and loading takes the old file.",
            "findings/save_leaves_old_weights.sh",
            "The file is read as transformers reads it.",
            (f"{WEIGHTS}::test_the_weights_are_those_that_transformers_loads[shards_and_whole]",),
        ),
        Difference(
            "transformers",
            "Files named `shard-00000-model-...` of distributed saving come before model.safetensors.",
            "transformers/distributed/checkpoint.py",
            "A folder with such files is refused.",
            (f"{WEIGHTS}::test_files_of_distributed_training_come_first_in_transformers_and_are_refused",),
        ),
        Difference(
            "transformers",
            "Two stored tables are loaded as two, although the configuration says that they are tied.",
            "transformers/modeling_utils.py, tie_weights",
            "The same.",
            (f"{FOLDER}::test_weights_with_two_tables_are_not_tied_whatever_is_configured",),
        ),
        Difference(
            "transformers",
            "`original_max_position_embeddings` beside `rope_scaling` counts before the one inside it.",
            "transformers/modeling_rope_utils.py",
            "The same.",
            (f"{FOLDER}::test_original_positions_beside_the_rotary_ones_come_first",),
        ),
        Difference(
            "transformers",
            "A configuration with `label2id` alone has two labels without names.",
            "findings/label_names_lost.sh",
            "Such a folder has no names of labels, and the run says that rows are taken in order.",
            (
                f"{LABELS}::test_names_that_transformers_loses_are_no_names_here",
                f"{LABELS}::test_labels_that_nobody_named_are_taken_in_order_and_that_is_said",
            ),
        ),
        Difference(
            "transformers",
            "A label is a number. The order of labels in a table and in the head's configuration need not agree.",
            "transformers/configuration_utils.py, id2label",
            "Rows of the head follow the names in `data.labels`; other names are refused.",
            (
                f"{LABELS}::test_a_head_predicts_the_labels_by_name[Bert-sequence_classification]",
                f"{LABELS}::test_other_labels_are_refused_by_name_and_a_new_head_takes_any",
            ),
        ),
        Difference(
            "transformers",
            "mBART, PLBart and FSMT begin the decoder with the last token of the target, whatever "
            "`decoder_start_token_id` says.",
            "transformers, shift_tokens_right of each class",
            "The same, by class.",
            (f"{MEANING}::test_the_tables_of_classes_are_what_their_training_does",),
        ),
        Difference(
            "transformers",
            "`router_aux_loss_coef` weighs one loss over all layers, which is `top_k` where experts are used alike.",
            "transformers, load_balancing_loss_func",
            "`moe.auxiliary` weighs each layer's own loss, which is 1 there. Folders are converted both ways.",
            (f"{ROUTERS}::test_all_layers_together_weigh_what_they_do_in_transformers",),
        ),
        Difference(
            "torch",
            "`FlopCounterMode` counts no product of the experts in transformers' mixtures of experts, so an MFU that "
            "is computed from it is too low.",
            "findings/experts_multiply_nothing.sh",
            "FLOPs follow from the model's sizes, with the experts that a token chooses.",
            (
                "unit/workloads/model/test_count.py::test_flops_are_those_of_transformers_class",
                "unit/workloads/hf/as_they_are/test_hf_class.py::test_flops_are_counted_without_data",
            ),
        ),
    ),
    "Optimizers and schedules": (
        Difference(
            "transformers",
            "The first step of a warm-up has rate 0, so it trains nothing. The last step's rate is above 0.",
            "transformers/optimization.py",
            "The first step has lr / warm-up; all steps after the warm-up have the same rates.",
            (f"{RATE}::test_the_first_update_of_transformers_has_rate_0_and_all_after_the_warm_up_are_ours",),
        ),
        Difference(
            "deepspeed",
            "The first two steps of a warm-up have rate 0, and the warm-up is logarithmic unless `warmup_type` is "
            "linear. "
            "Its last rate is a step behind.",
            "deepspeed/runtime/lr_schedules.py",
            "As above. DeepSpeed's schedulers are not used with its engine.",
            (f"{RATE}::test_the_first_two_updates_of_deepspeed_have_rate_0_and_its_warm_up_is_logarithmic",),
        ),
        Difference(
            "torchtitan",
            "The first step has lr / warm-up, and a virtual last step keeps the last rate above 0.",
            "torchtitan/components/optimizer/lr_scheduler.py",
            "The same rates.",
            (f"{RATE}::test_the_first_and_the_last_update_are_those_of_torchtitan",),
            version="0.2.2",
        ),
        Difference(
            "transformers",
            "`get_wsd_schedule` decays as a cosine unless `decay_type` says otherwise.",
            "transformers/optimization.py",
            "`wsd` decays by 1 - sqrt, which is transformers' `1-sqrt`.",
            (
                f"{RATE}::test_wsd_of_transformers_falls_as_a_cosine_unless_told",
                f"{RATE}::test_wsd_is_that_of_transformers",
            ),
        ),
        Difference(
            "transformers",
            "The Trainer decays all but biases and parameters with `norm` in their names: also gpt-oss's sinks and "
            "XLNet's `mask_emb`, "
            "not T5's tables of distances.",
            "transformers/trainer.py, get_decay_parameter_names",
            "The same, but no vector decays.",
            (
                f"{DECAY}::test_a_family_decays_as_in_the_trainer",
                f"{DECAY}::test_a_class_that_is_run_as_it_is_decays_as_in_the_trainer",
            ),
        ),
        Difference(
            "torch",
            "`AdamW(model.parameters())` decays everything: biases, norms and embeddings. So does torchtitan's "
            "`default_adamw`.",
            "torch/optim/adamw.py; torchtitan/components/optimizer/optimizer.py",
            "Vectors never decay.",
            (
                f"{DECAY}::test_torch_decays_vectors_that_do_not_decay_here",
                "unit/orchestrator/optim/test_optimizers.py::test_vectors_are_neither_decayed_nor_scaled",
            ),
        ),
        Difference(
            "torch",
            "A gradient whose norm is exactly the bound is scaled by 1 - 1e-6, since 1e-6 is added to the norm.",
            "torch/nn/utils/clip_grad.py",
            "The same factor, under every layout.",
            (f"{NORMS}::test_gradients_at_the_bound_shrink_by_a_millionth_as_torch_has_it",),
        ),
        Difference(
            "torch",
            "With DTensor, `GradScaler` reduces the flag of an overflow by the placement of the first gradient. If "
            "that one is replicated, the rank with the overflow alone skips the update.",
            "findings/one_rank_skips_the_update.sh",
            "The norm over all ranks decides, so all ranks skip, under every layout.",
            (f"{SKIPPED}::test_so_it_is_under_other_layouts",),
        ),
        Difference(
            "deepspeed",
            "Gradients are clipped at 1.0 where the configuration has no `gradient_clipping`.",
            "deepspeed/runtime/constants.py",
            "`train.optimizer.clip` is 1.0 unless set; null becomes DeepSpeed's 0, which is off.",
            (
                f"{NORMS}::test_deepspeed_clips_at_1_unless_it_is_told_and_so_does_a_job",
                f"{SETUP}::test_the_batch_and_clipping_are_those_of_the_job",
            ),
        ),
        Difference(
            "transformers",
            "With accumulation, the Trainer multiplies the gradient of T5, BART and BERT by the number of "
            "micro-batches.",
            "findings/trainer_accumulation.sh",
            "A step is the mean over the predictions of its global batch, however it is cut.",
            ("unit/workloads/test_load.py::test_a_batch_may_be_cut_anywhere",),
        ),
        Difference(
            "transformers",
            "With accumulation, the routers' loss of a mixture of experts weighs as many times more as there are "
            "micro-batches. So does AdaLoRA's orthogonality (peft).",
            "findings/side_losses_times_accumulation.sh",
            "The weight is that of the job, however a batch is cut: a sequence has a loss of its own.",
            (
                f"{BEHAVIOUR}::test_the_loss_of_routers_is_theirs_however_a_batch_is_cut",
                "unit/workloads/test_load.py::test_a_batch_may_be_cut_anywhere",
            ),
        ),
        Difference(
            "transformers",
            "Packed rows are kept apart by their positions only if the model keeps no cache. In a loop of one's own it "
            "keeps one, and rows see each other.",
            "findings/cache_joins_packed_rows.sh",
            "No cache is kept in training. A class that mixes documents is refused.",
            (
                f"{BEHAVIOUR}::test_a_cache_lets_packed_documents_see_each_other_and_none_is_kept_here",
                "unit/workloads/objectives/test_isolated.py::"
                "test_a_packed_row_has_the_loss_of_its_documents_one_by_one",
            ),
        ),
        Difference(
            "torch",
            "`torch.optim.Muon` iterates in bfloat16.",
            "torch/optim/_muon.py",
            "Iterations are in fp32, in bf16 under a precision of fewer bits.",
            ("unit/orchestrator/optim/test_muon.py::test_twenty_steps_are_those_of_torch",),
        ),
        Difference(
            "transformers",
            "The embedding of the padding token has no gradient.",
            "torch, nn.Embedding(padding_idx)",
            "It has one where padding is in the loss, as in span extraction.",
            (f"{PLAIN}::test_twenty_steps_have_the_losses_of_a_plain_loop[span]",),
        ),
    ),
    "Batches and evaluation": (
        Difference(
            "transformers",
            "`top_k` also keeps the tokens that are exactly as probable as the k-th.",
            "transformers/generation/logits_process.py, TopKLogitsWarper",
            "k tokens are kept.",
            ("unit/workloads/model/test_generate.py::test_top_k_keeps_k_tokens_though_more_are_as_probable",),
        ),
        Difference(
            "transformers",
            "`Trainer.evaluate` takes the mean of a batch's tokens for each row of it, so that the batch size "
            "changes the loss.",
            "transformers/trainer.py, evaluation_loop",
            "The loss is the sum over all tokens by their number, as in torchtitan's validation.",
            (f"{EVALUATION}::test_an_evaluation_of_the_trainer_weighs_rows_and_not_tokens",),
        ),
        Difference(
            "transformers",
            "`label_smoothing_factor` smooths `eval_loss` too.",
            "findings/smoothing_in_eval_loss.sh",
            "Reported losses exclude smoothing, in training and in evaluations.",
            (
                "unit/orchestrator/train/engines/test_torch_engine.py::"
                "test_groups_and_smoothed_labels_train_as_plain_torch_does",
            ),
        ),
        Difference(
            "transformers",
            "`EarlyStoppingCallback` stores its count in each checkpoint, and a resume does not read it: patience "
            "begins anew.",
            "findings/patience_begins_anew.sh",
            "Evaluations without a gain before a stop or a fault count.",
            ("unit/orchestrator/train/test_training_progress.py::test_what_a_commit_says_goes_on",),
        ),
        Difference(
            "transformers",
            "The last batch of an epoch is a step of its own, however few rows it has.",
            "transformers/trainer.py, get_train_dataloader",
            "Every step has the global batch: a batch may straddle epochs, and nothing is dropped.",
            (
                f"{EVALUATION}::test_an_evaluation_of_the_trainer_weighs_rows_and_not_tokens",
                f"{BATCHES}::test_a_batch_may_straddle_epochs",
            ),
        ),
        Difference(
            "torch",
            "With gloo, a gradient through `torch.distributed.nn.functional.all_gather` is scrambled if it is "
            "transposed in memory: in-batch negatives written with einsum learn from wrong gradients.",
            "findings/gathered_gradient_is_scrambled.sh",
            "Collectives have the same result and gradient for any layout in memory.",
            ("dist/test_collectives.py::test_the_layout_in_memory_changes_no_result_and_no_gradient",),
        ),
        Difference(
            "torch",
            "`DistributedSampler` repeats samples until the ranks divide them, so that some are evaluated twice.",
            "torch/utils/data/distributed.py",
            "Each sample counts once; what fills up a pass counts nothing.",
            (f"{EVALUATION}::test_torch_s_sampler_repeats_samples_where_ranks_do_not_divide_them",),
        ),
        Difference(
            "torchao",
            "AdamW in 8 bits rounds a small second moment to zero if another one of its block is large. The update is "
            "then divided by `eps` alone, and moves the weight by hundreds of learning rates.",
            "findings/eight_bit_moments_vanish.sh",
            "In `adamw_8bit` a second moment above zero never gets the code of zero.",
            (f"{EIGHT_BITS}::test_numbers_far_below_their_block_s_largest_move_no_more_than_under_adamw",),
            "0.18.0",
        ),
        Difference(
            "lm-eval",
            "`loglikelihood_rolling` counts the beginning token that the tokenizer adds as text, and predicts it "
            "from another one.",
            "lm_eval/models/huggingface.py",
            "The text alone is predicted.",
            (f"{FRAMED}::test_likelihoods_of_tasks_are_those_of_lm_eval_and_a_whole_text_has_no_bos",),
        ),
        Difference(
            "datatrove",
            "Gopher's rules on repetition compare n-grams whose words are joined without a space. A table of numbers "
            "in which nothing repeats is removed.",
            "findings/joined_words_repeat.sh",
            "Words stay apart, and the table is kept.",
            (f"{REPEATED}::test_a_table_of_numbers_in_which_nothing_repeats_is_kept",),
        ),
        Difference(
            "datatrove",
            "`PIIFormatter` takes its replacements in turns, so that a text depends on the documents before it in its "
            "part.",
            "datatrove/pipeline/formatters/pii.py",
            "A replacement is always the same.",
            (f"{CLEAN}::test_a_replacement_does_not_depend_on_earlier_documents",),
        ),
        Difference(
            "accelerate",
            "The loss of a micro-batch is divided by `gradient_accumulation_steps` even if the epoch ends before the "
            "group is full: the last step of an epoch has a part of its gradient.",
            "findings/last_group_counts_less.sh",
            "Every step has the global batch, across the end of an epoch too.",
            (f"{BATCHES}::test_a_batch_may_straddle_epochs",),
        ),
        Difference(
            "torchdata",
            "A resumed `StatefulDataLoader` with a generator of one's own and no workers shuffles all epochs after the "
            "current one otherwise than the uninterrupted one.",
            "findings/generator_after_a_resume.sh",
            "The order of an epoch follows from the seed and the epoch's number, so a resume changes none.",
            (
                f"{ORDER}::test_every_index_of_an_epoch_comes_once",
                f"{ORDER}::test_the_order_is_fixed_forever",
            ),
            "0.11.0",
        ),
        Difference(
            "accelerate",
            "`skip_first_batches` after `load_state` in the middle of an epoch passes over another order: some rows "
            "are trained twice and others never.",
            "findings/skipped_batches_of_another_epoch.sh",
            "The order follows from the seed and the position alone, so a resume reads what is left of the epoch.",
            (
                f"{SECTIONS}::test_any_resume_at_any_width_reads_the_same_samples",
                f"{BATCHES}::test_a_batch_may_straddle_epochs",
            ),
        ),
        Difference(
            "datasets",
            "A stream that is shuffled before `take` and `skip` divide it is divided anew in each epoch: validation "
            "rows are trained from the second epoch on.",
            "findings/split_rows_come_back.sh",
            "Whether a document is held out follows from its text alone, in every epoch.",
            (f"{SPLIT}::test_neither_order_nor_cuts_nor_more_files_move_a_document",),
        ),
        Difference(
            "datasets",
            "`map` keys its cache by the name of an imported function: after a change of its code, or of what it "
            "calls, it returns the rows of before.",
            "findings/changed_helper_old_rows.sh",
            "Prepared data is keyed by the code of your functions, and by all that they import from the same folder.",
            ("unit/workloads/own/test_object_reference.py::test_all_that_it_imports_from_its_folder_counts",),
        ),
        Difference(
            "torch",
            "`multinomial` adds up float32 weights in float32: of millions of rows, light ones at the end of the "
            "table are never drawn.",
            "findings/short_rows_are_never_drawn.sh",
            "Nothing is drawn by weight: an epoch has the exact number of samples of each source.",
            (f"{ORDER}::test_an_epoch_takes_its_weight_of_every_source",),
        ),
        Difference(
            "datasets",
            "If the ranks divide the files of a mixture, all ranks draw from the same source at every step: with one "
            "row a rank, a global batch is of one source.",
            "findings/ranks_draw_the_same_source.sh",
            "The order is that of the whole job, and ranks share out its batches: any part of it has the proportions.",
            (
                f"{INTERLEAVE}::test_every_window_of_positions_has_the_proportions_but_for_a_constant",
                f"{BATCHES}::test_every_layout_computes_the_same_global_batch",
            ),
        ),
        Difference(
            "datasets",
            "`set_epoch` changes the order of the files of a streamed data set that nobody shuffles. Trainer calls it.",
            "findings/epochs_move_files.sh",
            "With `shuffle: sections`, the sections come in their own order in every epoch.",
            (f"{SECTIONS}::test_an_epoch_has_every_sample_once_section_after_section",),
        ),
        Difference(
            "litdata",
            'With `batching_method="per_stream"`, two data sets alternate, whatever their weights are.',
            "findings/weights_of_whole_batches.sh",
            "Sources come in proportion to their weights, in any part of the order.",
            (f"{INTERLEAVE}::test_every_window_of_positions_has_the_proportions_but_for_a_constant",),
            "0.2.76",
        ),
        Difference(
            "litdata",
            "`train_test_split` shuffles whole chunks and takes rows in order. Of one chunk the last rows are held "
            "out, for every seed.",
            "findings/random_split_of_neighbours.sh",
            "`data.validation.share` draws single documents, by their text.",
            (
                f"{SPLIT}::test_neither_order_nor_cuts_nor_more_files_move_a_document",
                f"{SPLIT}::test_about_the_share_is_held_out",
            ),
            "0.2.76",
        ),
        Difference(
            "mosaicml-streaming",
            "Stratified batches round the share of each stream. The epoch ends where one runs out, and the rest of the "
            "others is left out: one row in five with 100 and 900 rows and batches of 8.",
            "findings/a_stream_runs_out.sh",
            "A pass over a source has every sample once, whatever the batch is, and what is left of it comes next.",
            (f"{MIXED}::test_every_pass_has_every_sample_once",),
            "0.13.0",
        ),
        Difference(
            "mosaicml-streaming",
            "The state of a loader counts a batch that is packed into one sequence as one row, so that a resume reads "
            "most of the epoch again.",
            "findings/packed_batch_is_one_row.sh",
            "The position counts samples, and a packed sequence is one: a resume reads what comes next.",
            (f"{MIXED}::test_a_run_that_is_cut_off_and_goes_on_at_other_widths_reads_the_same",),
            "0.13.0",
        ),
        Difference(
            "webdataset",
            "All epochs have one order of the shards. With workers, `detshuffle` has one too, unless they are "
            "persistent.",
            "findings/same_shards_every_epoch.sh",
            "Each epoch has an order of its own.",
            (f"{ORDER}::test_epochs_and_seeds_have_their_own_order",),
            "1.0.2",
        ),
        Difference(
            "ray",
            "Rows of Ray Data come as their blocks end, unless `preserve_order` is set.",
            "ray/data/_internal/execution/interfaces/execution_options.py",
            "It is set: rows have the order of the data set, and a run is the same run.",
            (
                f"{OWN_ROWS}::test_rows_come_as_blocks_end_where_ray_is_not_told_to_keep_their_order",
                f"{OWN_ROWS}::test_rows_have_the_order_of_the_dataset_and_the_files_their_names",
            ),
        ),
        Difference(
            "ray",
            "In a block that holds a null, `map_batches` gives integers as float64 by default, which rounds those "
            "above 2^53.",
            "findings/null_rounds_ids.sh",
            "Rows of a Ray Data pipeline are read as Arrow tables, in which integers stay as they are.",
            (f"{OWN_ROWS}::test_a_null_rounds_no_integer_beside_it",),
        ),
        Difference(
            "datasets",
            "A saved data set may read its rows through indices (after `shuffle` or `select`), which its Arrow files "
            "do not show.",
            "datasets/arrow_dataset.py, _indices",
            "Such a folder is refused: save it after `flatten_indices`.",
            (f"{ARROW}::test_a_dataset_with_an_order_of_its_own_is_refused",),
        ),
        Difference(
            "webdataset",
            "Its reader makes the names of members small; that of `datasets` leaves them as they are.",
            "https://github.com/webdataset/webdataset, tariterators.py",
            "Either name is right. Two members that differ in capitals alone are refused.",
            (f"{TABLES}::test_members_of_an_archive_are_called_so_in_small_and_in_capital_letters",),
            version="main",
        ),
    ),
    "Conversations, preferences and rewards": (
        Difference(
            "trl",
            "`SFTTrainer` trains all tokens of `messages`, users' too; of a prompt and a completion the completion.",
            "trl/trainer/sft_config.py, assistant_only_loss",
            "The assistant's answers alone are trained.",
            (f"{ANSWERS}::test_trl_trains_all_of_a_conversation_by_default_and_here_the_answers_alone",),
        ),
        Difference(
            "trl",
            "24 of 41 shipped chat templates write no thoughts; gpt-oss's writes the first of two calls.",
            "trl/chat_templates",
            "A row of which the template leaves something out is refused or counted.",
            (
                f"{ANSWERS}::test_each_answer_stands_behind_what_a_server_shows",
                f"{ANSWERS}::test_what_a_template_leaves_out_is_refused_though_it_stands_elsewhere",
            ),
        ),
        Difference(
            "trl",
            "Qwen 3's own template leaves out earlier thoughts, so that a conversation is not what a server showed "
            "in each turn.",
            "trl/chat_templates/qwen3.jinja",
            "Answers are learnt turn by turn, each behind what a server shows.",
            (f"{ANSWERS}::test_thoughts_that_stand_in_the_content_are_learnt_or_missed",),
        ),
        Difference(
            "trl",
            "Templates for training mark the line break after the end of a turn as part of the answer (Qwen 3).",
            "trl/chat_templates/qwen3_training.jinja",
            "The same.",
            (
                f"{SHIPPED}::test_what_is_written_and_predicted_is_that_of_trl",
                f"{ANSWERS}::test_thoughts_that_stand_in_the_content_are_learnt_or_missed",
            ),
        ),
        Difference(
            "trl",
            "GLM 4 MoE's template closes no answer; TRL's template for training marks the token of the next turn.",
            "trl/chat_templates/glm4moe.jinja",
            "An event says that the model does not learn to stop.",
            (
                "unit/orchestrator/resolve/test_chat.py::test_it_is_said_where_no_answer_is_closed[glm4moe-False]",
            ),
        ),
        Difference(
            "trl",
            "ORPO adds the mean over all tokens of a batch, those of prompts too.",
            "trl/experimental/orpo",
            "It is the mean over a pair's chosen answer, so that it does not depend on the batch. Equal where the "
            "two are one.",
            (f"{PAIRS}::test_twenty_steps_of_orpo_have_the_losses_of_trl",),
        ),
        Difference(
            "trl",
            "With `num_iterations`, a resume generates other answers by newer weights where the run was between two "
            "passes over the same ones: no checkpoint has the buffer, and its count starts at 0.",
            "trl/trainer/grpo_trainer.py, _prepare_inputs",
            "`rollout.epochs`: a checkpoint is saved between rollouts, and the answers after it are the same again.",
            (
                f"{ROLLOUTS}::test_a_run_that_is_killed_between_updates_of_the_same_answers_has_the_same_bits",
                f"{ROLLOUTS}::test_several_updates_on_the_same_answers_are_those_of_trl",
            ),
        ),
        Difference(
            "trl",
            "With `steps_per_generation`, GRPO shuffles the answers of a group over several updates, and `dapo` "
            "divides by the tokens of all of them.",
            "trl/trainer/grpo_trainer.py, shuffle_sequence_dict",
            "With `rollout.steps`, each step has whole groups, and divides by its own tokens.",
            (f"{ROLLOUTS}::test_several_updates_on_the_same_answers_are_those_of_a_plain_loop",),
        ),
        Difference(
            "trl",
            "GRPO's default multiplies the divergence by the importance ratio, which changes the gradient and not "
            "the loss.",
            "findings/on_policy_kl_gradient.sh",
            "The same default and the same gradient; `use_bias_correction_kl: false` turns it off.",
            (
                f"{REWARDED}::test_loss_and_gradient_are_those_of_trl",
                "unit/workloads/objectives/test_rewarded.py"
                "::test_the_gradient_of_each_estimate_is_that_of_its_divergence",
            ),
        ),
        Difference(
            "trl",
            "Rewards are scaled by the sample deviation of the group (n - 1) plus 1e-4.",
            "trl/trainer/grpo_trainer.py",
            "The same.",
            (f"{ADVANTAGES}::test_scaled_advantages_are_those_of_trl",),
        ),
    ),
    "Adapters": (
        Difference(
            "peft",
            "`use_rslora` divides alpha by the root of the rank; `r` and `lora_alpha` are 8 by default.",
            "peft/tuners/lora/config.py",
            "The same for `rslora`. Rank 16 and alpha 32 by default.",
            (f"{LORA}::test_twenty_steps_are_those_of_peft[rslora]",),
        ),
        Difference(
            "peft",
            "`rank_pattern` alone changes the scale too: alpha is divided by the pattern's rank.",
            "peft/tuners/lora/model.py",
            "An adapter has one rank and one scale. `rank_pattern` in a job file is refused with the reason.",
            (
                f"{LORA}::test_a_rank_by_pattern_changes_peft_s_scale_and_here_all_have_one",
                f"{NAMES}::test_so_has_every_argument_of_trl_and_accelerate",
            ),
        ),
        Difference(
            "peft",
            "Merging LoRA of a tied head adds it to the embedding too: the merged model gives other logits, with a "
            "warning. "
            "Merging a head that was trained whole sets `tie_word_embeddings` to false.",
            "peft/tuners/tuners_utils.py",
            "Adapters are of layers alone: a pattern for the head is refused, and a merged export stays tied.",
            (f"{LORA}::test_a_merge_of_a_tied_head_moves_peft_s_embedding_and_a_head_is_refused_here",),
        ),
        Difference(
            "peft",
            "An adapter that begins as PiSSA or OLoRA takes its directions out of the base. Without the adapter the "
            "model is then not the base, and DPO compares with it.",
            "findings/reference_of_the_residual.sh",
            "A and B begin as in LoRA's paper, so the model without an adapter is the base. `init_lora_weights` in a "
            "job file is refused with the reason.",
            (
                "dist/test_preferences_run.py::test_an_adapter_is_compared_with_its_base",
                f"{NAMES}::test_so_has_every_argument_of_trl_and_accelerate",
            ),
        ),
        Difference(
            "peft",
            "There is no form for bottlenecks and BitFit, and none for pairs of stacked experts that others read.",
            "peft/tuners",
            "These are exported merged; asking for an adapter's folder is refused.",
            (
                f"{PEFT}::test_what_peft_has_no_form_for_is_refused",
                f"{LORA}::test_experts_have_a_pair_each_and_are_merged",
            ),
        ),
    ),
    "Checkpoints": (
        Difference(
            "torch",
            "Saving a distributed checkpoint over an earlier one can lose both: a load after a kill fails, or gives "
            "a mixture.",
            "torch/distributed/checkpoint/filesystem.py",
            "A folder for each step, and a manifest written last. All crash points are enumerated.",
            (
                f"{CRASH_DCP}::test_a_kill_while_overwriting_loses_both_copies",
                f"{CRASH}::test_posix_sample",
            ),
        ),
        Difference(
            "torch",
            "A finished save is lost by a power cut: neither its metadata nor its folders are synced.",
            "torch/distributed/checkpoint/filesystem.py",
            "Files and folders are synced before the manifest exists.",
            (
                f"{CRASH_DCP}::test_a_power_cut_takes_a_finished_save",
                f"{CRASH}::test_posix_sample",
            ),
        ),
        Difference(
            "torch",
            "The metadata of a distributed checkpoint is a pickle, which may run code when it is read.",
            "torch/distributed/checkpoint/filesystem.py, read_metadata",
            "It is read by an allow-list; anything else is refused. Own checkpoints are JSON and safetensors.",
            ("unit/workloads/hf/files/test_dcp.py::test_metadata_that_would_run_something_is_refused",),
        ),
        Difference(
            "deepspeed",
            "Its checkpoints are loaded with `weights_only=False`.",
            "deepspeed/runtime/checkpoint_engine/torch_checkpoint_engine.py",
            "An import refuses a pickle that would run code, unless told `--trust`.",
            (f"{IMPORT}::test_a_pickle_that_would_run_code_is_refused_and_does_not_run",),
        ),
    ),
    "Tracking": (
        Difference(
            "mlflow",
            "A database store holds the largest float (1.797e308) in place of infinity, and reads it back as that.",
            "mlflow/store/tracking/sqlalchemy_store.py",
            "A row that is found again in MLflow has infinity.",
            (f"{TRACKER}::test_an_infinity_comes_back_from_mlflow_as_one",),
        ),
        Difference(
            "mlflow",
            "Values of parameters are cut at 6,000 characters without an error, and the first value of a parameter "
            "stays.",
            "mlflow/utils/validation.py",
            "Values are cut before they are sent. A longer run is another run in MLflow, with its own parameters.",
            (
                f"{TRACKER}::test_a_run_arrives_whole",
                f"{TRACKER}::test_an_extended_run_is_another_one_with_all_its_rows",
            ),
        ),
        Difference(
            "mlflow",
            "One name that is refused, such as `a//b`, refuses all that is logged with it.",
            "mlflow/utils/validation.py",
            "Each name is tried alone once; all others arrive.",
            (f"{TRACKER}::test_a_name_that_mlflow_does_not_take_holds_back_nothing_else",),
        ),
        Difference(
            "mlflow",
            "A step that is logged twice is two points of a curve.",
            "mlflow/store/tracking/sqlalchemy_store.py",
            "A step is sent once, also after a controller was killed.",
            (f"{TRACKER}::test_a_controller_killed_goes_on_after_the_last_step",),
        ),
        Difference(
            "mlflow",
            "A folder as a store is refused since version 3, unless `MLFLOW_ALLOW_FILE_STORE` is set.",
            "mlflow/store/tracking/file_store.py",
            "Refused before the run, with `sqlite:///mlflow.db` as the way out.",
            (f"{MLFLOW}::test_a_folder_is_refused_as_mlflow_refuses_it",),
        ),
        Difference(
            "mlflow",
            "The name of an experiment has at most 500 characters.",
            "mlflow/utils/validation.py",
            "The same bound, before the run.",
            (f"{MLFLOW}::test_the_name_of_an_experiment_is_as_long_as_mlflow_takes_it",),
        ),
    ),
    "Searching": (
        Difference(
            "optuna",
            "Version 5 has `constant_liar` on: running trials count as bad ones.",
            "optuna/samplers/_tpe/sampler.py",
            "It is asked for by name, so that no version decides it.",
            (f"{SCHEDULERS}::test_running_trials_count_as_bad_ones_whatever_optuna_takes_by_itself",),
        ),
        Difference(
            "optuna",
            "Version 5 computes importances by PED-ANOVA, over the best trials.",
            "optuna/importance/__init__.py",
            "The report has fANOVA, over all trials.",
            (f"{IMPORTANCE}::test_importances_are_fanova_s_whatever_optuna_takes_by_itself",),
        ),
        Difference(
            "ray",
            "ASHA of Ray Tune decides at once and for good, so that the first trials are trained to the end.",
            "ray/tune/schedulers/async_hyperband.py",
            "A trial waits at its rung until others have come, and goes on when it is among the best.",
            (f"{SCHEDULERS}::test_asha_promotes_as_soon_as_enough_have_come",),
        ),
        Difference(
            "ray",
            "PBT multiplies a value by 1.2 or 0.8 without a look at its range: a momentum between 0.8 and 0.99 "
            "exceeds 1. An integer of 1 or 2 is rounded to itself and never moves.",
            "findings/mutation_leaves_its_range.sh",
            "Values stay within their range, and a whole number moves by at least one.",
            (
                f"{SPACE}::test_a_perturbed_value_moves_and_stays_in_range",
                f"{SPACE}::test_small_whole_numbers_move_too",
            ),
        ),
        Difference(
            "ray",
            "Ray Tune ends a search in order on SIGINT alone; SIGTERM leaves trials without a word.",
            "ray/tune/tune.py",
            "Every signal that asks for an end ends it as Ctrl-C does.",
            (f"{SEARCH}::test_a_search_that_is_asked_to_end_ends_as_after_ctrl_c",),
        ),
    ),
    "Clusters": (
        Difference(
            "kuberay",
            "The name of a RayJob has at most 47 characters, that of a RayCluster 53, and they are DNS labels that "
            "begin with a letter.",
            "https://github.com/ray-project/kuberay, ray-operator/controllers/ray/utils/validation.go",
            "Longer names of jobs become such names; a manifest that breaks the rule is refused.",
            (
                f"{KUBERAY}::test_a_job_name_leaves_room_for_its_cluster",
                "unit/orchestrator/extensions/render/test_cluster_needs.py::test_every_job_name_becomes_a_dns_label",
            ),
            version="1.6",
        ),
        Difference(
            "kubernetes",
            "`kubectl` reads `n` as false and `1e6` as a number; Python's YAML reads them as texts.",
            "https://yaml.org/type/bool.html",
            "Rendered files quote every text that some reader takes for something else.",
            (f"{MANIFESTS}::test_text_is_quoted_that_some_reader_takes_for_something_else",),
            version="any",
        ),
        Difference(
            "ray",
            "The autoscaler keeps the last request for resources alone.",
            "ray/autoscaler/sdk/sdk.py",
            "The request is repeated while a job waits, and withdrawn with it.",
            (f"{QUEUE}::test_the_autoscaler_is_asked_again_since_it_keeps_only_the_last_request",),
        ),
        Difference(
            "ray",
            "A process keeps the first cluster token that it finds.",
            "ray/_private/authentication",
            "A connection's token is of that connection; the next cluster is asked with its own.",
            (f"{JOBS}::test_a_token_of_a_connection_is_that_of_no_cluster_after_it",),
        ),
        Difference(
            "ray",
            "Workers have the working directory first on their path: a `random.py` there hides Python's.",
            "ray/_private/workers/default_worker.py",
            "Folders of a job come last.",
            (f"{PROGRAM}::test_a_file_of_the_user_s_hides_no_module_in_a_process_of_ranks",),
        ),
    ),
}

HEADER = """\
# Where good guesses are wrong

This page lists behaviour of other libraries that users meet and seldom expect, and what this project does instead or
alike. `python tests/differences.py` writes it. Every row names the test that holds it. Where a test runs the other
library too, a new version that behaves differently fails it.

Versions are those of `constraints.txt`, with which the tests run. A version in brackets is another one: the behaviour
was read in its source, or the test installs it.
"""


def pinned() -> dict[str, str]:
    """Versions by the names of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().split()
    return dict(line.split("==") for line in lines)


def rows() -> list[Difference]:
    """All rows of the page."""
    return [each for topic in TOPICS.values() for each in topic]


def page() -> str:
    """The page as Markdown."""
    known = pinned()
    parts = [HEADER]
    for topic, found in TOPICS.items():
        lines = [f"\n## {topic}\n", "| library | what it does | here | test |", "|---|---|---|---|"]
        for each in found:
            version = f"({each.version})" if each.version else known[each.library]
            source = f"`{each.source}`" if "://" not in each.source else each.source
            tests = "<br>".join(f"`{named}`" for named in map(linked, each.tests))
            lines.append(f"| {each.library} {version} | {each.does}<br>{source} | {each.ours} | {tests} |")
        parts.append("\n".join(lines) + "\n")
    return "".join(parts)


def linked(named: str) -> str:
    """A test as the page shows it."""
    return f"tests/{named}".replace("|", "\\|")


def missing(tests: Iterable[str]) -> list[str]:
    """Those of the tests that no file defines; parametrised ids are left out of the comparison."""
    return [named for named in tests if _function(named) is None]


def words_of(named: str) -> str:
    """The name and the docstring of a test; empty if it does not exist."""
    found = _function(named)
    return f"{found.name}\n{ast.get_docstring(found) or ''}" if found else ""


def _function(named: str) -> ast.FunctionDef | None:
    path, _, name = named.partition("::")
    file = ROOT / "tests" / path
    if not file.is_file():
        return None
    name = re.sub(r"\[.*\]$", "", name)
    tree = ast.parse(file.read_text())
    return next((each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == name), None)


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
