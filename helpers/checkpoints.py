"""Checkpoints: all that a training run needs to go on as if it had never stopped, in one file, without pickle.

A safetensors file: plain tensors, and JSON (`header` in its metadata) with the step, the model's sizes and the recipe.

    emb.weight, blocks.0.qkv.weight, ...          weights, under their plain names whatever the backend
    optimizer.<weight>.step, exp_avg, exp_avg_sq  AdamW's states
    fp8.<layer>.scaling_fwd.scale, ...            delayed scaling's scales and amax histories
    generator.data, generator.rounding            states of the random generators, as bytes

What is loaded is checked first, all of it, and changes nothing unless everything fits. AdamW's learning rate and other
settings are not stored: they are the caller's.
"""

import json
import os
import re
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from enum import Enum
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize

from helpers.fp8_state import delayed_state, initial_delayed_state, load_delayed_state
from helpers.models import MiniGPT, load_plain_state, plain_parameters
from helpers.precision import Precision

SCHEMA = "fp8-workshop/checkpoint/2"
SECTIONS = {"fp8": "FP8 state", "generator": "generator states", "optimizer": "optimizer states", "weights": "weights"}
LEFTOVER_SECONDS = 3600  # a temporary file that old belongs to a run that was killed while it wrote


@dataclass(frozen=True)
class Checkpoint:
    """For `training.train`: saves the run to `path` every `every` steps and at its end, and goes on from there if it exists.

    `generator` is the one that draws the run's batches.
    """

    path: Path
    generator: torch.Generator
    every: int

    def __post_init__(self):
        if self.every < 1:
            raise ValueError(f"every={self.every} given; a number of steps, at least 1, is needed")


def save(
    path: Path,
    model: MiniGPT,
    precision: Precision,
    step: int,
    optimizer: torch.optim.AdamW | None = None,
    generator: torch.Generator | None = None,
) -> None:
    """Writes a checkpoint after `step` steps, whole or not at all: whenever the process dies, the old file or the new is there.

    With `optimizer` and `generator` (which draws the data) a run can go on from it; without them it holds what inference
    needs. Raises ValueError, and leaves the old file, if a value is not finite or the FP8 state is not that of `precision`.
    """
    beginning = initial_content(model, precision, optimizer, generator)
    tensors = beginning | live_content(model, precision, optimizer)
    tensors = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
    try:
        check_tensors(tensors, beginning)
    except ValueError as error:
        raise ValueError(f"nothing was saved to {path}: {error}") from error
    header = {"schema": SCHEMA, "step": step, "config": asdict(model.config), "precision": describe(precision)}
    write(Path(path), tensors, header)


def load(
    path: Path,
    model: MiniGPT,
    precision: Precision,
    optimizer: torch.optim.AdamW | None = None,
    generator: torch.Generator | None = None,
) -> int:
    """Loads what `save` wrote, from either backend into either; returns the number of steps done.

    The precision must be the one that was saved, with the same recipe, REAL or EMULATED; `load_weights` takes any. With
    `optimizer` and `generator` the run goes on from there. The emulator's generator of stochastic rounding goes on, too, if
    the file is from the emulator on the same kind of device; TE's draws come from torch's CUDA generator, which is not stored.

    Raises FileNotFoundError, or ValueError naming the file and what differs; all that was given is then as it was.
    """
    path = Path(path)
    expected = initial_content(model, precision, optimizer, generator)
    header, tensors = read(path, expected)
    try:
        check_config(header, model)
        check_precision(header["precision"], precision)
        if not same_draws(header["precision"], precision):
            expected.pop("generator.rounding", None)
        check_tensors(tensors, expected)
        generators = {"generator.data": generator, "generator.rounding": precision.generator}
        generators = {name: g for name, g in generators.items() if name in expected}
        for name, g in generators.items():
            check_generator_state(name, tensors[name], g.device)
        if fp8 := section(tensors, "fp8"):
            touch(model, precision)
            load_delayed_state(model, fp8)
    except ValueError as error:
        raise ValueError(f"{path} does not fit: {error}") from error
    load_plain_state(model, {name: t for name, t in tensors.items() if section_of(name) == "weights"})
    if optimizer:
        set_adam_states(model, optimizer, section(tensors, "optimizer"))
    for name, g in generators.items():
        g.set_state(tensors[name])
    return header["step"]


