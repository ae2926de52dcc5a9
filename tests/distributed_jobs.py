"""Jobs that tests/test_distributed.py runs under torchrun: `distributed_jobs.py NAME FOLDER`.

Rank 0 writes what the job found to FOLDER/NAME.json.
"""

import json
import os
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from helpers import distributed_checkpoint, emulation, fp8_state, hardware, models, precision
from helpers.distributed import Job
from helpers.distributed_training import STRATEGIES, Trainer, joined
from helpers.watchdog import Watchdog

ROOT = Path(__file__).resolve().parents[1]
SMALL = models.GPTConfig(d_model=64, n_layers=1, n_heads=2, seq_len=32)
STEPS, BATCH, LR = 30, 12, 3e-3
LIMIT_S = {"hangs": 10}  # of the others: 600


def choose(name: str, recipe: str = "delayed") -> precision.Precision:
    return precision.choose(name, hardware.detect(), recipe)


def trainer_and_batches(
    strategy: str,
    name: str,
    recipe: str = "delayed",
    recompute: bool = False,
    accumulate: int = 1,
    renumbered: bool = False,
    config: models.GPTConfig = SMALL,
    lr: float = LR,
):
    """This rank's trainer and batches; `renumbered`: those of the rank that counts from the other end."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    job = Job(strategy, name, recipe, batch=BATCH, accumulate=accumulate)
    part = ranks - 1 - rank if renumbered else rank
    trainer = Trainer(config, choose(name, recipe), strategy, lr, recompute)
    return trainer, job.microbatches(config, part, ranks, "cpu")


def losses(*arguments, steps: int = STEPS, **options) -> list[float]:
    trainer, batches = trainer_and_batches(*arguments, **options)
    return trainer.train(batches, range(steps), progress=False)["loss"].tolist()


# --- Several ranks against one process ---


def everything(folder: Path, watchdog: Watchdog) -> dict:
    checkpoints = {
        f"{strategy} {name}": checkpoint(folder, strategy, name, other)
        for strategy, name, other in (("ddp", "fp8", "fsdp2"), ("fsdp2", "fp8", "fsdp2"), ("fsdp2", "fp32", "ddp"))
    }
    return {"losses": equality(), "agreement": agreement(), "checkpoints": checkpoints}


def equality() -> dict:
    found = {f"{strategy} {name}": losses(strategy, name) for strategy in STRATEGIES for name in precision.NAMES}
    for strategy, name in (("ddp", "fp32"), ("fsdp2", "fp8")):
        found[f"{strategy} {name} accumulated"] = losses(strategy, name, accumulate=2)
    for strategy in STRATEGIES:
        found[f"{strategy} fp8 recomputed"] = losses(strategy, "fp8", steps=10, recompute=True)
    return found


def agreement() -> dict:
    """Scales and gradients after each of a few steps: equal on the ranks, whoever is which, and made by all of them."""
    found = {}
    for strategy in STRATEGIES:
        trainer, batches = trainer_and_batches(strategy, "fp8")
        other, others = trainer_and_batches(strategy, "fp8", renumbered=True)
        first_scales, equal, equal_renumbered, difference = None, [], [], 0.0
        for _ in range(6):
            loss, loss_renumbered = trainer.step(next(batches)), other.step(next(others))
            difference = max(difference, (loss - loss_renumbered).abs().item())
            equal.append(equal_on_all_ranks(state_of(trainer)))
            equal_renumbered.append(torch.equal(state_of(trainer), state_of(other)))
            if first_scales is None:
                first_scales = {k: v.tolist() for k, v in fp8_state.delayed_state(trainer.model).items()}
        found[strategy] = {
            "equal": equal,
            "equal renumbered": equal_renumbered,
            "loss difference renumbered": difference,
            "first scales": first_scales,
            "memory": trainer.memory(),
            "corrupted": {kind: one_step(strategy, *options) for kind, options in CORRUPTIONS.items()},
        }
    return found


def state_of(trainer: Trainer) -> torch.Tensor:
    """Every scale and history of this rank as one vector."""
    return torch.cat([tensor.flatten() for tensor in fp8_state.delayed_state(trainer.model).values()])


def equal_on_all_ranks(mine: torch.Tensor) -> bool:
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return all(torch.equal(mine, other) for other in everyone)


@dataclass(frozen=True)
class Alone:
    """FP8 as it is chosen here, but each rank keeps its amaxes to itself."""

    chosen: precision.Precision
    group: dist.ProcessGroup

    def __getattr__(self, name):
        return getattr(self.chosen, name)

    @contextmanager
    def autocast(self):
        region = emulation.autocast(recipe=self.chosen.recipe, amax_reduction_group=self.group)
        with torch.autocast("cpu", torch.bfloat16), region:
            yield


CORRUPTIONS = {"no": (False, False), "yes": (True, False), "no, alone": (False, True), "yes, alone": (True, True)}


def one_step(strategy: str, corrupt: bool, alone: bool) -> dict:
    """Rank 0's gradients and scales after one step, rank 1 training on other tokens if `corrupt`."""
    trainer, batches = trainer_and_batches(strategy, "fp8")
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    if alone:
        trainer.precision = Alone(trainer.precision, groups[dist.get_rank()])
    ((inputs, targets),) = next(batches)
    if corrupt and dist.get_rank() == 1:
        noise = torch.Generator().manual_seed(7)
        inputs, targets = (torch.randint(96, t.shape, generator=noise) for t in (inputs, targets))
    trainer.step([(inputs, targets)])
    gradients = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in trainer.model.parameters()]
    scales = [v for k, v in fp8_state.delayed_state(trainer.model).items() if k.endswith("scale")]
    return {
        "gradient": torch.cat([g.flatten() for g in gradients])[:4096].tolist(),
        "scales": torch.cat(scales).tolist(),
    }


