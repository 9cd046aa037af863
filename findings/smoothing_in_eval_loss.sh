#!/usr/bin/env bash
# The Trainer's label smoothing changes eval_loss, though nothing is trained in an evaluation.
#
# Guess: label_smoothing_factor is an option of training. eval_loss is the cross-entropy of the labels, so that runs with
#   different factors can be compared, and its exponential is the perplexity.
# Behaviour: evaluation computes the loss of training, smoothing included. The same model on the same rows has another
#   eval_loss for each factor, above or below the cross-entropy.
# Packages: transformers 5.23.0, torch 2.13.0, accelerate 1.15.0, datasets 5.2.0
# Why it matters: a search over the factor compares losses of different meaning, and takes the factor whose formula is
#   lowest; perplexities in reports are wrong; early stopping follows the smoothed value.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    transformers==5.23.0 torch==2.13.0 accelerate==1.15.0 datasets==5.2.0
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false CUDA_VISIBLE_DEVICES=

venv/bin/python - 2>/dev/null <<'PY'
import torch
import transformers
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

print("version: transformers", transformers.__version__)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, initializer_range=1.0
)
model = LlamaForCausalLM(config).eval()
ids = torch.randint(0, 40, (8, 6))
rows = Dataset.from_list([{"input_ids": row, "labels": row} for row in ids.tolist()])
with torch.no_grad():
    scores = model(ids).logits[:, :-1].log_softmax(-1)
plain = -scores.gather(-1, ids[:, 1:, None]).mean().item()
even = -scores.mean().item()

print(f"guess: eval_loss is {plain:.4f} for every factor")
for factor in (0.0, 0.1, 0.5):
    args = TrainingArguments(
        output_dir="out", label_smoothing_factor=factor, per_device_eval_batch_size=8, report_to=[], use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=args, eval_dataset=rows)
    trainer.remove_callback(PrinterCallback)
    found = trainer.evaluate()["eval_loss"]
    print(f"seen: factor {factor}: eval_loss {found:.4f}")
    assert abs(found - ((1 - factor) * plain + factor * even)) < 1e-4
assert abs(even - plain) > 0.1
PY