def load_weights(path: Path, model: MiniGPT) -> int:
    """Loads the weights alone, saved in any precision; returns the number of steps done. Raises as `load` does.

    Training that goes on from here starts anew in all but the weights: Adam's states, the data, the FP8 scales.
    """
    path = Path(path)
    expected = dict(plain_parameters(model))
    header, tensors = read(path, expected)
    try:
        check_config(header, model)
        check_tensors(tensors, expected)
    except ValueError as error:
        raise ValueError(f"{path} does not fit: {error}") from error
    load_plain_state(model, tensors)
    return header["step"]


@torch.no_grad()
def touch(model: MiniGPT, precision: Precision) -> None:
    """One forward, so that the FP8 state exists: TE makes it at the first forward under FP8."""
    with precision.autocast():
        model(torch.zeros(1, model.config.seq_len, dtype=torch.int64, device=precision.device))


# ---------------------------------------------------------------------------------------- what a checkpoint holds


def initial_content(model, precision, optimizer, generator) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, by name, with its shape and dtype; the values are those before the first step."""
    tensors = dict(plain_parameters(model))
    if hasattr(precision.recipe, "amax_history_len"):
        state = initial_delayed_state(model.config.n_layers, precision.recipe.amax_history_len)
        tensors |= {f"fp8.{name}": tensor for name, tensor in state.items()}
    if optimizer:
        for name, p in adam_parameters(model, optimizer).items():
            zeros = torch.zeros((), dtype=p.dtype).expand(p.shape)  # takes no memory
            states = {"step": torch.zeros(()), "exp_avg": zeros, "exp_avg_sq": zeros}
            tensors |= {f"optimizer.{name}.{key}": value for key, value in states.items()}
    if generator:
        tensors["generator.data"] = generator.get_state()
    if optimizer and precision.kind == "emulated":
        tensors["generator.rounding"] = precision.generator.get_state()
    return tensors


def live_content(model, precision, optimizer) -> dict[str, torch.Tensor]:
    """Those of its tensors that come into being with the first step."""
    tensors = {}
    if hasattr(precision.recipe, "amax_history_len"):
        tensors |= {f"fp8.{name}": tensor for name, tensor in delayed_state(model).items()}
    if optimizer:
        for name, p in plain_parameters(model).items():
            states = optimizer.state.get(p, {})
            tensors |= {f"optimizer.{name}.{key}": value for key, value in states.items()}
    return tensors


def adam_parameters(model, optimizer) -> dict[str, torch.nn.Parameter]:
    """The optimizer's parameters under the model's plain names, in the optimizer's order."""
    if not isinstance(optimizer, torch.optim.AdamW):
        raise ValueError(f"{type(optimizer).__name__} given; checkpoints hold the states of torch.optim.AdamW")
    names = {p: name for name, p in plain_parameters(model).items()}
    own = [p for group in optimizer.param_groups for p in group["params"]]
    if set(own) != set(names):
        raise ValueError("the optimizer was made for another model's parameters; make one for this model")
    return {names[p]: p for p in own}


def set_adam_states(model, optimizer, saved: dict[str, torch.Tensor]) -> None:
    states = {
        i: {key: saved[f"{name}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq")}
        for i, name in enumerate(adam_parameters(model, optimizer))
    }
    settings = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": states, "param_groups": settings})  # puts each on its parameter's device


def describe(precision: Precision) -> dict:
    """A precision as JSON; `recipe` has the name of the class and its fields."""
    recipe = precision.recipe and {"name": type(precision.recipe).__name__, "fields": recipe_fields(precision.recipe)}
    return {"name": precision.name, "kind": precision.kind, "device": precision.device, "recipe": recipe}


def recipe_fields(recipe) -> dict:
    """The fields of TE's or the emulator's recipe: an enum by its name, a function by its own, what JSON has no form for as text."""
    plain = {}
    for field in fields(recipe):
        value = getattr(recipe, field.name)
        if isinstance(value, Enum):
            value = value.name
        elif callable(value):
            value = getattr(value, "__qualname__", repr(value))
        plain[field.name] = value if isinstance(value, bool | int | float | str | None) else str(value)
    return plain


def section_of(name: str) -> str:
    """A tensor's section: its prefix, or "weights", which have none."""
    prefix = name.split(".", 1)[0]
    return prefix if prefix in SECTIONS else "weights"


def section(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(f"{prefix}."): t for name, t in tensors.items() if section_of(name) == prefix}


# ------------------------------------------------------------------------------------------------- file and checks


