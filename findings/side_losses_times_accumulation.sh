#!/usr/bin/env bash
# What a model adds to its cross-entropy weighs as many times more as there are micro-batches.
#
# Guess: Trainer hands num_items_in_batch to the models that take it (Mixtral, Llama), so accumulation changes nothing: with equal rows,
#   four micro-batches of one give the gradient of one batch of four, the router's loss included.
# Behaviour: a model that takes num_items_in_batch divides its cross-entropy by the labels of all micro-batches, and Trainer divides
#   nothing any more. A term that is a mean of its own is not divided by anybody: the load balancing loss of a mixture of experts, and
#   AdaLoRA's orthogonality, count four times at four micro-batches. The cross-entropy alone is right.
# Packages: transformers 5.23.0, accelerate 1.15.0, peft 0.21.2, torch 2.13.0, numpy 2.4.6
# Why it matters: router_aux_loss_coef and orth_reg_weight mean something else at every accumulation. With a small memory and 64
#   micro-batches the balance of the experts counts 64 times. The logged loss has the same fault.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    transformers==5.23.0 accelerate==1.15.0 peft==0.21.2 torch==2.13.0 numpy==2.4.6
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

venv/bin/python -W ignore - <<'PY'
import copy
import logging
import tempfile

import peft
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers import PrinterCallback, Trainer, TrainingArguments

logging.disable(logging.WARNING)
print("version: transformers", transformers.__version__, "and peft", peft.__version__)
print("guess: each term weighs 1.0 times as much in four micro-batches as in one batch")
torch.manual_seed(0)
row = torch.randint(3, 40, (6,)).tolist()
rows = [{"input_ids": row, "labels": row}] * 4
size = dict(vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)


def collate(batch):
    return {key: torch.tensor([each[key] for each in batch]) for key in ("input_ids", "labels")}


def update(model, batch, accumulation):
    """What one step of SGD with rate 1 takes off the trained weights."""
    trained = copy.deepcopy(model)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation,
        max_steps=1, learning_rate=1.0, optim="sgd", max_grad_norm=0, lr_scheduler_type="constant", report_to=[],
        disable_tqdm=True, logging_strategy="no", save_strategy="no", use_cpu=True,
    )
    trainer = Trainer(model=trained, args=arguments, train_dataset=rows, data_collator=collate)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    pairs = zip(model.parameters(), trained.parameters())
    return torch.cat([(before - after).detach().flatten() for before, after in pairs if before.requires_grad])


def weight(model, set_coefficient, value):
    """How many times more the term weighs in four micro-batches; that of the cross-entropy beside it."""
    set_coefficient(0.0)
    plain, plain_parts = update(model, 4, 1), update(model, 1, 4)
    set_coefficient(value)
    whole, parts = update(model, 4, 1) - plain, update(model, 1, 4) - plain_parts
    assert whole.norm() > 1e-5
    return ((parts @ whole) / (whole @ whole)).item(), ((plain_parts @ plain) / (plain @ plain)).item()


mixture = MixtralForCausalLM(
    MixtralConfig(**size, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=1, output_router_logits=True)
)
router, entropy = weight(mixture, lambda value: setattr(mixture, "router_aux_loss_coef", value), 0.1)
print(f"seen: Mixtral: the router's loss {router:.3f} times, its cross-entropy {entropy:.3f} times")
assert abs(router - 4) < 0.01 and abs(entropy - 1) < 1e-4

settings = peft.AdaLoraConfig(
    task_type="CAUSAL_LM", target_modules=["q_proj"], init_r=4, target_r=2, total_step=100, tinit=10, tfinal=10
)
adapted = peft.get_peft_model(LlamaForCausalLM(LlamaConfig(**size)), settings)
for name, parameter in adapted.named_parameters():
    if "lora_" in name and parameter.ndim == 2:
        torch.nn.init.normal_(parameter, std=0.5)
orthogonal, entropy = weight(adapted, lambda value: setattr(adapted.peft_config["default"], "orth_reg_weight", value or 1e-12), 0.5)
print(f"seen: AdaLoRA: the orthogonality {orthogonal:.3f} times, its cross-entropy {entropy:.3f} times")
assert abs(orthogonal - 4) < 0.01 and abs(entropy - 1) < 1e-3
PY
