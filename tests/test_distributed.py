"""Several ranks against one process, and what happens when a rank fails. The jobs are in distributed_jobs.py."""

import itertools
import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from benchmarks import scaling
from helpers import data, distributed, distributed_checkpoint, fp8_state, hardware, models, precision, results, training
from helpers.distributed import Job
from helpers.distributed_training import STRATEGIES
from helpers.recompute import recompute_blocks
from tests import distributed_jobs as jobs

PATIENCE_S = 240  # a job that takes longer hangs
NAMES = ("everything", "module", "hangs", "raises", "dies_while_saving")
TOLD = ("--strategy=fsdp2", "--accumulate=2", "--recompute", "--steps=6", "--save-every=4")
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp8": 2e-2}


def start(folder, *arguments, ranks=2, options=("--standalone",), **variables) -> subprocess.CompletedProcess:
    """A real torchrun; `arguments` start with a script or -m."""
    environment = (
        os.environ | {"WORKSHOP_TIER": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(jobs.ROOT)} | variables
    )
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--nproc-per-node", str(ranks), *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Small matrices, beside jobs that want the cores: more threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """{job: (its folder, its future process)}, all started at once: a job spends most of its time importing torch."""
    with ThreadPoolExecutor(len(NAMES)) as pool:
        folders = {name: tmp_path_factory.mktemp(name) for name in NAMES}
        programs = {name: (jobs.__file__, name, str(folder)) for name, folder in folders.items()}
        programs["module"] = (
            "-m",
            "helpers.distributed",
            *TOLD,
            f"--checkpoints={folders['module']}",
            "--out=job.json",
        )
        yield {name: (folders[name], pool.submit(start, folders[name], *program)) for name, program in programs.items()}


@pytest.fixture(scope="module")
def folder(running):
    return running["everything"][0]


@pytest.fixture(scope="module")
def found(running, folder):
    """What two ranks found, all in one job."""
    ran = running["everything"][1].result()
    assert ran.returncode == 0, ran.stdout + ran.stderr[-4000:]
    return json.loads((folder / "everything.json").read_text())


def alone(chosen, config=jobs.SMALL, lr=jobs.LR):
    """Losses of one process on the whole batches, by the loop that the notebooks use; and the scales after its first step."""
    model, generator, scales = chosen.build(config), torch.Generator().manual_seed(1), {}

    def on_step(step):
        if step == 0:
            scales.update({k: v.tolist() for k, v in fp8_state.delayed_state(model).items()})

    def next_batch():
        return data.arithmetic_batch(jobs.BATCH, config.seq_len, generator)

    return training.train(model, chosen, next_batch, jobs.STEPS, lr, on_step)["loss"].tolist(), scales


def largest_difference(a, b) -> float:
    assert len(a) == len(b)
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


# ------------------------------------------------------------------------------------------------ equality


@pytest.mark.parametrize("name", precision.NAMES)
def test_two_ranks_train_as_one_process_does(found, cpu, name):
    reference, scales = alone(precision.choose(name, cpu))
    compared = {case: losses for case, losses in found["losses"].items() if case.split()[1] == name}
    assert len(compared) >= 2
    for case, losses in compared.items():
        assert largest_difference(losses, reference[: len(losses)]) < TOLERANCE[name], case
    if name == "fp8":  # the amax of a batch is the largest of its parts' amaxes
        first = found["agreement"]["ddp"]["first scales"]
        for tensor, values in scales.items():
            if "scaling_fwd" in tensor:
                assert first[tensor] == values, tensor


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_recomputed_activations_change_nothing(found, strategy):
    recomputed = found["losses"][f"{strategy} fp8 recomputed"]
    assert recomputed == found["losses"][f"{strategy} fp8"][: len(recomputed)]


def test_a_recomputed_block_runs_twice_and_saves_less(cpu):
    kept = {}
    for recompute in (False, True):
        chosen = precision.choose("fp8", cpu)
        model, saved, calls = chosen.build(jobs.SMALL), [], []
        if recompute:
            recompute_blocks(model, chosen)
        model.blocks[0].fc1.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        inputs, targets = data.arithmetic_batch(4, jobs.SMALL.seq_len, torch.Generator().manual_seed(1))
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t.nbytes) or t, lambda t: t):
            loss = training.loss_of(model, inputs, targets, chosen)
        loss.backward()
        kept[recompute] = sum(saved), len(calls)
    assert kept[True][0] < kept[False][0] / 2
    assert (kept[False][1], kept[True][1]) == (1, 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_rank_holds_the_same_scales_whoever_is_which(found, strategy):
    seen = found["agreement"][strategy]
    assert all(seen["equal"])
    assert all(seen["equal renumbered"])
    assert seen["loss difference renumbered"] < 1e-5


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_one_rank_sees_reaches_the_others(found, strategy):
    """Other tokens on rank 1 change rank 0's gradients and scales; where amaxes are not reduced, not its scales."""
    seen = found["agreement"][strategy]["corrupted"]
    assert seen["yes"]["gradient"] != seen["no"]["gradient"]
    assert seen["yes"]["scales"] != seen["no"]["scales"]
    assert seen["yes, alone"]["gradient"] != seen["no, alone"]["gradient"]
    assert seen["yes, alone"]["scales"] == seen["no, alone"]["scales"]


