import json
import math
import os
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from helpers import checkpoints, data, fp8_state, generation, models, precision, training
from helpers.hardware import detect

TINY = models.GPTConfig(d_model=32, n_layers=1, n_heads=2, seq_len=16)
LR = 1e-3


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The models are so small that threads which wait for each other would take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def batches(generator, config=TINY, batch=4, device="cpu"):
    return lambda: data.arithmetic_batch(batch, config.seq_len, generator, device)


def train(chosen, steps, path=None, every=100, config=TINY, on_step=None):
    """A run from a fresh model, or from `path`: (losses of the steps it made, model)."""
    model, generator = chosen.build(config), torch.Generator().manual_seed(1)
    checkpoint = checkpoints.Checkpoint(path, generator, every) if path else None
    next_batch = batches(generator, config, device=chosen.device)
    history = training.train(model, chosen, next_batch, steps, LR, on_step, checkpoint)
    return history, model


# ----------------------------------------------------------------------------------------------------- going on

WIDE = models.GPTConfig(d_model=128, n_layers=1, n_heads=2, seq_len=32)  # block scaling needs multiples of 128
SMALL = models.GPTConfig(d_model=32, n_layers=1, n_heads=2, seq_len=32)
RECENT = {"amax_history_len": 4, "amax_compute_algo": "most_recent", "fp8_format": "E4M3"}
RUNS = {
    "fp32": ("fp32", {}, SMALL),
    "bf16": ("bf16", {}, SMALL),
    "delayed": ("fp8", {"recipe": "delayed"}, SMALL),
    "delayed, most recent of 4, E4M3": ("fp8", {"recipe": "delayed"} | RECENT, SMALL),
    "current": ("fp8", {"recipe": "current"}, SMALL),
    "block": ("fp8", {"recipe": "block"}, WIDE),
    "mxfp8": ("fp8", {"recipe": "mxfp8"}, SMALL),
    "nvfp4": ("fp8", {"recipe": "nvfp4"}, SMALL),
}


@pytest.mark.parametrize("run", RUNS)
def test_a_run_that_goes_on_is_the_uninterrupted_run(cpu, tmp_path, run):
    name, fields, config = RUNS[run]
    path = tmp_path / "run.safetensors"
    whole, model = train(precision.choose(name, cpu, **fields), 6, config=config)
    begun, _ = train(precision.choose(name, cpu, **fields), 4, path, config=config)
    rest, resumed = train(precision.choose(name, cpu, **fields), 6, path, config=config)
    assert begun["loss"].tolist() == whole["loss"].tolist()[:4]
    assert rest["step"].tolist() == [4, 5]
    assert rest["loss"].tolist() == whole["loss"].tolist()[4:]
    assert all(map(torch.equal, models.plain_state(model).values(), models.plain_state(resumed).values()))


def test_a_run_saves_itself_every_so_often_and_at_its_end(cpu, tmp_path):
    chosen, path, seen = precision.choose("fp32", cpu), tmp_path / "run.safetensors", []

    def look(step):
        seen.append(checkpoints.load_weights(path, chosen.build(TINY)) if path.exists() else None)

    train(chosen, 8, path, every=3, on_step=look)
    assert seen == [None, None, None, 3, 3, 3, 6, 6]
    assert checkpoints.load_weights(path, chosen.build(TINY)) == 8
    history, _ = train(chosen, 8, path)
    assert history.empty
    with pytest.raises(ValueError, match=r"steps=7 given, but .*run.safetensors has 8 done"):
        train(chosen, 7, path)
    with pytest.raises(ValueError, match="every=0 given"):
        checkpoints.Checkpoint(path, torch.Generator(), 0)


def test_a_checkpoint_from_before_the_first_step(cpu, tmp_path):
    chosen, path = precision.choose("fp8", cpu), tmp_path / "run.safetensors"
    model, generator = chosen.build(TINY), torch.Generator().manual_seed(1)
    checkpoints.save(path, model, chosen, 0, training.make_optimizer(model, LR), generator)
    assert fp8_state.delayed_state(model) == {}
    from_file, _ = train(chosen, 4, path)
    assert from_file["loss"].tolist() == train(chosen, 4)[0]["loss"].tolist()


