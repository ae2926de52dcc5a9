import pytest
import torch

from helpers import models, precision

TINY = models.GPTConfig(d_model=32, n_layers=1, n_heads=2, seq_len=16)


def test_labels_say_real_or_emulated(cpu):
    assert precision.choose("fp32", cpu).label == "FP32"
    assert precision.choose("bf16", cpu).label == "BF16"
    assert precision.choose("fp8", cpu).label == "FP8 DelayedScaling HYBRID (EMULATED)"
    assert precision.choose("fp8", cpu, fp8_format="E4M3").label == "FP8 DelayedScaling E4M3 (EMULATED)"
    assert "Float8CurrentScaling" in precision.choose("fp8", cpu, recipe="current").label


def test_the_recipe_is_the_one_the_notebooks_teach(cpu):
    recipe = precision.choose("fp8", cpu).recipe
    assert (recipe.fp8_format.name, recipe.amax_history_len, recipe.amax_compute_algo, recipe.margin) == (
        "HYBRID",
        16,
        "max",
        0,
    )
    assert precision.choose("fp8", cpu, amax_history_len=1024).recipe.amax_history_len == 1024


@pytest.mark.parametrize(
    ("arguments", "fields", "message"),
    [
        (("int8",), {}, "'int8' is not known; choose one of fp32, bf16, fp8"),
        (("fp8", "late"), {}, "'late' is not known; choose one of delayed, current, block, mxfp8, nvfp4"),
        (("fp8",), {"fp8_format": "E3M4"}, "'E3M4' is not known; choose 'HYBRID' or 'E4M3'"),
        (("fp8",), {"fp8_format": "E5M2"}, "E5M2"),
        (("fp8",), {"history": 4}, "does not take"),
    ],
)
def test_unknown_names_are_refused(cpu, arguments, fields, message):
    name, *recipe = arguments
    with pytest.raises(ValueError, match=message):
        precision.choose(name, cpu, *recipe, **fields)


def test_fp8_refuses_dimensions_that_are_not_multiples_of_16(cpu):
    config = models.GPTConfig(d_model=24, n_layers=1, n_heads=2, seq_len=16)
    with pytest.raises(ValueError, match="FP8 needs multiples of 16; given d_model=24"):
        precision.choose("fp8", cpu).build(config)
    precision.choose("bf16", cpu).build(config)


def test_bf16_is_refused_where_the_gpu_only_imitates_it(cpu):
    from dataclasses import replace

    t4 = replace(cpu, tier="fp32", device="cuda", capability=(7, 5))
    with pytest.raises(ValueError, match=r"BF16 needs compute capability 8.0; this GPU has \(7, 5\)"):
        precision.choose("bf16", t4)


def test_each_precision_computes_differently_from_the_same_weights(cpu):
    tokens = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(0))
    logits = {}
    for name in precision.NAMES:
        chosen = precision.choose(name, cpu)
        model = chosen.build(TINY)
        with torch.no_grad(), chosen.autocast():
            logits[name] = model(tokens)
    error = {name: ((logits[name] - logits["fp32"]).norm() / logits["fp32"].norm()).item() for name in logits}
    assert 0 < error["bf16"] < error["fp8"] < 0.2


def test_nvfp4_rounds_stochastically_from_its_own_seed(cpu):
    """Chosen anew, a run repeats; another seed, or going on with the same precision, draws other numbers."""
    tokens = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(0))

    def gradient(chosen):
        model = chosen.build(TINY)
        with chosen.autocast():
            logits = model(tokens)
        logits.logsumexp(-1).sum().backward()
        return model.blocks[0].fc1.weight.grad

    first = precision.choose("fp8", cpu, recipe="nvfp4")
    assert "NVFP4BlockScaling" in first.label
    once = gradient(first)
    assert once.isfinite().all()
    assert once.any()
    assert torch.equal(once, gradient(precision.choose("fp8", cpu, recipe="nvfp4")))
    assert not torch.equal(once, gradient(first))
    assert not torch.equal(once, gradient(precision.choose("fp8", cpu, recipe="nvfp4", seed=1)))
    nearest = {"recipe": "nvfp4", "disable_stochastic_rounding": True}
    assert torch.equal(*(gradient(precision.choose("fp8", cpu, seed=seed, **nearest)) for seed in (0, 1)))