def write(path: Path, tensors: dict[str, torch.Tensor], header: dict) -> None:
    """To a temporary name, onto the disk, then renamed: a rename replaces the old file at once or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob("*.tmp"):
        with suppress(FileNotFoundError):  # renamed by its writer in the meantime
            ours = re.fullmatch(re.escape(path.name) + r"\.\d+\.tmp", leftover.name)
            if ours and time.time() - leftover.stat().st_mtime > LEFTOVER_SECONDS:
                leftover.unlink()
    content = serialize(tensors, metadata={"header": json.dumps(header)})
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # of this process: two may save at once
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read(path: Path, expected: dict[str, torch.Tensor]) -> tuple[dict, dict[str, torch.Tensor]]:
    """The header, and the tensors of those sections that `expected` has."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; train a model and save it there first")
    wanted = {section_of(name) for name in expected}
    try:
        with safe_open(path, "pt") as file:
            header = json.loads((file.metadata() or {}).get("header", "{}"))
            # Cloned: what get_tensor gives is the file mapped into memory, and Windows replaces no mapped file.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys() if section_of(name) in wanted}  # noqa: SIM118
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a whole checkpoint ({error}); delete it to train anew") from error
    schema = header.get("schema") if isinstance(header, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"{path} has schema {schema!r}, this code reads {SCHEMA!r}; delete it to train anew")
    check_header(path, header)
    return header, tensors


def check_header(path: Path, header: dict) -> None:
    """Raises ValueError for a header that `save` cannot have written."""
    step, config, precision = (header.get(key) for key in ("step", "config", "precision"))
    precision = precision if isinstance(precision, dict) else {}
    recipe = precision.get("recipe") if isinstance(precision.get("recipe"), dict) else {}
    sound = {
        "step": isinstance(step, int) and step >= 0,
        "config": isinstance(config, dict),
        "precision": all(isinstance(precision.get(key), str) for key in ("name", "kind", "device")),
        "recipe": precision.get("name") != "fp8"
        or (isinstance(recipe.get("name"), str) and isinstance(recipe.get("fields"), dict)),
    }
    wrong = [key for key, good in sound.items() if not good]
    if wrong:
        raise ValueError(f"{path} has a header without a valid {' and '.join(wrong)}; delete it to train anew")


def check_config(header: dict, model: MiniGPT) -> None:
    there, here = header["config"], asdict(model.config)
    differ = differences(there, here, there.keys() | here.keys())
    if differ:
        raise ValueError(f"it holds another model ({differ}); choose that preset, or another path")


def check_precision(saved: dict, precision: Precision) -> None:
    """TE's recipes have fields that the emulator's lack: those that both have are compared."""
    here = describe(precision)
    differ = differences(saved, here, ["name"])
    if not differ and here["recipe"]:
        there, here = ({"recipe": side["recipe"]["name"]} | side["recipe"]["fields"] for side in (saved, here))
        differ = differences(there, here, ["recipe"]) or differences(there, here, there.keys() & here.keys())
    if differ:
        raise ValueError(
            f"it was saved in another precision ({differ}); choose that one, or take the weights alone with load_weights"
        )


def differences(there: dict, here: dict, keys) -> str:
    differ = [key for key in sorted(keys) if there.get(key) != here.get(key)]
    return ", ".join(f"{key} is {there.get(key)!r} there and {here.get(key)!r} here" for key in differ)


def same_draws(saved: dict, precision: Precision) -> bool:
    """Whether the state of the saved run's generator of stochastic rounding is one for this run's."""
    return (saved["kind"], saved["device"]) == (precision.kind, precision.device) == ("emulated", precision.device)


def check_generator_state(name: str, state: torch.Tensor, device: torch.device) -> None:
    try:
        torch.Generator(device).set_state(state)
    except RuntimeError as error:
        raise ValueError(f"{name} is no state of a random generator: {error}") from error


def check_tensors(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Raises ValueError naming a tensor that is missing, unknown, of another shape or dtype, or not finite."""
    found = {section_of(name) for name in tensors}
    absent = [SECTIONS[part] for part in sorted({section_of(name) for name in expected} - found)]
    if absent:
        raise ValueError(f"it was saved without {' and '.join(absent)}")
    missing = sorted(expected.keys() - tensors.keys())
    unknown = sorted(name for name in tensors.keys() - expected.keys() if section_of(name) != "generator")
    for what, names in (("is missing", missing), ("is unknown to this model", unknown)):
        if names:
            raise ValueError(f"{names[0]} {what}" + (f", and {len(names) - 1} more" if names[1:] else ""))
    for name, wanted in expected.items():
        tensor = tensors[name]
        if tensor.dtype != wanted.dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype}, {wanted.dtype} is needed")
        if tensor.shape != wanted.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, {tuple(wanted.shape)} is needed")
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ValueError(f"{name} holds values that are not finite")
