"""ELECTRA's sampling, and what flows where."""

import torch

from workloads.load import load
from workloads.model.electra import sample, uniform
from workloads.workload import Vocabulary

VOCABULARY = Vocabulary(97, eos=0, pad=1, cls=3, sep=4, mask=5)


def test_samples_follow_the_distribution() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(4, 5000, -1)
    drawn = sample(logits, uniform(torch.arange(4) * 2**40 + 17, 5000))
    shares = torch.bincount(drawn.flatten(), minlength=4) / drawn.numel()
    assert torch.allclose(shares, torch.tensor([0.1, 0.2, 0.3, 0.4]), atol=0.02)


def test_numbers_are_uniform_and_differ_between_rows_and_places() -> None:
    numbers = uniform(torch.tensor([0, 1, 2**32, 2**62 + 1]), 4000)
    assert torch.all((numbers >= 0) & (numbers < 1))
    assert torch.allclose(numbers.mean(1), torch.full((4,), 0.5), atol=0.02)
    assert torch.allclose(numbers.var(1), torch.full((4,), 1 / 12), atol=0.005)
    correlation = torch.corrcoef(torch.cat((numbers, numbers[:1].roll(1, 1))))
    assert (correlation - torch.eye(5)).abs().max() < 0.06


def test_a_row_draws_the_same_however_the_batch_is_cut() -> None:
    workload = load("electra-tiny", "replaced_token_detection", VOCABULARY, sequence_length=32)
    model = workload.build().eval()
    model.load_state_dict({n: workload.initial(n, 0) for n in workload.shapes})
    tokens = torch.randint(6, 97, (4, 32), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens, "targets": tokens, "labels": tokens, "sample_seed": torch.arange(4)}
    rows = [model({k: v[i : i + 1] for k, v in batch.items()}).replaced for i in range(4)]
    assert torch.equal(model(batch).replaced, torch.cat(rows))


def test_a_certain_token_is_always_drawn() -> None:
    logits = torch.full((1, 50, 7), -1e4)
    logits[..., 6] = 0.0
    assert (sample(logits, uniform(torch.tensor([3]), 50)) == 6).all()


def test_only_masked_tokens_are_replaced_and_a_lucky_guess_is_none() -> None:
    workload = load("electra-tiny", "replaced_token_detection", VOCABULARY, sequence_length=32)
    model = workload.build()
    model.load_state_dict({n: workload.initial(n, 0) for n in workload.shapes})
    targets = torch.randint(6, 97, (2, 32), generator=torch.Generator().manual_seed(0))
    masked = torch.zeros(2, 32, dtype=torch.bool)
    masked[:, ::4] = True
    batch = {
        "tokens": targets.masked_fill(masked, 5),
        "targets": targets,
        "sample_seed": torch.tensor([1, 2]),
    }
    batch["labels"] = targets.masked_fill(~masked, -100)
    replaced = model(batch).replaced
    assert not replaced[~masked].any()
    assert replaced[masked].float().mean() > 0.8
    with torch.no_grad():
        model.tokens.weight.zero_()
        model.generator.head.output.bias.fill_(-50.0)
        model.generator.head.output.bias[int(targets[0, 0])] = (
            50.0  # the generator now always says this token
        )
    assert not model(batch).replaced[0, 0]


def test_the_discriminator_does_not_teach_the_generator() -> None:
    workload = load("electra-tiny", "replaced_token_detection", VOCABULARY, sequence_length=32)
    model = workload.build()
    model.load_state_dict({n: workload.initial(n, 0) for n in workload.shapes})
    tokens = torch.full((1, 32), 5)
    batch = {"tokens": tokens, "targets": tokens + 1, "labels": tokens + 1, "sample_seed": torch.tensor([1])}
    workload.loss(model, batch).extra.backward()
    assert all(p.grad is None for n, p in model.named_parameters() if n.startswith("generator."))
    assert model.tokens.weight.grad is not None