def test_going_on_leaves_the_file_alone(cpu, tmp_path):
    """What is loaded may be the file mapped into memory: training must not write through it."""
    chosen, path = precision.choose("fp8", cpu), tmp_path / "run.safetensors"
    train(chosen, 2, path)
    before = path.read_bytes()
    model, generator = chosen.build(TINY), torch.Generator()
    optimizer = training.make_optimizer(model, LR)
    checkpoints.load(path, model, chosen, optimizer, generator)
    for _ in range(2):
        training.loss_of(model, *batches(generator)(), chosen).backward()
        optimizer.step()
    assert path.read_bytes() == before


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of 3 steps in emulated FP8: its file, never to be changed, and the model."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("WORKSHOP_TIER", "cpu")
        chosen = precision.choose("fp8", detect())
    path = tmp_path_factory.mktemp("saved") / "model.safetensors"
    _, model = train(chosen, 3, path)
    return path, model


def test_for_inference_weights_and_scales_suffice(cpu, saved, tmp_path):
    _, model = saved
    chosen, path = precision.choose("fp8", cpu), tmp_path / "deep" / "model.safetensors"
    checkpoints.save(path, model, chosen, 3)
    assert [p.name for p in path.parent.iterdir()] == ["model.safetensors"]
    other = chosen.build(TINY, torch.Generator().manual_seed(9))
    assert checkpoints.load(path, other, chosen) == 3
    for name, tensor in fp8_state.delayed_state(model).items():
        assert torch.equal(tensor, fp8_state.delayed_state(other)[name]), name
    prompts, _ = data.held_out_prompts()
    assert torch.equal(*(generation.generate(m, prompts[:4, :4], 8, chosen) for m in (model, other)))
    with pytest.raises(ValueError, match="saved without generator states and optimizer states"):
        checkpoints.load(path, other, chosen, training.make_optimizer(other, LR), torch.Generator())


def test_the_weights_alone_load_into_any_precision(cpu, saved):
    path, model = saved
    other = precision.choose("bf16", cpu).build(TINY, torch.Generator().manual_seed(9))
    assert checkpoints.load_weights(path, other) == 3
    assert torch.equal(other.blocks[0].fc1.weight, model.blocks[0].fc1.weight)


def test_the_settings_of_adam_stay_the_callers(cpu, saved):
    path, _ = saved
    chosen = precision.choose("fp8", cpu)
    model = chosen.build(TINY)
    optimizer = training.make_optimizer(model, 1e-5)
    checkpoints.load(path, model, chosen, optimizer)
    assert optimizer.param_groups[0]["lr"] == 1e-5
    assert {state["step"].item() for state in optimizer.state.values()} == {3}


def test_readable_without_the_workshop(saved):
    """Plain names, plain tensors, JSON: nothing that runs code."""
    path, _ = saved
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["header"])
    assert (header["step"], header["config"]["d_model"]) == (3, 32)
    assert header["precision"]["recipe"]["name"] == "DelayedScaling"
    assert header["precision"]["recipe"]["fields"]["amax_history_len"] == 16
    assert header["precision"]["recipe"]["fields"]["fp8_format"] == "HYBRID"
    names = load_file(path).keys()
    assert {
        "blocks.0.qkv.weight",
        "optimizer.blocks.0.qkv.weight.exp_avg",
        "fp8.blocks.0.fc2.scaling_bwd.amax_history",
    } <= names


# --------------------------------------------------------------------------------- refused, and nothing is changed


