#!/usr/bin/env bash
# With a PiSSA or OLoRA adapter, TRL's DPO measures against a model that is not the base.
#
# Guess: an adapter that was just made changes nothing, and without it a model is the base. So before the first update
#   policy and reference agree: the rewards are 0, and the loss is ln 2.
# Behaviour: peft starts these adapters with the base's own main directions and takes them out of the base's weights.
#   Switching the adapter off, which is how DPOTrainer gets its reference, leaves the rest of the base. The rewards of an
#   untrained model are not 0, and the divergence pulls towards the rest, to the end of the run. Nothing is said.
# Packages: trl 1.16.0, peft 0.21.2, transformers 5.23.0, torch 2.13.0
# Why it matters: changing init_lora_weights is one word, meant for faster learning, and here it changes the objective.
#   The same holds of whatever switches adapters off to ask the base: GRPO's reference, or a comparison before and after.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    trl==1.16.0 peft==0.21.2 transformers==5.23.0 torch==2.13.0
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false CUDA_VISIBLE_DEVICES=

venv/bin/python - 2>/dev/null <<'PY'
import math

import peft
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback

print("version: trl", trl.__version__, "peft", peft.__version__)
print("guess: without an update the loss is ln 2 = 0.693 and each reward 0, however the adapter begins")
words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(40)}, unk_token="w3"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w1", eos_token="w2")
rows = Dataset.from_list([{"prompt": "w7 w8", "chosen": " w9 w10 w11", "rejected": " w12 w13"}] * 2)


def first_loss(start):
    """Loss and reward of the chosen answer at a learning rate of 0."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=32, pad_token_id=1, eos_token_id=2, initializer_range=0.3,
    )
    args = trl.DPOConfig(
        output_dir="out", per_device_train_batch_size=2, max_steps=1, logging_steps=1, learning_rate=0.0, beta=1.0,
        bf16=False, gradient_checkpointing=False, report_to=[], use_cpu=True, disable_tqdm=True,
    )
    adapter = peft.LoraConfig(r=4, init_lora_weights=start, target_modules=["q_proj", "v_proj", "up_proj"])
    trainer = trl.DPOTrainer(
        model=LlamaForCausalLM(config), args=args, train_dataset=rows, processing_class=tokenizer, peft_config=adapter
    )
    trainer.remove_callback(PrinterCallback)
    with trainer.model.disable_adapter(), torch.no_grad():
        without = trainer.model(torch.tensor([[7, 8, 9]])).logits
    torch.manual_seed(0)
    with torch.no_grad():
        base = LlamaForCausalLM(config).eval()(torch.tensor([[7, 8, 9]])).logits
    trainer.train()
    row = trainer.state.log_history[0]
    return float(row["loss"]), float(row["rewards/chosen"]), (without - base).abs().max().item()


for start in (True, "pissa", "olora"):
    loss, reward, gap = first_loss(start)
    print(f"seen: init_lora_weights={start}: loss {loss:.3f}, reward {reward:.3f}; without the adapter, logits {gap:.2f} from the base")
    if start is True:
        assert abs(loss - math.log(2)) < 1e-3 and reward == 0 and gap < 1e-5
    else:
        assert abs(loss - math.log(2)) > 0.05 and abs(reward) > 0.05 and gap > 0.1
PY
