from types import SimpleNamespace

import pytest
import torch
from torch import nn

from helpers import checkpoints, data, fp8_state, models, precision, training

TINY = models.GPTConfig(d_model=32, n_layers=2, n_heads=2, seq_len=16)
LAYERS = [f"blocks.{i}.{name}" for i in range(2) for name in ("qkv", "proj", "fc1", "fc2")]


def trained(cpu, steps=5, **recipe):
    chosen = precision.choose("fp8", cpu, **recipe)
    model = chosen.build(TINY)
    generator = torch.Generator().manual_seed(1)
    training.train(model, chosen, lambda: data.arithmetic_batch(4, 16, generator), steps, lr=1e-3)
    return chosen, model


def te_module(gemms, length=4):
    """A module as TE leaves it after a forward: only its state, every number another."""
    module = nn.Module()
    module.fp8_meta = {"fp8_checkpoint": True}
    for direction, columns in (("scaling_fwd", 3 * gemms), ("scaling_bwd", 2 * gemms)):
        scale = torch.arange(1.0, columns + 1)
        history = torch.arange(float(length * columns)).view(length, columns)
        module.fp8_meta[direction] = SimpleNamespace(scale=scale, amax_history=history)
    return module


def te_model(n_layers=2, **options):
    """Nested and named as in a model of te.TransformerLayer."""
    model = nn.Module()
    model.blocks = nn.ModuleList()
    for _ in range(n_layers):
        block, block.self_attention = nn.Module(), nn.Module()
        block.self_attention.layernorm_qkv = te_module(1, **options)
        block.self_attention.core_attention = te_module(2, **options)  # placeholders
        block.self_attention.proj = te_module(1, **options)
        block.layernorm_mlp = te_module(2, **options)
        model.blocks.append(block)
    return model


def test_real_and_emulated_state_have_the_same_names(cpu):
    _, emulated = trained(cpu)
    expected = [
        f"{layer}.{direction}.{what}"
        for layer in LAYERS
        for direction in ("scaling_fwd", "scaling_bwd")
        for what in ("scale", "amax_history")
    ]
    assert list(fp8_state.delayed_state(emulated)) == expected  # in this order, too
    assert list(fp8_state.delayed_state(te_model())) == expected


def test_the_second_gemm_of_a_layernorm_mlp_has_its_own_columns():
    state = fp8_state.delayed_state(te_model())
    assert state["blocks.0.fc1.scaling_fwd.scale"].tolist() == [1, 2, 3]
    assert state["blocks.0.fc2.scaling_fwd.scale"].tolist() == [4, 5, 6]
    assert state["blocks.0.fc2.scaling_bwd.scale"].tolist() == [3, 4]
    assert state["blocks.0.fc2.scaling_bwd.amax_history"].tolist() == [[2, 3], [6, 7], [10, 11], [14, 15]]


def test_the_tensors_are_views():
    model = te_model()
    fp8_state.delayed_state(model)["blocks.1.fc2.scaling_bwd.scale"].fill_(7)
    assert model.blocks[1].layernorm_mlp.fp8_meta["scaling_bwd"].scale.tolist() == [1, 2, 7, 7]


@pytest.mark.parametrize("fp8_format", ["HYBRID", "E4M3"])
def test_table(cpu, fp8_format):
    chosen, model = trained(cpu, fp8_format=fp8_format)
    table = fp8_state.fp8_state(model, chosen.recipe)
    assert list(table["layer"].unique()) == LAYERS
    assert len(table) == len(LAYERS) * 3
    gradients = table["role"] == "grad_output"
    assert set(table["format"][gradients]) == {"E5M2" if fp8_format == "HYBRID" else "E4M3"}
    assert set(table["format"][~gradients]) == {"E4M3"}
    assert (table["amax newest"] > 0).all()
    assert (table["amax staged"] == 0).all()
    assert set(table["history"]) == {16}
    largest = table["format"].map({"E4M3": 448.0, "E5M2": 57344.0})
    assert ((table["scale"] * table["amax max"] / largest - 1).abs() < 1e-5).all()  # 5 steps: nothing dropped out yet


def test_newest_and_staged_are_the_right_rows():
    table = fp8_state.fp8_state(te_model()).set_index(["layer", "role"])
    assert "format" not in table
    row = table.loc["blocks.1.fc2", "weight"]  # column 4 of 6, 4 rows
    assert (row["scale"], row["amax staged"], row["amax newest"], row["amax max"], row["history"]) == (5, 4, 22, 22, 4)


def test_no_state_where_the_recipe_keeps_none(cpu):
    for chosen in (precision.choose("bf16", cpu), precision.choose("fp8", cpu, recipe="current")):
        model = chosen.build(TINY)
        checkpoints.touch(model, chosen)
        assert fp8_state.delayed_state(model) == {}
        assert fp8_state.fp8_state(model).empty


def test_no_state_before_the_first_forward(cpu):
    assert fp8_state.delayed_state(precision.choose("fp8", cpu).build(TINY)) == {}


def test_state_moves_from_te_to_the_emulator_and_back(cpu):
    _, emulated = trained(cpu, amax_history_len=4)
    real = te_model()
    saved = {name: tensor.clone() for name, tensor in fp8_state.delayed_state(emulated).items()}
    fp8_state.load_delayed_state(real, saved)
    for name, tensor in fp8_state.delayed_state(real).items():
        assert torch.equal(tensor, saved[name]), name


@pytest.mark.parametrize(
    ("other", "message"),
    [(te_model(n_layers=1), "of another model or recipe"), (te_model(length=8), "another history length")],
)
def test_foreign_state_is_refused_and_nothing_changes(other, message):
    model = te_model()
    before = {name: tensor.clone() for name, tensor in fp8_state.delayed_state(model).items()}
    saved = {name: tensor + 100 for name, tensor in fp8_state.delayed_state(other).items()}
    with pytest.raises(ValueError, match=message):
        fp8_state.load_delayed_state(model, saved)
    assert all(torch.equal(tensor, before[name]) for name, tensor in fp8_state.delayed_state(model).items())
