#!/usr/bin/env bash
# With gather_across_devices, two ranks train another GISTEmbedLoss than one process with all of the rows.
#
# Guess: gathering makes the loss, and its gradient averaged over ranks, those of one large batch, as it does for
#   MultipleNegativesRankingLoss. How many processes there are changes nothing.
# Behaviour: positives and negatives of all ranks are gathered, anchors are not. By default an anchor is contrasted with the other
#   anchors too, and those of other ranks are missing: the loss is lower and its gradient is another. With
#   contrast_anchors=False two ranks equal one process. CachedGISTEmbedLoss does the same.
# Packages: sentence-transformers 6.2.0, transformers 5.23.0, torch 2.13.0 with gloo
# Why it matters: on eight GPUs seven eighths of the anchors' contrasts are gone. A recipe that was found on one large GPU trains another
#   objective on several, and its losses cannot be compared.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
    sentence-transformers==6.2.0 transformers==5.23.0 torch==2.13.0
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false CUDA_VISIBLE_DEVICES=

cat > gathered.py <<'PY'
import os

import sentence_transformers
import torch
import torch.distributed as dist
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import GISTEmbedLoss, MultipleNegativesRankingLoss
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

RANKS, PAIRS = 2, 8
WORDS = [f"w{number}" for number in range(60)]


def write_model(folder, seed, width):
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    ids = {word: number for number, word in enumerate([*special.values(), *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(ids, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=16, **special).save_pretrained(folder)
    torch.manual_seed(seed)
    BertModel(BertConfig(
        vocab_size=len(ids), hidden_size=width, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )).save_pretrained(folder)


def gist(model, gather, **options):
    return GISTEmbedLoss(model, SentenceTransformer("guide", device="cpu"), temperature=0.1, gather_across_devices=gather, **options)


LOSSES = {
    "ranking": lambda model, gather: MultipleNegativesRankingLoss(model, scale=10, gather_across_devices=gather),
    "GIST": gist,
    "GIST without anchors": lambda model, gather: gist(model, gather, contrast_anchors=False),
}


def computed(build, pairs, gather):
    """The loss of some pairs of texts, and the gradient of all weights."""
    random = torch.Generator().manual_seed(3)
    words = [[" ".join(WORDS[i] for i in torch.randint(60, (5,), generator=random)) for _ in range(PAIRS)] for _ in range(2)]
    model = SentenceTransformer("model", device="cpu")
    loss = build(model, gather)([model.preprocess([column[pair] for pair in pairs]) for column in words], None)
    loss.backward()
    gradient = [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
    return torch.cat([loss.detach()[None], *gradient])


def rank_main(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    seen = {}
    for name, build in LOSSES.items():
        ranks = computed(build, range(rank * PAIRS // RANKS, (rank + 1) * PAIRS // RANKS), True)
        dist.all_reduce(ranks)
        ranks, one = ranks / RANKS, computed(build, range(PAIRS), False)
        seen[name] = [round(each, 3) for each in (
            one[0].item(), ranks[0].item(), ((ranks[1:] - one[1:]).norm() / one[1:].norm()).item())]
    if rank == 0:
        print("loss of one process, mean loss of two ranks, distance of the gradients:", seen)
        print(f"seen: GIST's loss is {seen['GIST'][0]} on one process and {seen['GIST'][1]} on two ranks;",
              f"the gradients are {seen['GIST'][2]:.0%} apart")
    for name in ("ranking", "GIST without anchors"):
        assert seen[name][0] == seen[name][1] and seen[name][2] == 0
    assert seen["GIST"][1] < seen["GIST"][0] - 0.05 and seen["GIST"][2] > 0.05
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    print("version: sentence-transformers", sentence_transformers.__version__)
    print("guess: loss and gradient of two ranks are those of one process")
    write_model("model", 0, 16)
    write_model("guide", 1, 8)
    torch.multiprocessing.spawn(rank_main, (os.path.abspath("store"),), RANKS)
PY
GLOO_SOCKET_IFNAME=lo venv/bin/python -W ignore gathered.py 2>/dev/null
