from types import SimpleNamespace

import pytest
import torch

from helpers import data, fp8_state, generation, models, precision, training

TINY = models.GPTConfig(d_model=32, n_layers=2, n_heads=2, seq_len=16)


@pytest.fixture
def fp32(cpu):
    return precision.choose("fp32", cpu)


def recomputed(model, chosen, prompt, n_tokens):
    """One prompt, the obvious way: run the model over all there is, at most the last seq_len tokens; read the end."""
    tokens, limit = prompt.clone(), model.config.seq_len
    for _ in range(n_tokens):
        context = tokens[-limit:]
        rows = context.repeat(8, 1)  # FP8 takes rows in multiples of 8, so the context goes in eight times
        with torch.no_grad(), chosen.autocast():
            logits = model(rows)
        tokens = torch.cat([tokens, logits[0, -1:].argmax(-1)])
    return tokens


def sharp(chosen, config=TINY):
    """An untrained model with large weights, whose tokens depend on the whole context."""
    model = chosen.build(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.mul_(8)
    return model


def ragged(*lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(96, (length,), generator=generator) for length in lengths]


@pytest.mark.parametrize("strategy", generation.STRATEGIES)
def test_every_strategy_gives_the_tokens_of_full_recomputation(fp32, strategy):
    """Prompts of all kinds of lengths in one batch; beyond the limit the window slides."""
    model, prompts = sharp(fp32), ragged(1, 2, 7, 16, 9, 15)
    expected = [recomputed(model, fp32, prompt, 20) for prompt in prompts]
    assert len({tuple(row[-6:].tolist()) for row in expected}) > 1, "all the same: this model would show no mistake"
    slid = generation.generate(model, prompts, 20, fp32, strategy, "slide")
    assert [row.tolist() for row in slid] == [row.tolist() for row in expected]
    stopped = generation.generate(model, prompts, 20, fp32, strategy, "stop")
    assert [row.tolist() for row in stopped] == [row[:16].tolist() for row in expected]


@pytest.mark.parametrize("strategy", generation.STRATEGIES)
def test_a_batch_in_a_tensor_comes_back_in_one(fp32, strategy):
    model, prompts = sharp(fp32), torch.stack(ragged(5, 5, 5))
    expected = torch.stack([recomputed(model, fp32, prompt, 11) for prompt in prompts])
    assert torch.equal(generation.generate(model, prompts, 11, fp32, strategy), expected)
    assert torch.equal(generation.generate(model, prompts, 50, fp32, strategy, "stop"), expected)
    assert torch.equal(generation.generate(model, prompts, 0, fp32, strategy), prompts)


@pytest.fixture(scope="module")
def trained():
    """A model that continues all 64 held-out prompts, trained in emulated FP8, and that precision."""
    hw = SimpleNamespace(device="cpu", backend="torch", bf16=True, recipes={"delayed": "no GPU"})
    chosen = precision.choose("fp8", hw)
    model = chosen.build(models.GPTConfig(d_model=96, n_layers=2, n_heads=2, seq_len=32))
    generator = torch.Generator().manual_seed(3)
    training.train(model, chosen, lambda: data.arithmetic_batch(16, 32, generator), 150, lr=2e-3)
    return model, chosen


@pytest.fixture
def model_and_precision(trained, cpu, request):
    model, fp8 = trained
    if request.param == "fp8":
        return model, fp8
    chosen = precision.choose(request.param, cpu)
    plain = chosen.build(model.config)
    models.transplant(model, plain)
    return plain, chosen


@pytest.mark.parametrize("model_and_precision", precision.NAMES, indirect=True)
def test_all_held_out_prompts_in_every_precision(model_and_precision):
    model, chosen = model_and_precision
    prompts, truth = data.held_out_prompts()
    tokens = prompts  # full recomputation; the batch has 64 rows, so FP8 takes every length
    for _ in range(24):
        with torch.no_grad(), chosen.autocast():
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    assert (tokens[:, 8:] == truth).all(1).sum() >= 63
    for strategy in generation.STRATEGIES:
        assert torch.equal(generation.generate(model, prompts, 24, chosen, strategy), tokens), strategy


@pytest.mark.parametrize("model_and_precision", ["fp8"], indirect=True)
@pytest.mark.parametrize("strategy", generation.STRATEGIES)
def test_fp8_takes_every_length_and_batch(model_and_precision, strategy):
    model, chosen = model_and_precision
    prompts, truth = data.held_out_prompts()
    sequences = torch.cat([prompts, truth], 1)
    for batch, lengths in ((1, range(1, 32)), (3, (1, 8, 9, 31)), (64, (1, 9, 31))):
        for length in lengths:
            generated = generation.generate(model, sequences[:batch, :length], 1, chosen, strategy)
            assert generated.shape == (batch, length + 1)
            assert length < 8 or torch.equal(generated, sequences[:batch, : length + 1])


@pytest.mark.parametrize("recipe", ["current", "block", "mxfp8", "nvfp4"])
def test_every_recipe_decodes_one_row(cpu, recipe):
    config = models.GPTConfig(d_model=128, n_layers=1, n_heads=2, seq_len=48)  # 48 is no multiple of 32
    chosen = precision.choose("fp8", cpu, recipe)
    model = sharp(chosen, config)
    expected = generation.generate(model, ragged(5), 3, chosen, "fixed")
    for strategy in ("growing", "cached"):
        assert generation.generate(model, ragged(5), 3, chosen, strategy)[0].shape == expected[0].shape


def test_training_does_not_notice_generation(cpu):
    """Mode, FP8 state and all losses afterwards are those of a run without it."""
    fp8 = precision.choose("fp8", cpu)
    losses = []
    for between in (False, True):
        model, generator = fp8.build(TINY), torch.Generator().manual_seed(1)
        optimizer = training.make_optimizer(model, 1e-3)
        losses.append([])
        for _ in range(4):
            loss = training.loss_of(model, *data.arithmetic_batch(4, 16, generator), fp8)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
            before = {k: v.clone() for k, v in fp8_state.delayed_state(model).items()}
            if between:
                for strategy in generation.STRATEGIES:
                    generation.generate(model, torch.full((2, 3), 95), 4, fp8, strategy)
            assert model.training
            assert before
            assert all(torch.equal(v, before[k]) for k, v in fp8_state.delayed_state(model).items())
    assert losses[0] == losses[1]


def test_fp8_state_that_a_forward_pass_writes_to_is_put_back(cpu):
    """As TE does it: the amax of an evaluation lands in the staging row, and a first pass makes the state."""
    fp8 = precision.choose("fp8", cpu)
    model = fp8.build(TINY)

    def stage(module, inputs):
        module.fp8_meta["scaling_fwd"].amax_history[0, 0] = 7.0

    for block in model.blocks:
        block.fc1.register_forward_hook(lambda module, inputs, output: stage(module, inputs))
    for _ in range(2):
        generation.generate(model, torch.full((2, 3), 95), 2, fp8)
        state = fp8_state.delayed_state(model)
        assert len(state) == TINY.n_layers * 4 * 2 * 2
        assert all((v == 0).all() for k, v in state.items() if k.endswith("amax_history"))


# --- Sampling ---


@pytest.mark.parametrize("strategy", generation.STRATEGIES)
def test_a_seed_gives_the_same_draws_in_every_strategy(fp32, strategy):
    model, prompts = sharp(fp32), ragged(3, 8)

    def draw(seed, strategy):
        sampling = generation.Sampling(torch.Generator().manual_seed(seed), temperature=2.0, top_k=20)
        rows = generation.generate(model, prompts, 20, fp32, strategy, "slide", sampling)
        return [row.tolist() for row in rows]

    assert draw(1, strategy) == draw(1, "fixed") != draw(2, strategy)


def test_draws_follow_the_probabilities():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0]).expand(40_000, 4)
    for temperature, top_k in ((1.0, None), (0.5, None), (2.0, 2), (1.0, 9)):
        sampling = generation.Sampling(torch.Generator().manual_seed(0), temperature, top_k)
        drawn = sampling.choose(logits, sampling.noise(*logits.shape)).bincount(minlength=4) / len(logits)
        kept = logits[0] if top_k != 2 else torch.tensor([-torch.inf, 1.0, 2.0, -torch.inf])
        expected = (kept / temperature).softmax(0)
        assert (drawn - expected).abs().max() < 0.01  # four standard deviations
        assert (drawn[expected == 0] == 0).all()