class Target:
    """A model in the middle of another run, and all that loading could change."""

    def __init__(self, chosen, config=TINY):
        self.chosen, self.model = chosen, chosen.build(config, torch.Generator().manual_seed(9))
        self.optimizer, self.generator = training.make_optimizer(self.model, LR), torch.Generator().manual_seed(7)
        next_batch = batches(self.generator, config)
        for _ in range(2):
            training.loss_of(self.model, *next_batch(), chosen).backward()
            self.optimizer.step()
        if chosen.kind == "emulated":
            torch.rand(3, generator=chosen.generator)

    def load(self, path):
        return checkpoints.load(path, self.model, self.chosen, self.optimizer, self.generator)

    def everything(self):
        tensors = models.plain_state(self.model)
        tensors |= {name: tensor.clone() for name, tensor in fp8_state.delayed_state(self.model).items()}
        for i, states in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{i}.{key}": value.clone() for key, value in states.items()}
        return tensors | {"data": self.generator.get_state(), "rounding": self.chosen.generator.get_state()}

    @contextmanager
    def unchanged(self):
        before = self.everything()
        yield
        after = self.everything()
        assert before.keys() == after.keys()
        assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_loading_changes_all_of_it(cpu, saved):
    """So that the tests below can fail."""
    target = Target(precision.choose("fp8", cpu))
    before = target.everything()
    target.load(saved[0])
    after = target.everything()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same <= {f"blocks.0.{layer}.{way}.scale" for layer in ("qkv", "proj", "fc1", "fc2") for way in ("scaling_fwd", "scaling_bwd")} | {
        name for name in before if name.endswith((".bias", "ln1.weight", "ln2.weight", "ln_f.weight"))
    }  # fmt: skip


def changed(path, to, change):
    """A copy of a checkpoint at `to`, changed by `change(tensors, header)`."""
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["header"])
    tensors = load_file(path)
    header = change(tensors, header) or header  # a change of the tensors alone returns nothing
    save_file(tensors, to, metadata={"header": json.dumps(header)})
    return to


def without(prefix):
    def change(tensors, header):
        for name in [name for name in tensors if name.startswith(prefix)]:
            del tensors[name]

    return change


def put(name, make):
    """`make(old tensor, or None)` gives the new one."""

    def change(tensors, header):
        tensors[name] = make(tensors.get(name))

    return change


def filled(name, value):
    return put(name, lambda t: t.fill_(value))


def headed(**fields):
    return lambda tensors, header: header | fields


SCALE, HISTORY = "fp8.blocks.0.fc1.scaling_fwd.scale", "fp8.blocks.0.fc1.scaling_fwd.amax_history"
MOMENT = "optimizer.blocks.0.fc1.weight.exp_avg"
BROKEN = {
    "a weight is missing": (without("head.weight"), "head.weight is missing"),
    "a moment is missing": (without(MOMENT), f"{MOMENT} is missing"),
    "a scale is missing": (without(SCALE), f"{SCALE} is missing"),
    "the data's generator is missing": (without("generator.data"), "generator.data is missing"),
    "the rounding's generator is missing": (without("generator.rounding"), "generator.rounding is missing"),
    "no FP8 state": (without("fp8."), "saved without FP8 state"),
    "no Adam": (without("optimizer."), "saved without optimizer states"),
    "a weight too many": (put("blocks.1.fc1.weight", lambda _: torch.zeros(2)), "blocks.1.fc1.weight is unknown"),
    "weight in half": (put("head.weight", lambda t: t.half()), "head.weight has dtype torch.float16, torch.float32"),
    "moment in BF16": (put(MOMENT, lambda t: t.bfloat16()), f"{MOMENT} has dtype torch.bfloat16"),
    "scale in double": (put(SCALE, lambda t: t.double()), f"{SCALE} has dtype torch.float64"),
    "integers as a history": (put(HISTORY, lambda t: t.long()), f"{HISTORY} has dtype torch.int64"),
    "a generator of floats": (put("generator.data", lambda t: t.float()), "generator.data has dtype torch.float32"),
    "another shape": (put("head.weight", lambda t: t[:, :8].contiguous()), r"head.weight has shape \(96, 8\), \(96, 32\)"),
    "a short generator": (put("generator.data", lambda t: t[:100].clone()), r"generator.data has shape \(100,\)"),
    "a senseless generator": (put("generator.data", torch.ones_like), "generator.data is no state of a random generator"),
    "NaN in a weight": (filled("pos.weight", math.nan), "pos.weight holds values that are not finite"),
    "NaN in a moment": (filled(MOMENT, math.nan), f"{MOMENT} holds values that are not finite"),
    "infinite scale": (filled(SCALE, math.inf), f"{SCALE} holds values that are not finite"),
    "NaN in a history": (filled(HISTORY, math.nan), f"{HISTORY} holds values that are not finite"),
    "another schema": (headed(schema="fp8-workshop/checkpoint/1"), "has schema 'fp8-workshop/checkpoint/1', this code"),
    "header no object": (lambda tensors, header: [1], "has schema None"),
    "no step": (headed(step=None), "without a valid step; delete it"),
    "step and sizes are text": (headed(step="3", config="small"), "without a valid step and config"),
    "no precision": (headed(precision={}), "without a valid precision"),
    "no recipe": (headed(precision={"name": "fp8", "kind": "real", "device": "cuda"}), "without a valid recipe"),
}  # fmt: skip


