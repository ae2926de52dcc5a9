import pytest
import torch

from helpers import generation, models, precision

TINY = models.GPTConfig(d_model=32, n_layers=2, n_heads=2, seq_len=16)


@pytest.fixture
def fp32(cpu):
    return precision.choose("fp32", cpu)


def growing(model, prompts, n_tokens):
    """The obvious way: feed what there is, read the last position."""
    tokens = prompts
    for _ in range(n_tokens):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    return tokens


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 15])
@pytest.mark.parametrize("batch", [1, 3])
def test_padding_changes_no_token(fp32, length, batch):
    model = fp32.build(TINY)
    prompts = torch.randint(96, (batch, length), generator=torch.Generator().manual_seed(length))
    generated = generation.generate(model, prompts, 16 - length, fp32)
    assert torch.equal(generated, growing(model, prompts, 16 - length))


def test_fp8_takes_every_length(cpu):
    fp8 = precision.choose("fp8", cpu)
    model = fp8.build(TINY)
    for length in range(1, 16):
        assert generation.generate(model, torch.zeros(1, length, dtype=torch.int64), 1, fp8).shape == (1, length + 1)


def test_generation_leaves_mode_and_fp8_state_alone(cpu):
    from helpers import data, fp8_state, training

    fp8 = precision.choose("fp8", cpu)
    model = fp8.build(TINY)
    generator = torch.Generator().manual_seed(1)
    training.train(model, fp8, lambda: data.arithmetic_batch(4, 16, generator), 3, lr=1e-3)
    before = {k: v.clone() for k, v in fp8_state.delayed_state(model).items()}
    generation.generate(model, torch.full((2, 3), 95), 4, fp8)
    assert model.training
    assert before
    assert all(torch.equal(v, before[k]) for k, v in fp8_state.delayed_state(model).items())


@pytest.mark.parametrize(
    ("prompts", "n_tokens", "message"),
    [
        (torch.tensor([[0, 96]]), 1, "token 96 given; tokens lie in 0 to 95"),
        (torch.tensor([[-1, 5]]), 1, "token -1 given"),
        (torch.zeros(1, 0, dtype=torch.int64), 1, r"shape \(1, 0\) given"),
        (torch.zeros(0, 3, dtype=torch.int64), 1, r"shape \(0, 3\) given"),
        (torch.zeros(3, dtype=torch.int64), 1, r"shape \(3,\) given"),
        (torch.zeros(1, 17, dtype=torch.int64), 0, "a prompt of 17 tokens given; this model takes at most 16"),
        (torch.zeros(1, 10, dtype=torch.int64), 7, r"10 \+ 7 tokens asked for; this model's limit is 16"),
        (torch.zeros(1, 10, dtype=torch.int64), -1, "tokens asked for"),
        (torch.zeros(1, 4), 1, "torch.float32"),
    ],
)
def test_bad_prompts_are_refused(fp32, prompts, n_tokens, message):
    with pytest.raises(ValueError, match=message):
        generation.generate(fp32.build(TINY), prompts, n_tokens, fp32)


def test_stride_report_counts_until_the_first_mistake():
    generated = torch.tensor([[90, 93, 0, 3, 6], [5, 6, 7, 9, 10], [1, 3, 6, 8, 10]])
    report = generation.stride_report(generated, prompt_length=2)
    assert report["stride"].tolist() == [3, 1, 2]
    assert report["right"].tolist() == [3, 1, 0]
    assert report["exact"].tolist() == [True, False, False]
    assert report["differences"][1] == "1 2 1"
