#!/usr/bin/env bash
# TRL's default correction of the divergence changes GRPO's gradient while the loss keeps its value.
#
# Guess: on fresh answers the importance ratio is exactly 1, so multiplying the divergence by it changes
#   nothing: use_bias_correction_kl true and false train alike until answers are reused.
# Behaviour: the ratio is 1 in value and not in its derivative. The losses are equal to the last digit, and the
#   gradients differ by a factor of about four here. The default is true.
# Packages: trl 1.16.0, transformers 5.23.0, torch 2.13.0
# Why it matters: beta is carried over from recipes and papers, and the logged loss cannot show that it means
#   something else than in the formula of the paper.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    trl==1.16.0 transformers==5.23.0 torch==2.13.0
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false CUDA_VISIBLE_DEVICES=

venv/bin/python - 2>/dev/null <<'PY'
import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models

print("version: trl", trl.__version__, "transformers", transformers.__version__)
print("guess: with fresh answers both settings give one loss and one gradient")
SIZE, ROWS, LENGTH = 40, 4, 6
words = {f"w{number}": number for number in range(SIZE)}
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w3")), pad_token="w1", eos_token="w2"
)
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=SIZE, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    max_position_embeddings=32, pad_token_id=1, eos_token_id=2,
)
model = transformers.LlamaForCausalLM(config)
trainer = trl.GRPOTrainer(
    model=model,
    reward_funcs=lambda completions, **_: [0.0] * len(completions),
    args=trl.GRPOConfig(
        output_dir="out", per_device_train_batch_size=ROWS, num_generations=ROWS, loss_type="grpo",
        max_completion_length=LENGTH, bf16=False, report_to=[], use_cpu=True,
    ),
    train_dataset=Dataset.from_list([{"prompt": "w7"}]),
    processing_class=tokenizer,
)
trainer.current_gradient_accumulation_steps = 1
trainer.beta = 0.1
answers = torch.randint(5, SIZE, (ROWS, LENGTH))
inputs = {
    "prompt_ids": torch.full((ROWS, 2), 7), "prompt_mask": torch.ones(ROWS, 2, dtype=torch.long),
    "completion_ids": answers, "completion_mask": torch.ones(ROWS, LENGTH, dtype=torch.long),
    "advantages": torch.zeros(ROWS), "old_per_token_logps": None,
    "ref_per_token_logps": torch.full((ROWS, LENGTH), -1.5), "num_items_in_batch": torch.tensor(ROWS * LENGTH),
}
found = {}
for corrected in (False, True):
    trainer.args.use_bias_correction_kl = corrected
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    norm = sum(float(p.grad.square().sum()) for p in trainer.model.parameters()) ** 0.5
    found[corrected] = (loss.item(), norm)
    print(f"use_bias_correction_kl {corrected}: loss {loss.item():.6f}, gradient norm {norm:.4f}")
default = trl.GRPOConfig(output_dir="out", bf16=False, report_to=[], use_cpu=True).use_bias_correction_kl
ratio = found[False][1] / found[True][1]
print(f"seen: default {default}; equal losses, and gradients that differ by a factor of {ratio:.1f}")
assert default is True
assert abs(found[True][0] - found[False][0]) < 1e-6
assert ratio > 3
PY