@pytest.mark.parametrize("how", BROKEN)
def test_a_changed_file_is_refused_by_name(cpu, saved, tmp_path, how):
    change, message = BROKEN[how]
    path = changed(saved[0], tmp_path / "changed.safetensors", change)
    target, before = Target(precision.choose("fp8", cpu)), path.read_bytes()
    with target.unchanged(), pytest.raises(ValueError, match=f"changed.safetensors .*{message}"):
        target.load(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("how", ["truncated", "short header", "text", "empty", "foreign", "folder"])
def test_what_is_no_whole_checkpoint_is_refused_by_name(cpu, saved, tmp_path, how):
    path, whole = tmp_path / "model.safetensors", saved[0].read_bytes()
    if how == "foreign":
        save_file({"a": torch.zeros(2)}, path)
    elif how == "folder":
        path.mkdir()
    else:
        path.write_bytes({"truncated": whole[:-100], "short header": whole[:50], "text": b"not it", "empty": b""}[how])
    target = Target(precision.choose("fp8", cpu))
    with target.unchanged(), pytest.raises(ValueError, match=r"model.safetensors .*delete it to train anew"):
        target.load(path)
    with target.unchanged(), pytest.raises(ValueError, match=r"model.safetensors .*delete it to train anew"):
        checkpoints.load_weights(path, target.model)
    assert path.exists()


OTHERS = {
    "wider": ("fp8", {}, models.GPTConfig(d_model=64, n_layers=1, n_heads=2, seq_len=16), "d_model is 32 there and 64 here"),
    "deeper": ("fp8", {}, models.GPTConfig(d_model=32, n_layers=2, n_heads=2, seq_len=16), "n_layers is 1 there and 2"),
    "BF16": ("bf16", {}, TINY, "name is 'fp8' there and 'bf16' here.*load_weights"),
    "current scaling": ("fp8", {"recipe": "current"}, TINY, "recipe is 'DelayedScaling' there and 'Float8CurrentScaling'"),
    "history": ("fp8", {"amax_history_len": 32}, TINY, "amax_history_len is 16 there and 32 here"),
    "E4M3": ("fp8", {"fp8_format": "E4M3"}, TINY, "fp8_format is 'HYBRID' there and 'E4M3' here"),
    "margin and algorithm": ("fp8", {"margin": 1, "amax_compute_algo": "most_recent"}, TINY,
        "amax_compute_algo is 'max' there and 'most_recent' here, margin is 0 there and 1 here"),
    "a function": ("fp8", {"scaling_factor_compute_algo": lambda amax, scale, fp8_max, recipe: torch.ones_like(scale)}, TINY,
        "scaling_factor_compute_algo is None there and '.*<lambda>' here"),
}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS)
def test_another_model_or_recipe_is_refused_naming_what_differs(cpu, saved, other):
    name, fields, config, message = OTHERS[other]
    target = Target(precision.choose(name, cpu, **fields), config)
    with target.unchanged(), pytest.raises(ValueError, match=f"model.safetensors does not fit: .*{message}"):
        target.load(saved[0])


def test_a_missing_file(cpu, tmp_path):
    target = Target(precision.choose("fp32", cpu))
    with (
        target.unchanged(),
        pytest.raises(FileNotFoundError, match=r"nowhere.safetensors does not exist; train a model"),
    ):
        target.load(tmp_path / "nowhere.safetensors")


def test_an_optimizer_that_does_not_fit(cpu, saved):
    target = Target(precision.choose("fp8", cpu))
    for optimizer, message in (
        (training.make_optimizer(target.chosen.build(TINY), LR), "made for another model's parameters"),
        (torch.optim.SGD(target.model.parameters(), LR), "SGD given; .* torch.optim.AdamW"),
    ):
        with target.unchanged(), pytest.raises(ValueError, match=message):
            checkpoints.load(saved[0], target.model, target.chosen, optimizer)