def test_fsdp2_halves_what_a_rank_holds(found):
    ddp, fsdp2 = (found["agreement"][strategy]["memory"] for strategy in STRATEGIES)
    for what in ("parameters_gb", "gradients_gb", "optimizer_gb"):
        assert fsdp2[what] == pytest.approx(ddp[what] / 2, rel=0.1)


# ------------------------------------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize("case", ["ddp fp8", "fsdp2 fp8", "fsdp2 fp32"])
def test_saved_on_two_ranks_goes_on_there_and_in_one_process(found, folder, cpu, case):
    seen, name = found["checkpoints"][case], case.split()[1]
    chosen = precision.choose(name, cpu)
    model = chosen.build(jobs.SMALL, torch.Generator().manual_seed(9))
    optimizer = training.make_optimizer(model, jobs.LR)
    path = folder / case / "step-00000010"
    assert {p.suffix for p in path.iterdir()} == {".json", ".safetensors"}  # no pickle
    first = distributed_checkpoint.load(path, model, chosen, optimizer)
    assert first == 10
    alone = []
    for ((inputs, targets),) in itertools.islice(
        Job(batch=jobs.BATCH).microbatches(jobs.SMALL, 0, 1, "cpu", first), 10
    ):
        loss = training.loss_of(model, inputs, targets, chosen)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        alone.append(loss.item())
    for losses in (seen["again"], alone):
        # From the same weights and scales; FSDP2 quantizes weights rounded to BF16, so FP8 may differ by a little.
        assert losses[0] == pytest.approx(seen["losses"][10], abs=1e-5 if name == "fp32" else 2e-3)
        assert largest_difference(losses, seen["losses"][10:]) < TOLERANCE[name]


@pytest.fixture
def saved(cpu, tmp_path):
    """(precision, model, path of its checkpoint), without a job."""
    chosen = precision.choose("fp8", cpu)
    model = chosen.build(jobs.SMALL)
    alone_batch = data.arithmetic_batch(4, jobs.SMALL.seq_len, torch.Generator().manual_seed(1))
    training.loss_of(model, *alone_batch, chosen).backward()
    return chosen, model, distributed_checkpoint.save(tmp_path / "runs", model, chosen, 7)


def test_a_save_that_fails_leaves_the_last_good_one(saved, monkeypatch):
    chosen, model, path = saved
    before = {p.name: p.read_bytes() for p in path.iterdir()}

    def disk_full(*_):
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", disk_full)
        with pytest.raises(OSError, match="No space left"):
            distributed_checkpoint.save(path.parent, model, chosen, 8)
    assert distributed_checkpoint.newest(path.parent) == path
    assert {p.name: p.read_bytes() for p in path.iterdir()} == before
    assert distributed_checkpoint.save(path.parent, model, chosen, 8) == path.with_name("step-00000008")
    assert [p.name for p in sorted(path.parent.iterdir())] == ["step-00000007", "step-00000008"]


def truncate(path):
    shard = next(path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])


