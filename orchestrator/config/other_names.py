"""Names of other systems for keys and values of a job file: torchtitan, Hugging Face's Trainer, Hub and
accelerate, TRL, peft, axolotl, W&B, DeepSpeed, Megatron-LM, Lightning.
"""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.observe.sinks.config import OTHER_NAMES as OF_SINKS

_KEYS: Mapping[str, str] = {
    "it follows from train.global_batch, the workers and parallel.micro_batch": (
        "gradient_accumulation gradient_accumulation_steps grad_accum grad_accumulation "
        "accumulate_grad_batches accumulation_steps"
    ),
    "train.global_batch is the number of sequences in a step, whatever the number of workers": (
        "batch_size train_batch_size global_batch_size"
    ),
    "parallel.micro_batch is the number of sequences that a rank computes at once": (
        "per_device_train_batch_size micro_batch_size train_micro_batch_size_per_gpu local_batch_size "
        "per_device_batch_size"
    ),
    "evaluations use batches of train.global_batch; evaluate.batches limits their number": (
        "per_device_eval_batch_size eval_batch_size"
    ),
    "train.optimizer.lr": "learning_rate lr max_lr base_lr",
    "train.optimizer.final_lr is min_lr divided by lr": "min_lr lr_min eta_min end_lr lr_end",
    "train.optimizer.final_lr is the final learning rate as a share of lr": (
        "cosine_min_lr_ratio min_lr_factor min_lr_ratio min_lr_rate lr_end_ratio"
    ),
    "biases and norms (vectors) never have weight decay; for other parameters set it in "
    "train.optimizer.groups, as in [{match: [tokens.weight], weight_decay: 0}]": (
        "no_decay no_weight_decay no_decay_params no_weight_decay_params no_wd"
    ),
    "train.optimizer.groups sets learning rate and weight decay for groups of parameters": (
        "param_groups parameter_groups optimizer_grouped_parameters lr_mult lr_multiplier"
    ),
    "set train.optimizer.betas, as in [0.9, 0.95]": "adam_beta1 adam_beta2 beta1 beta2",
    "train.optimizer.eps": "adam_epsilon epsilon adam_eps",
    "train.optimizer.name": "optim optimizer_type",
    "set train.optimizer.name to adamw_8bit": (
        "optim_bits use_8bit_adam use_8bit_optimizer 8bit adamw8bit adamw_bnb_8bit adamw_torch_8bit paged_adamw_8bit"
    ),
    "bases in 4 bits are workload.adapter.quantize: nf4, and moments in 8 bits train.optimizer.name: adamw_8bit": (
        "bitsandbytes bnb"
    ),
    "workload.options, as in {class_weights: balanced}": "class_weights class_weight pos_weight label_weights",
    "train.steps": "max_steps train_iters training_steps num_steps iterations total_steps",
    "train.steps counts optimizer steps; there are no epochs": (
        "num_train_epochs epochs num_epochs max_epochs"
    ),
    "train.optimizer.warmup, steps or a share such as 5%": (
        "warmup_steps warmup_ratio warmup_iters lr_warmup_iters lr_warmup_steps warmup_num_steps "
        "lr_warmup_fraction"
    ),
    "train.optimizer.decay is the number of last steps of schedule wsd; linear and cosine decay over all "
    "of train.steps": "lr_decay_iters lr_decay_steps decay_ratio decay_steps lr_wsd_decay_iters",
    "train.optimizer.schedule": (
        "lr_scheduler_type lr_scheduler scheduler lr_schedule lr_decay_style decay_type"
    ),
    "train.optimizer.clip": (
        "max_grad_norm gradient_clipping max_norm grad_clip clip_grad clip_grad_norm gradient_clip_val "
        "grad_norm_clip"
    ),
    "parallel.recompute: selective or full": (
        "selective_checkpointing gradient_checkpointing activation_checkpointing activation_checkpoint "
        "recompute_granularity "
        "recompute_activations use_checkpointing gradient_checkpointing_kwargs "
        "activation_checkpointing_kwargs"
    ),
    "parallel.recompute_layers": "recompute_num_layers",
    "train.precision: bf16": "bf16 bfloat16",
    "train.precision: fp16; loss scaling is automatic": "fp16 float16 loss_scale",
    "train.precision: fp8": "fp8_enable_fsdp_float8_all_gather fp8 float8 fp8_config",
    "train.precision": (
        "float32 dtype torch_dtype mixed_precision amp tf32 mixed_precision_param params_dtype "
        "bnb_4bit_compute_dtype downcast_bf16"
    ),
    "train.compile: true": (
        "deepcompile torch_compile_options torch_compile torch_compile_backend torch_compile_mode "
        "dynamo_config dynamo_backend"
    ),
    "train.label_smoothing": "label_smoothing_factor",
    "train.stability defines what to do about loss spikes": (
        "loss_watchdog_threshold loss_watchdog_patience skip_nan loss_spike rerun_mode "
        "check_for_nan_in_loss_and_grad"
    ),
    "data.sequence_length": (
        "max_packed_sequence_len eval_sequence_len max_prompt_len max_seq_length seq_length max_length "
        "seq_len max_seq_len block_size context_length sequence_len "
        "cutoff_len model_max_length max_prompt_length"
    ),
    "data.sources, as in [{uri: corpus/*.txt}]": (
        "pretraining_dataset dataset dataset_name dataset_path data_path train_file train_data_path datasets"
    ),
    "data.sources.0.field is the column of the text": "dataset_text_field text_column text_field",
    "data.validation, as in {share: 0.01}": (
        "test_datasets validation_split val_set_size valid_data_path validation_file eval_dataset val_data"
    ),
    "data.tokenizer, a folder or a tokenizer.json": (
        "tokenizer_use_fast tokenizer_legacy tokenizer_use_mistral_common tokenizer_save_jinja_files "
        "tokenizer_path tokenizer_name tokenizer_model tokenizer_name_or_path tokenizer_type "
        "tokenizer_config"
    ),
    "workload.model: a preset, or hf:<folder>": (
        "overrides_of_model_kwargs type_of_model cls_model_config is_falcon_derived_model "
        "is_llama_derived_model is_mistral_derived_model is_qwen_derived_model model_name_or_path "
        "model_name model_path model_id hf_assets_path flavor base_model "
        "base_model_name_or_path model_type base_model_config"
    ),
    "workload.changes has the sizes of a preset": (
        "rope_scaling hidden_size num_layers n_layer n_layers num_attention_heads n_head n_heads hidden "
        "layers heads "
        "ffn_hidden_size num_experts model_init_kwargs overrides_of_model_config"
    ),
    "data.tokenizer, as in {train_bpe: 4096}, sets the vocabulary; workload.changes that of the model": (
        "vocab_size"
    ),
    "workload.dropout": "hidden_dropout resid_pdrop hidden_dropout_prob",
    "workload.options has the options of the objective, such as beta of dpo": (
        "dpo_norm_loss rpo_alpha dpo_use_weighting dpo_label_smoothing dpo_loss_type dpo_loss_weights "
        "orpo_alpha simpo_gamma cpo_alpha kto_desirable_weight kto_undesirable_weight rl_beta loss_type "
        "dpo_beta loss_weights desirable_weight undesirable_weight ld_alpha f_divergence_type "
        "f_alpha_divergence_coef use_weighting discopop_tau center_rewards_coefficient"
    ),
    "workload.adapter, as in {kind: lora, rank: 16}": "lora peft peft_config lora_config use_peft",
    "workload.adapter.kind: dora": "peft_use_dora use_dora",
    "workload.adapter.kind: rslora": "peft_use_rslora use_rslora",
    "workload.adapter.rank": "r lora_r lora_rank",
    "workload.adapter.alpha": "lora_alpha",
    "workload.adapter.targets, as in ['*.attention.*']": (
        "peft_layers_to_transform peft_layers_pattern target_modules lora_target_modules lora_target "
        "lora_target_linear exclude_modules "
        "layers_to_transform layers_pattern target_parameters lora_target_parameters"
    ),
    "adapters have no dropout; workload.dropout is the model's": "lora_dropout",
    "workload.adapter.quantize: nf4": "load_in_4bit bnb_4bit_quant_type quantization_config",
    "quantize, as in {weights: int4, group: 128}": "qat fake_quantize quantization quantizer",
    "prune.sparsity, with the first and the last step in prune.steps": (
        "pruning pruning_method target_sparsity final_sparsity"
    ),
    "workload.shrink, with smaller sizes in workload.changes": "pruned_heads prune_heads keep_layers",
    "train.freeze has patterns of the parameters to freeze": (
        "freeze_mm_modules unfrozen_parameters frozen freeze_layers frozen_layers"
    ),
    "--run-dir, by default runs/<name>": (
        "output_dir run_dir dump_folder save_dir logging_dir default_root_dir"
    ),
    "checkpoint.every": (
        "save_first_step dynamic_checkpoint save_steps save_interval checkpoint_interval save_every "
        "save_strategy saves_per_epoch"
    ),
    "checkpoint.keep": "save_total_limit keep_latest_k",
    "checkpoint.keep_best, as in validation.loss": ("load_best_model_at_end metric_for_best_model save_best"),
    "checkpoint.average, as in {ema: 0.999}": "ema ema_decay use_ema",
    "checkpoint.average, as in {last: 5}": "swa swa_lrs stochastic_weight_avg",
    "checkpoint.export: hf": "save_safetensors save_format",
    "run the same command again to resume from the last commit; train.continue_from continues another run": (
        "auto_resume_from_checkpoints resume resume_from resume_from_checkpoint auto_resume load "
        "load_checkpoint"
    ),
    "workload.init_from": "lora_model_dir pretrained finetune load_weights initial_load_path",
    "evaluate.every": "eval_steps eval_interval eval_every val_check_interval eval_freq",
    "evaluate.every is the number of steps between evaluations": (
        "eval_strategy evaluation_strategy do_eval evals_per_epoch"
    ),
    "evaluate.metrics": "metric_name compute_metrics include_for_metrics prediction_loss_only batch_eval_metrics",
    "stop_when, as in {metric: validation.loss, patience: 3}": (
        "early_stopping early_stopping_patience early_stop early_stopping_threshold"
    ),
    "every step has a row in metrics.jsonl of the run directory, and in MLflow": (
        "include_tkps logging_steps log_interval log_every log_freq steps_per_print logging_strategy "
        "logging_first_step logging_nan_inf_filter log_on_each_node include_num_input_tokens_seen "
        "skip_memory_metrics include_tokens_per_second"
    ),
    "tracking, as in {uri: 'sqlite:///mlflow.db', experiment: demo}": (
        "mlflow mlflow_tracking_uri mlflow_experiment_name"
    ),
    "name": "mlflow_run_name run_name experiment_name job_name display_name",
    "there are no callbacks; metrics.jsonl has a row for each step, and own code is named as module:name, "
    "see docs/guides/own-code.md": "callbacks hooks restore_callback_states_from_checkpoint plugins",
    "`orchestrator profile RUN` profiles the next steps of a run while it trains": (
        "profiler_steps profiler_steps_start profile profiler profiling enable_profiling"
    ),
    "parallel.zero: 3": (
        "fsdp_final_state_dict_type fsdp fsdp_config fully_shard use_fsdp fsdp_version "
        "fsdp_sharding_strategy fsdp_auto_wrap_policy "
        "fsdp_transformer_layer_cls_to_wrap fsdp_state_dict_type fsdp_reshard_after_forward"
    ),
    "parallel.zero is the stage, with parallel.engine: deepspeed": (
        "deepspeed deepspeed_config ds3_gather_for_generation"
    ),
    "parallel.zero": "zero_stage zero_optimization stage",
    "parallel.zero: 1": "use_distributed_optimizer",
    "parallel.offload": (
        "layer_offloading offload_optimizer offload_param cpu_offload optimizer_cpu_offload "
        "fsdp_offload_params"
    ),
    "the data-parallel width follows from the number of workers, tp, pp and cp": "dp data_parallel_size",
    "parallel.tp": "tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size tp_size",
    "parallel.pp": "pipeline_parallel_size pipeline_parallel_degree pipeline_model_parallel_size pp_size",
    "parallel.cp": (
        "sequence_parallel_degree context_parallel_size context_parallel_degree sequence_parallel_size "
        "cp_size"
    ),
    "parallel.ep": "expert_parallel_size expert_parallel_degree expert_model_parallel_size ep_size",
    "parallel.sequence": "sequence_parallel",
    "parallel.schedule": "pipeline_parallel_schedule pipeline_schedule",
    "parallel.virtual is the number of stages of a rank": "num_layers_per_virtual_pipeline_stage",
    "parallel.shard is the number of replicas over which zero 3 shards a copy": (
        "dp_shard_size dp_replicate_size hsdp data_parallel_shard_degree data_parallel_replicate_degree"
    ),
    "resources.workers is the number of ranks, and resources.per_worker.gpu 1 gives each a GPU": (
        "device ddp gpus num_gpus n_gpus nproc_per_node world_size num_workers devices nodes num_nodes "
        "nnodes ngpu n_gpus_per_node "
        "num_processes num_machines gpu_ids distributed_type compute_environment machine_rank local_rank "
        "main_process_ip main_process_port rdzv_backend same_network mpirun_config use_cpu"
    ),
    "limits.hours": "max_time time_limit max_hours walltime",
    "evaluations compute in train.precision": "bf16_full_eval fp16_full_eval",
    "train.optimizer has betas, eps, weight_decay and momentum as keys": "optim_args",
    "train.optimizer.groups sets another learning rate for patterns of parameters": (
        "loraplus_lr_ratio loraplus_lr_embedding embedding_lr embedding_lr_scale lr_groups "
        "optim_target_modules"
    ),
    "train.optimizer.schedule may be your own function as module:name": (
        "lr_quadratic_warmup cosine_constant_lr_ratio lr_div_factor lr_scheduler_kwargs"
    ),
    "workload.embedding_noise": "neftune_noise_alpha noisy_embedding_alpha neftune",
    "train.determinism, bitwise or rerun": "full_determinism deterministic",
    "seed": "data_seed",
    "evaluate.at_start: true": "eval_on_start",
    "evaluate.at names further steps, and every counts from the beginning": "eval_delay",
    "parallel: auto chooses layout and micro-batch by the memory of a worker": (
        "auto_find_batch_size parallelism_config accelerator_config megatron_lm_config"
    ),
    "workload.objective, such as dpo": "trainer trainer_cls",
    "workload.dropout: 0": "disable_dropout",
    "train.reference says how dpo, ipo and kto get the reference's log-probabilities": (
        "precompute_ref_log_probs precompute_ref_batch_size ref_model"
    ),
    "data.packing packs text for causal_lm, and the option pack of workload.options conversations": (
        "sample_packing_group_size sample_packing_bin_size sample_packing_sequentially "
        "sample_packing_mp_start_method batch_flattening pretrain_multipack_buffer_size "
        "streaming_multipack_buffer_size pretraining_sample_concatenation dpo_padding_free sample_packing "
        "pad_to_sequence_len eval_packing eval_sample_packing packing_strategy "
        "padding_free multipack_real_batches"
    ),
    "workload.options, as in {truncate: start}": "excess_length_strategy truncation_mode truncation_side",
    "objective conversation predicts answers only; a message with weight 0 is left out": (
        "completion_only_loss assistant_only_loss train_on_inputs train_on_responses_only roles_to_train "
        "mask_prompt"
    ),
    "data.chat_template": (
        "role_boundaries eot_tokens default_system_message chat_template_jinja chat_template_path "
        "chat_template_kwargs"
    ),
    "data.cache": "dataset_prepared_path",
    "data.streaming": "dataset_streaming",
    "data.labels": "label_names id2label label2id num_labels",
    "data.sources.0.field names the columns that are read": (
        "remove_unused_columns dataset_kwargs input_columns label_column_name"
    ),
    "data.sources.0.uri names the files of a split": (
        "dataset_config dataset_train_split dataset_test_split split"
    ),
    "data.add_tokens; the tokenizer's own special tokens come from its folder": (
        "added_tokens_overrides mean_resizing_embeddings resize_token_embeddings_to_32x shrink_embeddings "
        "fix_untrained_tokens eos_token pad_token bos_token unk_token extra_special_tokens"
    ),
    "--progress lines, live or none is an option of the command": (
        "disable_tqdm log_level log_level_replica"
    ),
    "checkpoint.export, as in hf": "save_only_model",
    "tracking.register_as": "register_model",
    "tune.mode is the direction of a search; other metrics have their own": "greater_is_better",
    "workload.changes, as in {moe: {experts: 8, auxiliary: 0.01}}": (
        "router_aux_loss_coef aux_loss_coef moe_aux_loss_coeff"
    ),
    # What is not here.
    "checkpoint.push, as in USER/NAME, uploads the export; HF_TOKEN is the token": (
        "hub_repo_id push_to_hub hub_model_id hub_private hub_private_repo hub_token push_to_hub_model_id "
        "push_to_hub_organization push_to_hub_token hf_use_auth_token use_auth_token"
    ),
    "not here, because an export is pushed once, when it is finished and checked": (
        "hub_strategy hub_always_push hub_revision push_dataset_to_hub commit_message create_pr"
    ),
    "not here, because a model is a folder: `hf download REPO --revision R --local-dir FOLDER`, then "
    "workload.model is hf:FOLDER": "revision model_revision revision_of_model",
    "not here, because no code of a model's folder is run; your own model is named as module:name": (
        "trust_remote_code"
    ),
    "not here, because the loss is always the mean over what the whole global batch predicts": (
        "average_tokens_across_devices num_items_in_batch"
    ),
    "not here, because kernels follow from the device and the mask; the first row of metrics.jsonl names "
    "them": (
        "dpo_use_logits_to_keep dpo_use_liger_kernel s2_attention flash_attn_rms_norm flex_attention "
        "flex_attn_compile_kwargs flash_attn_cross_entropy flash_attn_fuse_mlp sage_attention "
        "gemma4_hybrid_attn_impl large_head_attention flash_attn_d512 sdpa_varlen fused_attn_kernel "
        "experts_implementation lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel "
        "use_kernels pretrain_multipack_attn heads_k_stride ring_attn_func attn_implementation "
        "flash_attention flash_attn sdp_attention xformers_attention eager_attention "
        "use_liger_kernel liger_kernel_config use_flash_attention_2"
    ),
    "not here, because training keeps no cache of keys and values": "use_cache",
    "not here, because the plan leaves room in a worker's memory": (
        "max_memory gpu_memory_limit gc_steps gc_collect_steps torch_empty_cache_steps activation_offloading"
    ),
    "not here, because evaluations add up sums on every rank": (
        "eval_accumulation_steps eval_use_gather_object eval_do_concat_batches"
    ),
    "not here, because every rank writes its part of a checkpoint to the run directory": (
        "save_on_each_node"
    ),
    "not here, because SIGTERM and notices of preemption lead to a checkpoint anyway": (
        "enable_jit_checkpoint"
    ),
    "not here, because a run resumes at its position in the data": "ignore_data_skip",
    "not here, because a thread of each rank reads ahead": (
        "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
        "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order"
    ),
    "not here, because every step has train.global_batch sequences, also where an epoch ends": (
        "dataloader_drop_last"
    ),
    "not here, because Ray prepares data on all CPUs of the cluster": (
        "dataset_num_proc dataset_processes preprocessing_num_workers num_proc"
    ),
    "not here, because the order of samples follows from seed and epoch alone": (
        "shuffle_before_merging_datasets train_sampling_strategy "
        "shuffle_dataset "
        "shuffle_merged_datasets curriculum_sampling"
    ),
    "not here, because the samples of every step are dealt to micro-batches by length": (
        "group_by_length length_column_name"
    ),
    "not here, because the length of rows follows from data.sequence_length": "pad_to_multiple_of",
    "not here, because this project reduces gradients itself": (
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph "
        "ignore_bias_buffers"
    ),
    "not here, because backend and time limits follow from the device": (
        "ddp_backend ddp_timeout ddp_timeout_seconds enable_cpu_affinity"
    ),
    "not here, because the commands say what is done: run, evaluate, generate": (
        "do_train do_predict main_training_function"
    ),
    "not here, because ranks log to logs/ of the run directory; `orchestrator profile RUN` looks closer": (
        "debug"
    ),
    "not here, because ranks run on CPUs and GPUs": (
        "tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm tpu_env tpu_num_cores"
    ),
    "not here, because the reference of dpo, ipo and kto is the model that the run begins with": (
        "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps"
    ),
    "workload.objective: grpo, with rollout and rewards": "trl rlhf rl ppo_trainer",
    "distill.teacher": "teacher_model teacher_model_name_or_path kd_trainer",
    "distill.labels": "kd_ce_alpha alpha_mlm alpha_clm",
    "distill.logits.weight": "kd_alpha alpha_ce",
    "distill.logits.temperature": "kd_temperature",
    "distill.logits.divergence: forward, reverse or jensen_shannon": "kd_beta",
    "distill.hidden": "alpha_mse alpha_cos",
    "rollout.group": "num_generations rollout_n num_return_sequences",
    "rollout.engine: vllm, with rollout.workers": "use_vllm vllm_mode rollout_name",
    "rollout.workers": ("num_rollout_workers rollout_workers num_generation_workers"),
    "rollout.staleness: 1": (
        "max_staleness max_head_offpolicyness max_trajectory_age_steps one_step_off_policy async_rollout "
        "staleness_threshold max_async_level async_generation async_training"
    ),
    "rollout.max_tokens": "max_completion_length max_response_length response_length",
    "rollout.steps": "steps_per_generation generation_batch_size ppo_mini_batch_size",
    "rollout.epochs": "num_iterations ppo_epochs",
    "rewards, as in [{own: module:function, weight: 1.0}]": (
        "reward_funcs reward_weights reward_model custom_reward_function reward_model_path "
        "reward_processing_classes"
    ),
    "workload.options, as in {beta: 0.02, loss_type: dapo}": (
        "scale_rewards kl_loss_coef clip_ratio clip_ratio_high clip_ratio_low loss_agg_mode epsilon_high "
        "importance_sampling_level use_kl_loss adv_estimator use_bias_correction_kl clip_ratio_c delta"
    ),
    "rollout.keep_every": (
        "log_completions num_completions_to_print log_unique_prompts log_completions_hub_repo log_multimodal"
    ),
    "not here, because tokens are drawn by rollout.temperature, top_k and top_p alone": (
        "min_p repetition_penalty generation_kwargs"
    ),
    "not here, because the losses of grpo and reinforce have no such term": (
        "entropy_coef entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target "
        "use_adaptive_entropy "
        "top_entropy_quantile off_policy_mask_threshold sapo_temperature_neg sapo_temperature_pos "
        "vespo_k_pos vespo_k_neg vespo_lambda_pos vespo_lambda_neg"
    ),
    "not here, because rewards are added by their weights and compared within their group": (
        "reward_clip_range normalize_advantages multi_objective_aggregation"
    ),
    "not here, because an unfinished answer is rewarded as it is; a reward of kind length recognises it": (
        "mask_truncated_completions"
    ),
    "not here, because an evaluation takes the most likely answer": "num_generations_eval",
    "not here, because answers call no tools": "max_tool_calling_iterations",
    "not here, because losses are computed in fp32": "cast_lm_head_to_fp32",
    "not here, because rollout.engine: vllm has no settings of its own, and runs in rollout workers": (
        "vllm vllm_gpu_memory_utilization vllm_server_host vllm_server_port "
        "vllm_server_base_url "
        "vllm_server_timeout vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_tensor_parallel_size "
        "vllm_group_port vllm_max_model_length vllm_model_impl"
    ),
    "not here, because the difference between vLLM and training is on record and not corrected for": (
        "vllm_importance_sampling_correction vllm_importance_sampling_cap vllm_importance_sampling_mode "
        "vllm_importance_sampling_clip_min vllm_importance_sampling_clip_max"
    ),
    "not here, because rollout.engine is own or vllm": (
        "use_transformers_paged use_transformers_continuous_batching "
        "transformers_continuous_batching_config cache_implementation"
    ),
    "not here, because no value network is trained; grpo and reinforce compare answers with each other": (
        "process_reward_model ppo critic value_model critic_warmup gae_lambda"
    ),
    "not here, because an adapter trains its own weights and the heads that its base lacks, and nothing "
    "else": (
        "peft_trainable_token_indices lora_bias bias modules_to_save lora_modules_to_save "
        "trainable_token_indices"
    ),
    "not here, because A and B begin as in the paper: B with zeros": (
        "peft_init_lora_weights init_lora_weights loftq_config eva_config corda_config"
    ),
    "not here, because an adapter has one rank and one alpha for all layers": (
        "lora_rank_pattern lora_alpha_pattern rank_pattern alpha_pattern"
    ),
    "not here, because the adapter follows from the model and its objective": (
        "auto_mapping peft_version megatron_config megatron_core runtime_config task_type lora_task_type "
        "peft_type fan_in_fan_out lora_fan_in_fan_out inference_mode"
    ),
    "not here, because only nf4 stores a base in fewer bits (workload.adapter.quantize)": (
        "gptq bnb_config_kwargs model_quantization_config model_quantization_config_kwargs use_onebitllms "
        "quantize_moe_experts load_in_8bit llm_int8_threshold llm_int8_skip_modules "
        "bnb_4bit_use_double_quant "
        "bnb_4bit_quant_storage use_bnb_nested_quant"
    ),
    "evaluate.samples generates texts at every evaluation": (
        "eval_table_size eval_max_new_tokens generate_samples num_generation_samples "
        "generation_max_new_tokens generation_temperature generation_top_p generation_top_k "
        "generation_prompt_ratio generation_do_sample dpo_generate_during_eval"
    ),
    "evaluate.tasks has task files in lm-eval's format": (
        "do_causal_lm_eval eval_causal_lm_metrics do_bench_eval bench_dataset bench_split"
    ),
    "every run is on Ray; resources.workers and resources.per_worker say with what": (
        "use_ray ray_run_name ray_num_workers resources_per_worker"
    ),
    "`orchestrator generate RUN` continues prompts": (
        "gradio_title gradio_share gradio_server_name gradio_server_port gradio_max_new_tokens "
        "gradio_temperature"
    ),
    "the model's folder says how images are read, see docs/guides/images.md": (
        "processor_type processor_kwargs image_size image_resize_algorithm"
    ),
    "a preset begins with random weights, hf:<folder> with those of its files": "reinit_weights",
    "unknown keys of a job file are always errors": "strict",
    "data.clean, as in [exact_duplicates]": "dataset_exact_deduplication min_sample_len",
    "your own objective is named as module:name, see docs/guides/own-components.md": (
        "use_eaft eaft_alpha eaft_k ebft"
    ),
    "Prometheus gets metrics from Ray's nodes, see docs/guides/mlflow.md; sinks.opentelemetry sends traces": (
        "use_otel_metrics otel_metrics_host otel_metrics_port"
    ),
    "not here, because MLflow gets plan, job, report and summary anyway": "hf_mlflow_log_artifacts",
    "not here, because every rank reads its own part of the weights": (
        "lora_on_cpu qlora_sharded_model_loading experimental_skip_move_to_device low_cpu_mem_usage "
        "device_map"
    ),
    "not here, because an adapter keeps the layers of its base": "layer_replication peft_layer_replication",
    "not here, because tied weights stay tied": "ensure_weight_tying peft_ensure_weight_tying",
    "not here, because weights that are trained are fp32, whatever train.precision": (
        "peft_autocast_adapter_dtype embeddings_skip_upcast fp32_norms fp32_norm_classes"
    ),
    "not here, because checkpoint.export: hf merges an adapter, and adapter exports it alone": (
        "merge_lora merge_method"
    ),
    "not here, because a run does not merge an adapter and restart it": (
        "relora relora_prune_ratio relora_prune_method relora_cpu_offload jagged_restart_steps "
        "jagged_restart_warmup_steps jagged_restart_anneal_steps"
    ),
    "not here, because train.optimizer.name is adamw, adamw_8bit, lamb, lars, lion, muon or your own as module:name": (
        "adam_epsilon2 adam_beta3 dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of "
        "qgalore_rank qgalore_update_proj_gap qgalore_scale qgalore_proj_type qgalore_proj_quant "
        "qgalore_proj_bits qgalore_proj_group_size qgalore_cos_threshold qgalore_gamma_proj "
        "qgalore_queue_size lisa_n_layers lisa_step_interval lisa_layers_attribute flash_optimum"
    ),
    "not here, because adapters are lora, rslora, dora, prefix, prompt, p_tuning, houlsby and bitfit": (
        "lora_ga_config velora_config monteclora_config kasa_config arrow_config use_bdlora "
        "alora_invocation_tokens use_qalora qalora_group_size"
    ),
    "not here, because attention is as the published model has it": (
        "scaling_softmax scaling_softmax_factor scaling_softmax_bias llama4_linearized_experts"
    ),
    "not here, because positions count on through a sequence": (
        "use_pose pose_split_on_token_ids pose_max_context_len pose_num_chunks"
    ),
    "not here, because losses over large vocabularies are computed in chunks anyway": (
        "chunked_cross_entropy chunked_cross_entropy_num_chunks tiled_mlp tiled_mlp_num_shards "
        "tiled_mlp_use_original_mlp"
    ),
    "not here, because data is prepared once, into token shards that are counted and verified": (
        "skip_prepare_dataset is_preprocess preprocess_iterable dataset_keep_in_memory total_num_tokens "
        "total_supervised_tokens sample_packing_eff_est num_dataset_shards_to_save dataset_shard_num "
        "dataset_shard_idx"
    ),
    "not here, because libraries come with the installation": "torchdistx_path axolotl_config_path",
    "not here, because nothing is downloaded: `hf download REPO --local-dir FOLDER` of huggingface_hub does it": (
        "repo_id repo_type subfolder cache_dir local_dir local_files_only force_download resume_download "
        "allow_patterns ignore_patterns"
    ),
}
"""The name or advice here, and the names of keys in other systems, separated by spaces."""
KEYS: Mapping[str, str] = {
    name: hint for table in (_KEYS, OF_SINKS) for hint, names in table.items() for name in names.split()
}
"""Names of keys in other systems, and the name or advice here."""
VALUES: Mapping[str, str] = {
    "adam": "adamw with weight_decay 0 is Adam",
    "adamw_torch": "it is adamw here",
    "adamw_torch_fused": "it is adamw here",
    "adamw_bnb_8bit": "it is adamw_8bit here",
    "adamw_torch_8bit": "it is adamw_8bit here",
    "paged_adamw_8bit": "it is adamw_8bit here; parallel.offload: optimizer keeps optimizer state in host memory",
    "paged_adamw_32bit": "it is adamw here; parallel.offload: optimizer keeps optimizer state in host memory",
    "bfloat16": "it is bf16 here",
    "float16": "it is fp16 here",
    "half": "it is fp16 here",
    "float32": "it is fp32 here",
    "deepspeed_zero": "parallel.zero is the stage of ZeRO",
}
"""Names of values in other systems, and the name or advice here."""