def test_a_checkpoint_as_te_writes_it_goes_on_in_the_emulator(cpu, saved, tmp_path):
    """TE's recipes have more fields, and its run no generator of the emulator's."""

    def as_te(tensors, header):
        del tensors["generator.rounding"]
        recipe = header["precision"]["recipe"]
        recipe["fields"] |= {"reduce_amax": True, "fp8_dpa": False, "fp8_mha": False, "backward_override": None}
        return header | {"precision": {"name": "fp8", "kind": "real", "device": "cuda", "recipe": recipe}}

    path = changed(saved[0], tmp_path / "te.safetensors", as_te)
    target = Target(precision.choose("fp8", cpu))
    rounding = target.chosen.generator.get_state()
    assert target.load(path) == 3
    assert torch.equal(target.chosen.generator.get_state(), rounding)
    assert torch.equal(target.model.head.weight, saved[1].head.weight)


# ----------------------------------------------------------------------------------------- writing: old or new, whole


def test_what_is_not_finite_is_not_saved(cpu, tmp_path):
    chosen, path = precision.choose("fp8", cpu), tmp_path / "run.safetensors"
    _, model = train(chosen, 2, path)
    before = path.read_bytes()
    model.head.weight.data[0, 0] = math.nan
    with pytest.raises(
        ValueError, match=r"nothing was saved to .*run.safetensors: head.weight holds values that are not"
    ):
        checkpoints.save(path, model, chosen, 3)
    longer = precision.choose("fp8", cpu, amax_history_len=4)
    with pytest.raises(ValueError, match=r"nothing was saved .*amax_history has shape \(16, 3\), \(4, 3\) is needed"):
        checkpoints.save(path, train(chosen, 1)[1], longer, 3)
    assert path.read_bytes() == before


def test_a_run_that_diverges_keeps_its_last_good_checkpoint(cpu, tmp_path):
    chosen, path = precision.choose("fp32", cpu), tmp_path / "run.safetensors"
    model, generator = chosen.build(TINY), torch.Generator().manual_seed(1)

    def poison(step):
        if step == 4:
            model.head.weight.data.fill_(math.nan)

    checkpoint = checkpoints.Checkpoint(path, generator, 2)
    with pytest.raises(FloatingPointError, match="the loss of step 5 is nan"):
        training.train(model, chosen, batches(generator), 8, LR, poison, checkpoint)
    assert checkpoints.load_weights(path, chosen.build(TINY)) == 4


@pytest.mark.skipif(sys.platform == "win32", reason="no limit on a file's size to set")
def test_a_full_disk_keeps_the_old_checkpoint(cpu, tmp_path):
    import resource

    chosen, path = precision.choose("fp32", cpu), tmp_path / "run.safetensors"
    _, model = train(chosen, 2, path)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 4, limits[1]))  # a write beyond it fails
    try:
        with pytest.raises(Exception, match="File too large"):
            checkpoints.save(path, model, chosen, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["run.safetensors"]


def test_what_a_killed_run_left_is_cleared_away_but_no_others_file(cpu, tmp_path):
    path = tmp_path / "run.safetensors"
    names = [
        "run.safetensors.123.tmp",
        "run.safetensors.456.tmp",
        "run.safetensors.mine.tmp",
        "other.safetensors.123.tmp",
    ]
    for name in names:
        (tmp_path / name).write_bytes(b"half")
        if "456" not in name:  # that one is being written
            os.utime(tmp_path / name, times=(time.time() - 7200,) * 2)
    chosen = precision.choose("fp32", cpu)
    checkpoints.save(path, chosen.build(TINY), chosen, 0)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*names[1:], "run.safetensors"])