def checkpoint(folder: Path, strategy: str, name: str, other: str) -> dict:
    """20 steps, saved after 10; then the last 10 again from there, under the `other` strategy."""
    place = folder / f"{strategy} {name}"

    def on_step(step):
        if step == 9:
            distributed_checkpoint.save(place, trainer.model, trainer.precision, 10, trainer.optimizer)

    trainer, batches = trainer_and_batches(strategy, name)
    through = trainer.train(batches, range(20), on_step, progress=False)["loss"].tolist()
    trainer, batches = trainer_and_batches(other, name)
    first = distributed_checkpoint.load(
        distributed_checkpoint.newest(place), trainer.model, trainer.precision, trainer.optimizer
    )
    rest = Job(batch=BATCH).microbatches(SMALL, dist.get_rank(), dist.get_world_size(), "cpu", first)
    again = trainer.train(rest, range(first, 20), progress=False)["loss"].tolist()
    return {"losses": through, "again": again}


def recipes(folder: Path, watchdog: Watchdog) -> dict:
    """The laptop preset under each recipe."""
    preset = models.preset("laptop")
    return {
        f"{strategy} {recipe}": losses(strategy, "fp8", recipe=recipe, config=preset.config, lr=preset.lr)
        for strategy in STRATEGIES
        for recipe in hardware.RECIPES
    }


# --- On GPUs ---


def on_gpus(folder: Path, watchdog: Watchdog) -> dict:
    """The laptop preset in BF16 and each FP8 recipe that is REAL here; each rank also trains alone, for comparison."""
    hw, preset = hardware.detect(), models.preset("laptop")
    config, rank, ranks = preset.config, dist.get_rank(), dist.get_world_size()
    found = {"kinds": set(), "losses": {}, "scales equal": {}, "checkpoints": {}}
    real = [recipe for recipe, why in hw.recipes.items() if not why]

    def train(chosen, strategy, accumulate=1, recompute=False, part=rank, parts=ranks):
        job = Job(batch=8 * ranks, accumulate=accumulate)  # 256 tokens a microbatch: as all recipes' blocks need
        trainer = Trainer(config, chosen, strategy, preset.lr, recompute)
        return trainer, job.microbatches(config, part, parts, "cuda")

    def losses_of(trainer, batches):
        return trainer.train(batches, range(STEPS), progress=False)["loss"].tolist()

    for name, recipe in [("bf16", "delayed"), *(("fp8", recipe) for recipe in real)]:
        chosen = precision.choose(name, hw, recipe)
        found["kinds"].add(chosen.kind)
        alone = losses_of(*train(chosen, None, part=0, parts=1))  # every rank the whole batch: the mean is that of one
        for strategy in STRATEGIES:
            for how, options in {"": {}, "accumulated": {"accumulate": 2}, "recomputed": {"recompute": True}}.items():
                trainer, batches = train(chosen, strategy, **options)
                case = f"{strategy} {name} {recipe} {how}"
                found["losses"][case] = losses_of(trainer, batches), alone
                if name == "fp8" and recipe == "delayed":
                    found["scales equal"][case] = equal_on_all_ranks(state_of(trainer))
            if name == "fp8":
                trainer, batches = train(chosen, strategy)
                trainer.train(batches, range(10), progress=False)
                path = distributed_checkpoint.save(folder / case, trainer.model, chosen, 10, trainer.optimizer)
                through = trainer.train(batches, range(10, 20), progress=False)["loss"].tolist()
                trainer, batches = train(chosen, strategy)
                distributed_checkpoint.load(path, trainer.model, chosen, trainer.optimizer)
                for _ in range(10):
                    next(batches)
                again = trainer.train(batches, range(10, 20), progress=False)["loss"].tolist()
                found["checkpoints"][case] = through, again
    return found | {"kinds": sorted(found["kinds"])}


# --- Jobs that fail; rank 1 is the culprit, after step 5 ---


def failing(fail, folder: Path, watchdog: Watchdog) -> None:
    trainer, batches = trainer_and_batches("ddp", "fp8")

    def on_step(step):
        if step == 2:
            distributed_checkpoint.save(folder, trainer.model, trainer.precision, 3, trainer.optimizer)
        if step == 4 and dist.get_rank() == 1:
            fail()
        if step == 5:
            distributed_checkpoint.save(folder, trainer.model, trainer.precision, 6, trainer.optimizer)

    trainer.train(batches, range(STEPS), on_step, watchdog)


def raises(folder: Path, watchdog: Watchdog) -> None:
    def fail():
        raise ArithmeticError("this rank has had enough")

    failing(fail, folder, watchdog)


def hangs(folder: Path, watchdog: Watchdog) -> None:
    def wait_for_a_file_that_never_comes():
        while not (folder / "never").exists():
            time.sleep(0.1)

    failing(wait_for_a_file_that_never_comes, folder, watchdog)


def dies_while_saving(folder: Path, watchdog: Watchdog) -> None:
    def fail():
        import safetensors.torch

        def die(*arguments, **options):
            os.kill(os.getpid(), signal.SIGKILL)

        safetensors.torch.save = die  # what the next save writes its tensors with

    failing(fail, folder, watchdog)


if __name__ == "__main__":
    name, folder = sys.argv[1], Path(sys.argv[2])
    with joined("cuda" if name == "on_gpus" else "cpu", LIMIT_S.get(name, 600)) as watchdog:
        found = globals()[name](folder, watchdog)
        if dist.get_rank() == 0:
            (folder / f"{name}.json").write_text(json.dumps(found))