BROKEN = {
    "truncated": truncate,
    "its files shard-.* missing": lambda path: next(path.glob("*.safetensors")).unlink(),
    "its schema is None, this code reads": lambda path: (path / "header.json").write_text("{}"),
    "Expecting": lambda path: (path / "header.json").write_text("{"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_checkpoint_is_refused_by_name_before_anything_changes(saved, how):
    chosen, _, path = saved
    BROKEN[how](path)
    other = chosen.build(jobs.SMALL, torch.Generator().manual_seed(9))
    weights = models.plain_state(other)
    with pytest.raises(ValueError, match=rf"step-00000007 is not a whole checkpoint .*{how.removeprefix('truncated')}"):
        distributed_checkpoint.load(path, other, chosen)
    assert all(torch.equal(v, weights[k]) for k, v in models.plain_state(other).items())


def test_another_model_or_recipe_is_refused_but_for_its_weights(saved, cpu):
    chosen, model, path = saved
    with pytest.raises(ValueError, match=r"step-00000007 .*d_model is 64 there and 32 here"):
        distributed_checkpoint.load(path, chosen.build(replace(jobs.SMALL, d_model=32)), chosen)
    longer = precision.choose("fp8", cpu, amax_history_len=32)
    with pytest.raises(ValueError, match=r"step-00000007 does not fit: .*amax_history_len is 16 there and 32 here"):
        distributed_checkpoint.load(path, longer.build(jobs.SMALL), longer)
    bf16 = precision.choose("bf16", cpu)
    other = bf16.build(jobs.SMALL, torch.Generator().manual_seed(9))
    with pytest.raises(ValueError, match=r"another precision \(name is 'fp8' there and 'bf16' here\)"):
        distributed_checkpoint.load(path, other, bf16)
    with pytest.raises(ValueError, match=r"optimizer.exp_avg.emb.weight has shape None there"):
        distributed_checkpoint.load(path, model, chosen, training.make_optimizer(model, jobs.LR))
    assert distributed_checkpoint.load_weights(path, other) == 7
    assert torch.equal(other.head.weight, model.head.weight)
    with pytest.raises(FileNotFoundError, match=r"step-00000009 is not a whole checkpoint"):
        distributed_checkpoint.load(path.with_name("step-00000009"), model, chosen)


def test_a_loss_that_went_astray_is_not_saved(saved):
    chosen, model, path = saved
    model.head.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"nothing was saved to .*step-00000008"):
        distributed_checkpoint.save(path.parent, model, chosen, 8)
    assert [p.name for p in path.parent.iterdir()] == ["step-00000007"]


# ------------------------------------------------------------------------------------------------ faults


def check_culprit(ran: subprocess.CompletedProcess, cause: str) -> None:
    """torchrun ended with an error, and names rank 1 and what became of it."""
    assert ran.returncode != 0
    _, _, root_cause = ran.stderr.rpartition("Root Cause (first observed failure)")
    assert "rank      : 1 " in root_cause
    assert cause in root_cause


def test_a_rank_that_hangs_ends_the_job_and_says_where(running):
    ran = running["hangs"][1].result()
    check_culprit(ran, "rank 1 hangs: what follows step 5 took more than")
    check_culprit(ran, "wait_for_a_file_that_never_comes")


def test_a_rank_that_raises_ends_the_job_and_is_named(running):
    check_culprit(running["raises"][1].result(), "ArithmeticError: this rank has had enough")


def test_a_rank_that_is_killed_ends_the_job_and_is_named(running):
    check_culprit(running["dies_while_saving"][1].result(), "SIGKILL")


def test_a_save_that_is_killed_leaves_the_last_good_one(running, cpu):
    folder, job = running["dies_while_saving"]
    job.result()
    assert (folder / "step-00000006.partial").exists()
    assert distributed_checkpoint.newest(folder) == folder / "step-00000003"
    chosen = precision.choose("fp8", cpu)
    assert distributed_checkpoint.load(folder / "step-00000003", chosen.build(jobs.SMALL), chosen) == 3


@pytest.mark.parametrize(
    ("job", "ranks", "message"),
    [
        (Job("tensor"), 2, "strategy 'tensor' is not known; choose one of ddp, fsdp2"),
        (Job(precision="fp4"), 2, "precision 'fp4' is not known; choose one of fp32"),
        (Job(recipe="eager"), 2, "recipe 'eager' is not known; choose one of delayed"),
        (Job(preset="huge"), 2, "preset 'huge' is not known; choose one of laptop"),
        (Job(), 3, r"a batch of 16 does not divide into 3 ranks x 1 microbatches; choose a multiple of 3, such as 18"),
        (Job(batch=8, accumulate=3), 2, r"a batch of 8 does not divide into 2 ranks x 3 microbatches.* such as 12"),
        (Job(steps=0), 2, "2 ranks, 0 steps, 1 microbatches given; each is at least 1"),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(cpu, capfd, job, ranks, message):
    with pytest.raises(ValueError, match=message):
        job.check(ranks, ranks, cpu, 0)
    given = [f"--{k}={v}" for k, v in vars(job).items() if v is not None and k != "recompute"]
    with pytest.raises(ValueError, match=message):
        distributed.launch(ranks, *given)
    assert capfd.readouterr() == ("", "")


def test_more_ranks_than_gpus(cpu):
    with pytest.raises(
        ValueError, match="4 ranks on this machine, which has 2 GPUs; start at most 2, or set WORKSHOP_TIER=cpu"
    ):
        Job().check(ranks=8, ranks_here=4, hw=replace(cpu, device="cuda"), gpus=2)
    Job().check(ranks=8, ranks_here=4, hw=replace(cpu, device="cuda"), gpus=4)


def test_a_port_in_use(cpu):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} cannot be used .*give another, or none"):
            distributed.launch(2, port=port)


# ------------------------------------------------------------------------------------------------ the module


def test_the_module_trains_saves_and_reports(running):
    folder, job = running["module"]
    ran = job.result()
    assert ran.returncode == 0, ran.stderr[-4000:]
    printed = ran.stdout.splitlines()
    assert printed[0] == "FP8 DelayedScaling HYBRID (EMULATED), fsdp2, 2 ranks on the CPU, steps 1 to 6"
    assert printed[6].startswith("step 6 of 6: loss")
    assert [line.split(":")[0] for line in printed[-2:]] == ["rank 0", "rank 1"]
    found = json.loads((folder / "job.json").read_text())
    assert found["step"] == [0, 1, 2, 3, 4, 5]
    assert found["loss"][5] < found["loss"][0]
    assert [memory["parameters_gb"] > 0 for memory in found["memory"]] == [True, True]
    assert found["tokens_per_s"] > 0
    assert sorted(p.name for p in folder.glob("step-*")) == ["step-00000004", "step-00000006"]


# ------------------------------------------------------------------------------------------------ what takes longer


@pytest.mark.slow
def test_three_ranks_under_every_recipe(cpu, tmp_path):
    ran = start(tmp_path, jobs.__file__, "recipes", str(tmp_path), ranks=3)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-4000:]
    found = json.loads((tmp_path / "recipes.json").read_text())
    assert len(found) == len(STRATEGIES) * len(hardware.RECIPES)
    preset = models.preset("laptop")
    for case, losses in found.items():
        chosen = precision.choose("fp8", cpu, case.split()[1])
        reference, _ = alone(chosen, preset.config, lr=preset.lr)
        assert largest_difference(losses, reference) < TOLERANCE["fp8"], case


@pytest.mark.slow
def test_the_module_goes_on_on_another_number_of_ranks(cpu, tmp_path):
    told = ("--strategy=fsdp2", f"--checkpoints={tmp_path}")
    first = distributed.launch(2, *told, "--steps=6")
    on = distributed.launch(4, *told, "--steps=8")
    assert on["step"] == [6, 7]
    assert max(on["loss"]) < first["loss"][0]


@pytest.mark.slow
def test_torchrun_itself_says_what_cannot_work(tmp_path):
    """As a user types it. torchrun finds that the port is in use before it starts a rank."""
    module = ("-m", "helpers.distributed")
    ran = start(tmp_path, *module, "--batch", "7")
    assert ran.returncode != 0
    assert "distributed: a batch of 7 does not divide into 2 ranks" in ran.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ran = start(tmp_path, *module, options=("--master-port", str(taken.getsockname()[1])))
    assert ran.returncode != 0
    assert "address already in use" in ran.stderr
    assert ran.stdout == ""


@pytest.mark.slow
def test_two_nodes(cpu, tmp_path):
    """Two torchruns that meet, as on two machines: the second node's rank is rank 1."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    meet = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=two-nodes")
    meet += ("--local-addr=127.0.0.1",)
    out = tmp_path / "job.json"
    with ThreadPoolExecutor(2) as pool:
        nodes = [
            pool.submit(
                start, tmp_path, "-m", "helpers.distributed", "--steps=4", f"--out={out}", ranks=1, options=meet
            )
            for _ in range(2)
        ]
        ran = [node.result() for node in nodes]
    assert [node.returncode for node in ran] == [0, 0], ran[0].stderr[-2000:] + ran[1].stderr[-2000:]
    assert json.loads(out.read_text())["ranks"] == 2


# ------------------------------------------------------------------------------------------------ the benchmark


def test_the_model_of_more_gpus_starts_from_what_was_measured():
    one = {"median_ms": 90.0, "tokens_per_s": 1000.0}
    measured = {
        "case": "a",
        "variant": "ddp-fp8",
        "gpus": 2,
        "params": 6e8,
        "batch_per_gpu": 16,
        "tokens_per_s": 1900.0,
    }
    measured |= {"median_ms": 93.0, "communication_ms": 8.0}
    same = scaling.modelled(measured, one, 2, None)
    assert same["median_ms"] == pytest.approx(93.0)
    assert same["kind"] == "modelled"
    rows = [same, *(scaling.modelled(measured, one, *target) for target in scaling.MODELLED)]
    assert [row["gpus"] for row in rows] == [2, 8, 16, 32]
    efficiencies = [row["efficiency"] for row in rows]
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert rows[1]["communication_ms"] == pytest.approx(8.0 * 7 / 4)
    slow_network = scaling.modelled(measured, one, 16, 4.0)
    assert slow_network["communication_ms"] == pytest.approx(2 * 15 / 16 * 4 * 6e8 / 4e9 * 1000)
    assert slow_network["median_ms"] > slow_network["communication_ms"]
    overhead = scaling.modelled(measured | {"median_ms": 120.0}, one, 8, None)
    assert overhead["median_ms"] == pytest.approx(90 + (30 - 8) + 14)


@pytest.mark.slow
def test_the_scaling_benchmark_runs_on_a_cpu(tree):
    command = [sys.executable, "-m", "benchmarks.scaling", "--steps", "3", "--variants", "one-fp8", "fsdp2-fp8"]
    environment = os.environ | {"WORKSHOP_TIER": "cpu", "PYTHONPATH": ""}
    ran = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ran.returncode == 0, ran.stderr[-4000:]
    content = results.read(tree / "artifacts" / "results" / "cpu-x2" / "scaling.json")
    measured = {row["variant"]: row for row in content["rows"] if row["kind"] == "emulated"}
    assert measured.keys() == {"one-fp8", "fsdp2-fp8"}
    one, two = measured["one-fp8"], measured["fsdp2-fp8"]
    assert two["efficiency"] == pytest.approx(two["tokens_per_s"] / one["tokens_per_s"] / 2)
    assert two["parameters_and_optimizer_gb"] == pytest.approx(one["parameters_and_optimizer_gb"] / 2, rel=0.1)
    assert len([row for row in content["rows"] if row["kind"] == "modelled"]) == len(scaling.MODELLED)


# ------------------------------------------------------------------------------------------------ on GPUs


@pytest.mark.gpu
def test_on_gpus_as_one_process_does(tmp_path):
    """All GPUs there are, NCCL and TE's own reduction: losses, equal scales, weight caching, recomputation, checkpoints."""
    ran = start(tmp_path, jobs.__file__, "on_gpus", str(tmp_path), ranks=torch.cuda.device_count(), WORKSHOP_TIER="")
    assert ran.returncode == 0, ran.stdout + ran.stderr[-4000:]
    found = json.loads((tmp_path / "on_gpus.json").read_text())
    assert found["kinds"] == ["real"]
    assert all(found["scales equal"].values())
    for case, pair in found["losses"].items():
        assert largest_difference(*pair) < TOLERANCE[case.split()[1]], case
    for case, (through, again) in found["checkpoints"].items():
        assert largest_difference(through, again) < TOLERANCE["fp8"], case
