#!/usr/bin/env bash
# Gradient accumulation in the Trainer multiplies the gradient for many model classes.
#
# Guess: two micro-batches of one row give the gradient of one batch of two rows, since both divide by the
#   same number of labels.
# Behaviour: for models whose forward takes keyword arguments but ignores num_items_in_batch (T5, BART,
#   BERT's masked language model) the Trainer sums the mean losses, so the gradient is as many times too
#   large as there are micro-batches. Llama is right.
# Packages: transformers 5.23.0, accelerate 1.15.0, torch 2.13.0, numpy 2.4.6
# Why it matters: a learning rate that was found at one accumulation is wrong at another, clipping hides it,
#   and the reported loss is a multiple of the true one.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    transformers==5.23.0 accelerate==1.15.0 torch==2.13.0 numpy==2.4.6
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

venv/bin/python - <<'PY'
import copy
import logging
import tempfile

import torch
import transformers
from transformers import BartConfig, BartForConditionalGeneration, BertConfig, BertForMaskedLM
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration
from transformers import Trainer, TrainingArguments

logging.disable(logging.WARNING)
print("version: transformers", transformers.__version__)
print("guess: accumulating over 4 micro-batches gives the gradient of the whole batch, factor 1")
torch.manual_seed(0)
size = dict(vocab_size=40)
layers = dict(num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2)
seq2seq = dict(d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16, dropout=0.0,
               encoder_attention_heads=2, decoder_attention_heads=2, max_position_embeddings=32)
models = {
    "Llama": LlamaForCausalLM(LlamaConfig(**size, **layers, bos_token_id=0, eos_token_id=1)),
    "T5": T5ForConditionalGeneration(
        T5Config(**size, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8, dropout_rate=0.0, decoder_start_token_id=0)
    ),
    "BART": BartForConditionalGeneration(BartConfig(**size, **seq2seq)),
    "BERT": BertForMaskedLM(
        BertConfig(**size, **layers, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    ),
}
# Rows of equal length: means and sums over labels cannot explain a difference.
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 40, (4, 6)).tolist()]


def collate(batch):
    return {key: torch.tensor([row[key] for row in batch]) for key in ("input_ids", "labels")}


def update(model, batch, accumulation):
    trained = copy.deepcopy(model)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation,
        max_steps=1, learning_rate=1.0, optim="sgd", max_grad_norm=0, lr_scheduler_type="constant", report_to=[],
        disable_tqdm=True, logging_strategy="no", save_strategy="no", use_cpu=True,
    )
    Trainer(model=trained, args=arguments, train_dataset=rows, data_collator=collate).train()
    pairs = zip(model.parameters(), trained.parameters())
    return torch.cat([(before - after).flatten() for before, after in pairs])


factors = {}
for name, model in models.items():
    whole, parts = update(model, 4, 1), update(model, 1, 4)
    factors[name] = round((parts @ whole / (whole @ whole)).item(), 3)
print(f"seen: the update over 4 micro-batches is this many times that of the batch: {factors}")
assert factors == {"Llama": 1.0, "T5": 4.0, "BART": 4.0, "BERT": 4.0}
PY