KILLS = """
import os, random, signal, sys, time
import torch
torch.set_num_threads(1)
from pathlib import Path
from helpers import checkpoints, hardware, models, precision
from tests.test_checkpoints import WIDE, train

path, moments = Path(sys.argv[1]), random.Random(0)
chosen, done = precision.choose("fp8", hardware.detect()), []
train(chosen, 1, config=WIDE)  # what torch imports at the first step is there for every child
for _ in range(20):
    saved, saying = os.pipe()
    child = os.fork()
    if child == 0:
        sys.stderr = open(os.devnull, "w")
        train(chosen, 10**6, path, every=1, config=WIDE, on_step=lambda step: os.write(saying, b"."))
    os.read(saved, 1)  # it is in its first step, and saves for the first time
    time.sleep(moments.uniform(0, 0.1))
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "it ended by itself"
    if path.exists():
        model, generator = chosen.build(WIDE), torch.Generator()
        optimizer = torch.optim.AdamW(model.parameters())
        done.append(checkpoints.load(path, model, chosen, optimizer, generator))
        assert {state["step"].item() for state in optimizer.state.values()} == {done[-1]}
assert done == sorted(done), done
steps = done[-1] + 3
rest, model = train(precision.choose("fp8", hardware.detect()), steps, path, config=WIDE)
whole, same = train(precision.choose("fp8", hardware.detect()), steps, config=WIDE)
assert rest["loss"].tolist() == whole["loss"].tolist()[-3:]
assert all(map(torch.equal, models.plain_state(model).values(), models.plain_state(same).values()))
print(len(set(done)), "checkpoints seen, the last of step", done[-1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="starts the runs by fork")
def test_a_run_killed_at_twenty_moments_ends_as_the_uninterrupted_one(root, tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path / "run.safetensors")],
        cwd=root,
        env=os.environ | {"WORKSHOP_TIER": "cpu"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert int(ran.stdout.split()[0]) > 3, ran.stdout


# ------------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_a_real_fp8_run_goes_on(hardware, tmp_path, recipe):
    """Ten steps after the resume within 1e-3 nats of the uninterrupted run: a GPU may add up in another order."""
    if hardware.recipes[recipe]:
        pytest.skip(hardware.recipes[recipe])
    config, path = models.GPTConfig(d_model=128, n_layers=2, n_heads=4, seq_len=64), tmp_path / "run.safetensors"
    chosen = precision.choose("fp8", hardware, recipe=recipe)
    whole, _ = train(chosen, 20, config=config)
    train(chosen, 10, path, config=config)
    rest, _ = train(chosen, 10 + 10, path, config=config)
    differences = (rest["loss"].to_numpy() - whole["loss"].to_numpy()[10:]).tolist()
    assert len(differences) == 10
    assert max(map(abs, differences)) < 1e-3, differences


@pytest.mark.gpu
def test_te_and_plain_pytorch_go_on_from_each_others_checkpoints(hardware, tmp_path):
    config = models.GPTConfig(d_model=64, n_layers=2, n_heads=4, seq_len=32)
    te = precision.choose("fp32", hardware)
    plain = precision.Precision("fp32", "real", "torch", hardware.device)
    assert te.backend == "te"
    for source, target in ((te, plain), (plain, te)):
        path = tmp_path / f"{source.backend}.safetensors"
        train(source, 5, path, config=config)
        again, _ = train(source, 8, config=config)
        rest, _ = train(target, 8, path, config=config)
        assert (rest["loss"] - again["loss"][5:].reset_index(drop=True)).abs().max() < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_te_and_the_emulator_go_on_from_each_others_checkpoints(hardware, tmp_path, monkeypatch, recipe):
    if hardware.recipes[recipe]:
        pytest.skip(hardware.recipes[recipe])
    config = models.GPTConfig(d_model=128, n_layers=2, n_heads=4, seq_len=64)
    real = precision.choose("fp8", hardware, recipe=recipe)
    monkeypatch.setenv("WORKSHOP_TIER", "bf16")
    emulated = precision.choose("fp8", detect(), recipe=recipe)
    assert (real.kind, emulated.kind) == ("real", "emulated")
    for source, target in ((real, emulated), (emulated, real)):
        path = tmp_path / f"{source.kind}.safetensors"
        train(source, 5, path, config=config)
        rest, _ = train(target, 8, path, config=config)
        again, _ = train(source, 8, config=config)
        assert (rest["loss"] - again["loss"][5:].reset_index(drop=True)).abs().max() < 0.1
