#!/usr/bin/env bash
# A training of transformers that is interrupted often enough never stops early, though each checkpoint has the count.
#
# Guess: evaluations without a gain count across a resume. EarlyStoppingCallback stores its count in the checkpoint.
# Behaviour: the count is in trainer_state.json, and a resume does not read it: patience begins anew. Only
#   restore_callback_states_from_checkpoint, which is false by default, reads it back. The best value itself is kept.
# Packages: transformers 5.23.0, torch 2.13.0, accelerate 1.15.0, datasets 5.2.0
# Why it matters: on machines that are taken away, whether and where a training stops depends on when that happens. With
#   fewer evaluations between two interruptions than the patience has, it trains to the last step that is allowed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    transformers==5.23.0 torch==2.13.0 accelerate==1.15.0 datasets==5.2.0
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false CUDA_VISIBLE_DEVICES=

venv/bin/python - 2>/dev/null <<'PY'
import json

import torch
import transformers
from datasets import Dataset
from transformers import EarlyStoppingCallback, LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer

print("version: transformers", transformers.__version__)
PATIENCE, EVERY, LAST = 4, 3, 15
rows = Dataset.from_list([{"input_ids": row, "labels": row} for row in torch.randint(0, 40, (8, 6)).tolist()])
config = LlamaConfig(
    vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
)


def trained(folder, steps, resume=False, **more):
    """The step at which a training that gains nothing ends: its learning rate is 0, and it is evaluated each step."""
    args = transformers.TrainingArguments(
        output_dir=folder, per_device_train_batch_size=2, max_steps=steps, learning_rate=0.0, eval_strategy="steps",
        eval_steps=1, save_strategy="steps", save_steps=1, metric_for_best_model="eval_loss", greater_is_better=False,
        load_best_model_at_end=True, report_to=[], use_cpu=True, disable_tqdm=True, **more,
    )
    torch.manual_seed(0)
    trainer = Trainer(
        model=LlamaForCausalLM(config), args=args, train_dataset=rows, eval_dataset=rows,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=PATIENCE)],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return trainer.state.global_step


whole = trained("whole", LAST)
for stop in range(EVERY, LAST + 1, EVERY):
    ended = trained("parts", stop, resume=stop > EVERY)
with open("parts/checkpoint-3/trainer_state.json") as file:
    stored = json.load(file)["stateful_callbacks"]["EarlyStoppingCallback"]["attributes"]
restored = trained("restored", EVERY)
restored = trained("restored", LAST, resume=True, restore_callback_states_from_checkpoint=True)
print(f"guess: {whole} steps, with interruptions or without")
print(f"the checkpoint of step {EVERY} has", stored, f"and with the option a resumed training ends at {restored}")
print(f"seen: {whole} steps without interruption, {ended} of {LAST} with one every {EVERY} steps")
assert whole == restored == PATIENCE + 1 and ended == LAST
assert stored == {"early_stopping_patience_counter": EVERY - 1}
PY
