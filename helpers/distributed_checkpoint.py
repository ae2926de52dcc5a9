"""Checkpoints of a job of several ranks: each rank writes what it holds, and any number of ranks reads it back.

Written by torch.distributed.checkpoint with its safetensors storage, so there are tensors and JSON in it and no pickle.
(Its default storage pickles the metadata.) A checkpoint is a folder such as `step-00000030`: a safetensors file of each
rank that had something to write, and a header. It is written under another name and renamed when every rank is done: a folder
of that name is whole. Weights have their plain names, so either backend and either strategy reads the other's.

Not in it: AdamW's settings, and the state of the generators. The data are drawn anew from the seed up to the step.
"""

import json
import os
import shutil
import warnings
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from helpers import checkpoints
from helpers.fp8_state import delayed_state, load_delayed_state
from helpers.models import MiniGPT, plain_parameters
from helpers.precision import Precision

SCHEMA = "fp8-workshop/sharded-checkpoint/1"
HEADER = "header.json"
MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's


def newest(folder: Path) -> Path | None:
    """The newest whole checkpoint in a folder, or None."""
    return max((path for path in Path(folder).glob("step-*") if not path.suffix), default=None)


def save(
    folder: Path, model: MiniGPT, precision: Precision, step: int, optimizer: torch.optim.AdamW | None = None
) -> Path:
    """Writes weights, AdamW's states and FP8 state to `folder`/step-…, whole or not at all. Every rank has to call it.

    Returns the path. A save that is killed leaves a folder `….partial`, which nothing reads and the next save of that
    step replaces. Raises ValueError, on every rank, and writes nothing if a value is not finite on any.
    """
    final = Path(folder) / f"step-{step:08}"
    partial = final.with_name(f"{final.name}.partial")
    # Copies of the FP8 state: it is views of TE's tensors.
    tensors = live_tensors(model, optimizer) | {f"fp8.{k}": v.clone() for k, v in delayed_state(model).items()}
    if not finite_on_all_ranks(tensors):
        raise ValueError(
            f"nothing was saved to {final}: after step {step} not every weight, moment and scale is finite"
        )
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    barrier()
    with job_or_not() as options:
        writer = dcp.HuggingFaceStorageWriter(str(partial), save_distributed=True)
        dcp.save(tensors, storage_writer=writer, **options)  # waits for all ranks, and the disk
    if first:
        header = {
            "schema": SCHEMA,
            "step": step,
            "config": asdict(model.config),
            "precision": checkpoints.describe(precision),
            "files": sorted(path.name for path in partial.glob("*.safetensors")),
        }
        (partial / HEADER).write_text(json.dumps(header))
        if final.exists():  # of the same step, by a job that went on from an older one
            shutil.rmtree(final)
        os.replace(partial, final)
    barrier()
    return final


def load(path: Path, model: MiniGPT, precision: Precision, optimizer: torch.optim.AdamW | None = None) -> int:
    """Loads what `save` wrote on any number of ranks; returns the step. Every rank has to call it; no job is needed.

    `model` is the MiniGPT itself, also where DDP wraps it or FSDP2 has sharded it. The precision must be the one that was
    saved, with the same recipe; `load_weights` takes any. Raises FileNotFoundError, or ValueError naming the folder and
    what differs, before anything is changed.
    """
    header, reader, saved = opened(path, model)
    try:
        checkpoints.check_precision(header["precision"], precision)
        if precision.name == "fp8":
            checkpoints.touch(model, precision)
            if isinstance(model, FSDPModule):
                model.reshard()  # without a backward it would go on with what it has gathered, whatever is loaded
        fp8 = {f"fp8.{k}": v.clone() for k, v in delayed_state(model).items()}
        tensors = live_tensors(model, optimizer) | fp8
        check_shapes(saved, tensors)
    except ValueError as error:
        raise ValueError(f"{path} does not fit: {error}") from error
    read(reader, tensors)
    if fp8:
        load_delayed_state(model, {name.removeprefix("fp8."): tensor for name, tensor in fp8.items()})
    if optimizer:
        for state in optimizer.state.values():
            state["step"].fill_(header["step"])
    return header["step"]


def load_weights(path: Path, model: MiniGPT) -> int:
    """Loads the weights alone, saved in any precision; returns the step. Raises as `load` does."""
    header, reader, saved = opened(path, model)
    tensors = live_tensors(model, None)
    try:
        check_shapes(saved, tensors)
    except ValueError as error:
        raise ValueError(f"{path} does not fit: {error}") from error
    read(reader, tensors)
    return header["step"]


# ------------------------------------------------------------------------------------------------- parts


def live_tensors(model: MiniGPT, optimizer: torch.optim.AdamW | None) -> dict[str, torch.Tensor]:
    """Weights and AdamW's moments (DTensors under FSDP2), not copies; the moments are made if there was no step yet."""
    parameters = plain_parameters(model)
    tensors = {f"model.{name}": parameter.detach() for name, parameter in parameters.items()}
    for name, parameter in parameters.items() if optimizer else ():
        state = optimizer.state[parameter]
        if not state:
            state |= {"step": torch.zeros((), device=parameter.device)}
            state |= {moment: torch.zeros_like(parameter) for moment in MOMENTS}
        tensors |= {f"optimizer.{moment}.{name}": state[moment].detach() for moment in MOMENTS}
    return tensors


def finite_on_all_ranks(tensors: dict[str, torch.Tensor]) -> bool:
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors.values()]
    finite = torch.stack([t.isfinite().all() for t in local]).all().int()
    if dist.is_initialized():
        dist.all_reduce(finite, dist.ReduceOp.MIN)
    return bool(finite.item())


def opened(path: Path, model: MiniGPT):
    """(header, reader, {tensor: its whole shape}) of a checkpoint that is whole and of a model like `model`."""
    path = Path(path)
    if not (path / HEADER).exists():
        raise FileNotFoundError(f"{path} is not a whole checkpoint: it has no {HEADER}. Give a folder named step-…")
    reader = dcp.HuggingFaceStorageReader(str(path))
    try:
        header = json.loads((path / HEADER).read_text())
        schema = header.get("schema") if isinstance(header, dict) else None
        if schema != SCHEMA:
            raise ValueError(f"its schema is {schema!r}, this code reads {SCHEMA!r}")
        checkpoints.check_header(path, header)
        missing = [name for name in header["files"] if not (path / name).exists()]
        if missing:
            raise ValueError(f"its files {', '.join(missing)} are missing")
        checkpoints.check_config(header, model)
        saved = {name: tuple(meta.size) for name, meta in reader.read_metadata().state_dict_metadata.items()}
    except (ValueError, SafetensorError) as error:
        raise ValueError(f"{path} is not a whole checkpoint of this model ({error})") from error
    return header, reader, saved


def check_shapes(saved: dict[str, tuple], tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if saved.get(name) != tuple(tensor.shape):
            raise ValueError(f"{name} has shape {saved.get(name)} there, this model needs {tuple(tensor.shape)}")


def read(reader: dcp.HuggingFaceStorageReader, tensors: dict[str, torch.Tensor]) -> None:
    """Reads into `tensors`, each rank its part."""
    with job_or_not() as options:
        dcp.load(tensors, storage_reader=reader, **options)


@contextmanager
def job_or_not():
    """Options for torch.distributed.checkpoint: it works without a job as well, but warns, even when told so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield {"no_dist": not dist.is_initialized()}


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
