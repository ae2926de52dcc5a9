"""Activation checkpointing: a block keeps only its input, and runs forward once more during backward.

TE's layers take `te.checkpoint`, plain ones torch's. Both must compute the second time what they computed the first
time. That takes care under delayed scaling, whose scales have moved on by then: TE puts the old ones aside by itself;
for the emulator `Recomputed` does.
"""

from contextlib import contextmanager, nullcontext
from functools import partial

from torch.utils.checkpoint import checkpoint

from helpers import emulation
from helpers.hardware import import_te
from helpers.models import MiniGPT
from helpers.precision import Precision


def recompute_blocks(model: MiniGPT, precision: Precision) -> None:
    """From now on every block of `model` recomputes its activations in backward."""
    te, _ = import_te() if model.backend == "te" else (None, "")
    for block in model.blocks:
        options = {"use_reentrant": False}
        if precision.kind == "emulated":
            options["context_fn"] = partial(emulated_contexts, block, precision)
        block.forward = partial(te.checkpoint if te else checkpoint, block.forward, **options)


def emulated_contexts(block, precision: Precision):
    """(context of the forward pass, context of the recomputation) for one call of an emulated block."""
    layers = [module for module in block.modules() if isinstance(module, emulation.EmulatedLinear)]
    scales = {layer: layer.fp8_meta["scaling_fwd"].scale.clone() for layer in layers if layer.fp8_meta}
    return nullcontext(), recomputed(layers, scales, precision)


@contextmanager
def recomputed(layers: list, scales: dict, precision: Precision):
    """The same autocast region again, with the scales of then; afterwards the state is as it was before."""
    states = {layer: layer.fp8_meta["scaling_fwd"] for layer in layers if layer.fp8_meta}
    now = {layer: (state.scale.clone(), state.amax_history.clone()) for layer, state in states.items()}
    for layer, state in states.items():
        if layer in scales:
            state.scale.copy_(scales[layer])
        else:
            state.scale.fill_(1)  # the first step: there was no state yet
    try:
        with emulation.autocast(recipe=precision.recipe, generator=precision.generator) as region:
            try:
                yield
            finally:
                region.to_update.clear()  # a tensor's amax counts once
    finally:
        for layer, state in states.items():
            state.scale.copy_(now[layer][0])
            state.amax_history.copy_(now[layer][1])