def test_one_candidate_is_greedy(fp32):
    model, prompts = sharp(fp32), ragged(4)
    sampling = generation.Sampling(torch.Generator().manual_seed(0), temperature=9.0, top_k=1)
    drawn = generation.generate(model, prompts, 12, fp32, sampling=sampling)
    assert torch.equal(drawn[0], generation.generate(model, prompts, 12, fp32)[0])


# --- Bad input ---


@pytest.mark.parametrize(
    ("prompts", "n_tokens", "message"),
    [
        (torch.tensor([[0, 96]]), 1, "token 96 given; tokens lie in 0 to 95"),
        (torch.tensor([[-1, 5]]), 1, "token -1 given"),
        (torch.zeros(1, 0, dtype=torch.int64), 1, r"shape \(1, 0\) given"),
        (torch.zeros(0, 3, dtype=torch.int64), 1, r"shape \(0, 3\) given"),
        (torch.zeros(3, dtype=torch.int64), 1, r"shape \(3,\) given"),
        (torch.tensor(3), 1, r"shape \(\) given"),
        ([], 1, "prompts in a list given; .* at least one prompt"),
        ([[1, 2]], 1, "prompts in a list given; .* a list of 1-D tensors"),
        ([torch.tensor([1]), torch.zeros(0, dtype=torch.int64)], 1, "one token in each"),
        ([torch.tensor([1]), torch.tensor([1, 96])], 1, "token 96 given"),
        ([torch.zeros(n, dtype=torch.int64) for n in (1, 12)], 5, r"12 \+ 5 tokens asked for"),
        (torch.zeros(1, 17, dtype=torch.int64), 0, "a prompt of 17 tokens given; this model takes at most 16"),
        (torch.zeros(1, 10, dtype=torch.int64), 7, r"10 \+ 7 tokens asked for; this model's limit is 16"),
        (torch.zeros(1, 10, dtype=torch.int64), -1, "tokens asked for"),
        (torch.zeros(1, 4), 1, "torch.float32"),
    ],
)
def test_bad_prompts_are_refused(fp32, prompts, n_tokens, message):
    with pytest.raises(ValueError, match=message):
        generation.generate(fp32.build(TINY), prompts, n_tokens, fp32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "cache"}, "strategy='cache' is not known; choose one of growing, fixed, cached"),
        ({"at_limit": "crop"}, "at_limit='crop' is not known; choose one of error, stop, slide"),
        ({"graph": True}, "strategy='fixed' on 'cpu': a CUDA graph needs a GPU"),
    ],
)
def test_bad_options_list_the_choices(fp32, options, message):
    with pytest.raises(ValueError, match=message):
        generation.generate(fp32.build(TINY), torch.zeros(1, 4, dtype=torch.int64), 1, fp32, **options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"generator": None}, r"generator=None given; use torch.Generator\(\).manual_seed"),
        ({"temperature": 0.0}, "temperature=0.0 given; a number above 0"),
        ({"temperature": float("nan")}, "temperature=nan given"),
        ({"top_k": 0}, "top_k=0 given; a whole number of at least 1"),
    ],
)
def test_bad_sampling_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        generation.Sampling(**{"generator": torch.Generator()} | fields)


def test_only_plain_models_are_compiled(cpu):
    fp8 = precision.choose("fp8", cpu)
    with (
        pytest.raises(ValueError, match="compiled=True needs a plain PyTorch model"),
        generation.decoding(fp8.build(TINY), ragged(3), fp8, "cached", compiled=True),
    ):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fixed", "cached"])
def test_a_compiled_step_gives_the_same_tokens(fp32, strategy):
    model, prompts = sharp(fp32), ragged(1, 9, 16)
    expected = generation.generate(model, prompts, 20, fp32, strategy, "slide")
    with generation.decoding(model, prompts, fp32, strategy, slide=True, compiled=True) as step:
        new = torch.stack([step().clone() for _ in range(20)], 1)
    assert [row[-20:].tolist() for row in expected] == new.tolist()


def test_stride_report_counts_until_the_first_mistake():
    generated = torch.tensor([[90, 93, 0, 3, 6], [5, 6, 7, 9, 10], [1, 3, 6, 8, 10]])
    report = generation.stride_report(generated, prompt_length=2)
    assert report["stride"].tolist() == [3, 1, 2]
    assert report["right"].tolist() == [3, 1, 0]
    assert report["exact"].tolist() == [True, False, False]
    assert report["differences"][1] == "1 2 1"
