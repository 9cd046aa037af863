"""Names of other systems for keys and values of a job file: torchtitan, Hugging Face's Trainer, TRL and peft,
DeepSpeed, Megatron-LM, Lightning.
"""

from __future__ import annotations

from collections.abc import Mapping

_KEYS: Mapping[str, tuple[str, ...]] = {
    "it follows from train.global_batch, the workers and parallel.micro_batch": (
        *("gradient_accumulation", "gradient_accumulation_steps", "grad_accum", "grad_accumulation"),
        *("accumulate_grad_batches", "accumulation_steps"),
    ),
    "train.global_batch is the number of sequences in a step, whatever the number of workers": (
        *("batch_size", "train_batch_size", "global_batch_size"),
    ),
    "parallel.micro_batch is the number of sequences that a rank computes at once": (
        *("per_device_train_batch_size", "micro_batch_size", "train_micro_batch_size_per_gpu"),
        *("local_batch_size", "per_device_batch_size"),
    ),
    "evaluations use batches of train.global_batch; evaluate.batches limits their number": (
        *("per_device_eval_batch_size", "eval_batch_size"),
    ),
    "train.optimizer.lr": ("learning_rate", "lr", "max_lr", "base_lr"),
    "train.optimizer.final_lr is min_lr divided by lr": (
        *("min_lr", "lr_min", "eta_min", "end_lr", "lr_end"),
    ),
    "train.optimizer.final_lr is the final learning rate as a share of lr": (
        *("min_lr_factor", "min_lr_ratio", "min_lr_rate", "lr_end_ratio"),
    ),
    "biases and norms (vectors) never have weight decay; for other parameters set it in "
    "train.optimizer.groups, as in [{match: [tokens.weight], weight_decay: 0}]": (
        *("no_decay", "no_weight_decay", "no_decay_params", "no_weight_decay_params", "no_wd"),
    ),
    "train.optimizer.groups sets learning rate and weight decay for groups of parameters": (
        *("param_groups", "parameter_groups", "optimizer_grouped_parameters", "lr_mult", "lr_multiplier"),
    ),
    "set train.optimizer.betas, as in [0.9, 0.95]": (*("adam_beta1", "adam_beta2", "beta1", "beta2"),),
    "train.optimizer.eps": ("adam_epsilon", "epsilon", "adam_eps"),
    "train.optimizer.name": ("optim", "optimizer_type"),
    "train.steps": ("max_steps", "train_iters", "training_steps", "num_steps", "iterations", "total_steps"),
    "train.steps counts optimizer steps; there are no epochs": (
        *("num_train_epochs", "epochs", "num_epochs", "max_epochs"),
    ),
    "train.optimizer.warmup, steps or a share such as 5%": (
        *("warmup_steps", "warmup_ratio", "warmup_iters", "lr_warmup_iters", "lr_warmup_steps"),
        *("warmup_num_steps", "lr_warmup_fraction"),
    ),
    "train.optimizer.decay is the number of last steps of schedule wsd; linear and cosine decay "
    "over all of train.steps": (
        *("lr_decay_iters", "lr_decay_steps", "decay_ratio", "decay_steps", "lr_wsd_decay_iters"),
    ),
    "train.optimizer.schedule": (
        *("lr_scheduler_type", "lr_scheduler", "scheduler", "lr_schedule", "lr_decay_style", "decay_type"),
    ),
    "train.optimizer.clip": (
        *("max_grad_norm", "gradient_clipping", "max_norm", "grad_clip", "clip_grad", "clip_grad_norm"),
        *("gradient_clip_val", "grad_norm_clip"),
    ),
    "parallel.recompute: selective or full": (
        *("gradient_checkpointing", "activation_checkpointing", "activation_checkpoint"),
        *("recompute_granularity", "recompute_activations", "use_checkpointing"),
    ),
    "parallel.recompute_layers": ("recompute_num_layers",),
    "train.precision: bf16": ("bf16", "bfloat16"),
    "train.precision: fp16; loss scaling is automatic": ("fp16", "float16", "loss_scale"),
    "train.precision: fp8": ("fp8", "float8"),
    "train.precision": (
        *("dtype", "torch_dtype", "mixed_precision", "amp", "tf32", "mixed_precision_param", "params_dtype"),
    ),
    "train.compile: true": ("torch_compile",),
    "train.label_smoothing": ("label_smoothing_factor",),
    "train.stability defines what to do about loss spikes": (
        *("skip_nan", "loss_spike", "rerun_mode", "check_for_nan_in_loss_and_grad"),
    ),
    "data.sequence_length": (
        *("max_seq_length", "seq_length", "max_length", "seq_len", "max_seq_len", "block_size"),
        *("context_length", "sequence_len", "cutoff_len", "model_max_length", "max_prompt_length"),
    ),
    "data.sources, as in [{uri: corpus/*.txt}]": (
        *(
            "dataset",
            "dataset_name",
            "dataset_path",
            "data_path",
            "train_file",
            "train_data_path",
            "datasets",
        ),
    ),
    "data.sources.0.field is the column of the text": ("dataset_text_field", "text_column", "text_field"),
    "data.validation, as in {share: 0.01}": (
        *("validation_split", "val_set_size", "valid_data_path", "validation_file"),
        *("eval_dataset", "val_data"),
    ),
    "data.tokenizer, a folder or a tokenizer.json": (
        *("tokenizer_path", "tokenizer_name", "tokenizer_model", "tokenizer_name_or_path"),
    ),
    "workload.model: a preset, or hf:<folder>": (
        *("model_name_or_path", "model_name", "model_path", "model_id", "hf_assets_path", "flavor"),
    ),
    "workload.changes has the sizes of a preset": (
        *("hidden_size", "num_layers", "n_layer", "n_layers", "num_attention_heads", "n_head", "n_heads"),
        *("hidden", "layers", "heads", "ffn_hidden_size", "num_experts"),
    ),
    "data.tokenizer, as in {train_bpe: 4096}, sets the vocabulary; workload.changes that of the model": (
        "vocab_size",
    ),
    "workload.dropout": ("hidden_dropout", "resid_pdrop", "hidden_dropout_prob"),
    "workload.options has the options of the objective, such as beta of dpo": (
        "loss_type",
        "dpo_beta",
    ),
    "workload.adapter, as in {kind: lora, rank: 16}": (
        "lora",
        "peft",
        "peft_config",
        "lora_config",
        "use_peft",
    ),
    "workload.adapter.kind: dora": ("use_dora",),
    "workload.adapter.kind: rslora": ("use_rslora",),
    "workload.adapter.rank": ("r", "lora_r", "lora_rank"),
    "workload.adapter.alpha": ("lora_alpha",),
    "workload.adapter.targets, as in ['*.attention.*']": (
        *("target_modules", "lora_target_modules", "lora_target"),
    ),
    "adapters have no dropout of their own; workload.dropout is the model's": ("lora_dropout",),
    "workload.adapter.quantize: nf4": (*("load_in_4bit", "bnb_4bit_quant_type", "quantization_config"),),
    "train.freeze has patterns of the parameters to freeze": (
        "frozen",
        "freeze_layers",
        "frozen_layers",
    ),
    "--run-dir, by default runs/<name>": (
        *("output_dir", "run_dir", "dump_folder", "save_dir", "logging_dir", "default_root_dir"),
    ),
    "checkpoint.every": ("save_steps", "save_interval", "checkpoint_interval", "save_every"),
    "checkpoint.keep": ("save_total_limit", "keep_latest_k"),
    "checkpoint.keep_best, as in validation.loss": (
        "load_best_model_at_end",
        "metric_for_best_model",
        "save_best",
    ),
    "checkpoint.average, as in {ema: 0.999}": ("ema", "ema_decay", "use_ema", "swa"),
    "checkpoint.export: hf": ("save_safetensors", "save_format"),
    "run the same command again to resume from the last commit; train.continue_from continues another run": (
        *("resume", "resume_from", "resume_from_checkpoint", "auto_resume", "load", "load_checkpoint"),
    ),
    "workload.init_from": ("pretrained", "finetune", "load_weights", "initial_load_path"),
    "evaluate.every": ("eval_steps", "eval_interval", "eval_every", "val_check_interval", "eval_freq"),
    "evaluate.every is the number of steps between evaluations": (
        "eval_strategy",
        "evaluation_strategy",
        "do_eval",
    ),
    "evaluate.metrics": ("compute_metrics",),
    "stop_when, as in {metric: validation.loss, patience: 3}": (
        *("early_stopping", "early_stopping_patience", "early_stop", "early_stopping_threshold"),
    ),
    "every step has a row in metrics.jsonl of the run directory, and in MLflow": (
        *("logging_steps", "log_interval", "log_every", "log_freq", "steps_per_print", "logging_strategy"),
    ),
    "tracking is MLflow; sinks.tensorboard and sinks.wandb work in addition": (
        "report_to",
        "logger",
        "loggers",
    ),
    "sinks.wandb, as in {project: demo}": ("enable_wandb", "wandb_project", "use_wandb"),
    "sinks.tensorboard: true": ("enable_tensorboard", "tensorboard_dir"),
    "tracking, as in {uri: 'sqlite:///mlflow.db', experiment: demo}": ("mlflow",),
    "name": ("run_name", "experiment_name", "job_name"),
    "there are no callbacks; metrics.jsonl has a row for each step, and own code is named as "
    "module:name, see docs/guides/own-code.md": ("callbacks", "hooks"),
    "`orchestrator profile RUN` profiles the next steps of a run while it trains": (
        *("profile", "profiler", "profiling", "enable_profiling"),
    ),
    "parallel.zero: 3": ("fsdp", "fsdp_config", "fully_shard", "use_fsdp"),
    "parallel.zero is the stage, with parallel.engine: deepspeed": ("deepspeed",),
    "parallel.zero": ("zero_stage", "zero_optimization", "stage"),
    "parallel.zero: 1": ("use_distributed_optimizer",),
    "parallel.offload": (*("offload_optimizer", "offload_param", "cpu_offload", "optimizer_cpu_offload"),),
    "the data-parallel width follows from the number of workers, tp, pp and cp": ("dp", "data_parallel_size"),
    "parallel.tp": (
        *("tensor_parallel_size", "tensor_parallel_degree", "tensor_model_parallel_size", "tp_size"),
    ),
    "parallel.pp": (
        *("pipeline_parallel_size", "pipeline_parallel_degree", "pipeline_model_parallel_size", "pp_size"),
    ),
    "parallel.cp": ("context_parallel_size", "context_parallel_degree", "sequence_parallel_size", "cp_size"),
    "parallel.ep": (
        "expert_parallel_size",
        "expert_parallel_degree",
        "expert_model_parallel_size",
        "ep_size",
    ),
    "parallel.sequence": ("sequence_parallel",),
    "parallel.schedule": ("pipeline_parallel_schedule", "pipeline_schedule"),
    "parallel.virtual is the number of stages of a rank": ("num_layers_per_virtual_pipeline_stage",),
    "parallel.shard is the number of replicas over which zero 3 shards a copy": (
        *("hsdp", "data_parallel_shard_degree", "data_parallel_replicate_degree"),
    ),
    "resources.workers is the number of ranks, and resources.per_worker.gpu 1 gives each a GPU": (
        *("gpus", "num_gpus", "n_gpus", "nproc_per_node", "world_size", "num_workers", "devices", "nodes"),
        *("num_nodes", "nnodes", "ngpu"),
    ),
    "limits.hours": ("max_time", "time_limit", "max_hours", "walltime"),
}
KEYS: Mapping[str, str] = {name: hint for hint, names in _KEYS.items() for name in names}
"""Names of keys in other systems, and the name or advice here."""
VALUES: Mapping[str, str] = {
    "adam": "adamw with weight_decay 0 is Adam",
    "adamw_torch": "it is adamw here",
    "bfloat16": "it is bf16 here",
    "float16": "it is fp16 here",
    "half": "it is fp16 here",
    "float32": "it is fp32 here",
    "deepspeed_zero": "parallel.zero is the stage of ZeRO",
}
"""Names of values in other systems, and the name or advice here."""
