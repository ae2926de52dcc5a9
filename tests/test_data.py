import torch

from helpers import data


def test_576_pairs_are_split_without_overlap_and_for_good():
    train, held_out = data.split_pairs()
    as_set = lambda pairs: set(map(tuple, pairs.tolist()))  # noqa: E731
    assert len(as_set(train)) == 512
    assert len(as_set(held_out)) == 64
    assert not as_set(train) & as_set(held_out)
    assert torch.equal(held_out, data.split_pairs()[1])


def test_each_token_is_the_last_plus_the_stride():
    tokens = data.sequences(torch.tensor([[95, 6], [0, 1]]), 5)
    assert tokens.tolist() == [[95, 5, 11, 17, 23], [0, 1, 2, 3, 4]]


def test_targets_are_the_next_tokens_and_no_held_out_pair_starts_a_sequence():
    inputs, targets = data.arithmetic_batch(256, 16, torch.Generator().manual_seed(1))
    assert inputs.shape == targets.shape == (256, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    starts = set(zip(inputs[:, 0].tolist(), ((targets[:, 0] - inputs[:, 0]) % 96).tolist(), strict=True))
    assert not starts & set(map(tuple, data.split_pairs()[1].tolist()))


def test_same_seed_same_batch():
    a, b = (data.arithmetic_batch(4, 8, torch.Generator().manual_seed(5))[0] for _ in range(2))
    assert torch.equal(a, b)
    assert not torch.equal(a, data.arithmetic_batch(4, 8, torch.Generator().manual_seed(6))[0])


def test_held_out_prompts_continue():
    prompts, continuations = data.held_out_prompts()
    assert prompts.shape == (64, 8)
    assert continuations.shape == (64, 24)
    stride = (prompts[:, 1] - prompts[:, 0]) % 96
    assert torch.equal((prompts[:, -1] + stride) % 96, continuations[:, 0])
