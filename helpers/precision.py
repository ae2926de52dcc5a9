"""One way to say what to compute in: "fp32", "bf16", or "fp8" with a recipe. Chooses TE or the emulator, and says which.

Parameters and optimizer states are FP32 in every precision. BF16 and FP8 both run under `torch.autocast(bfloat16)`; FP8
adds `te.autocast` around TE's layers, or the emulator's twin of it around emulated ones.
"""

import importlib
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from helpers import emulation
from helpers.hardware import RECIPES, Hardware, import_te
from helpers.models import GPTConfig, MiniGPT

NAMES = ("fp32", "bf16", "fp8")
# The recipe that the notebooks teach. TE's own default history is 1024 entries long.
DELAYED_DEFAULTS = {"fp8_format": "HYBRID", "amax_history_len": 16, "amax_compute_algo": "max"}


@dataclass(frozen=True)
class Precision:
    name: str  # "fp32", "bf16" or "fp8"
    kind: str  # "real" where this hardware computes in it, "emulated" where FP8's rounding is imitated
    backend: str  # "torch" or "te"
    device: str
    recipe: Any = None  # TE's recipe object, or the emulator's of the same name and fields
    seed: int = 0  # of the emulator's stochastic rounding (NVFP4's gradients)

    @cached_property
    def generator(self) -> torch.Generator:
        """Draws the emulator's stochastic rounding. It goes on from run to run: to repeat one, choose the precision anew."""
        return torch.Generator(self.device).manual_seed(self.seed)

    @property
    def label(self) -> str:
        """For tables and legends, such as "FP8 DelayedScaling HYBRID (EMULATED)"."""
        if self.name != "fp8":
            return self.name.upper()
        chosen = getattr(self.recipe, "fp8_format", None)
        return f"FP8 {type(self.recipe).__name__}{f' {chosen.name}' if chosen else ''} ({self.kind.upper()})"

    def build(self, config: GPTConfig, generator: torch.Generator | None = None) -> MiniGPT:
        """A MiniGPT that computes in this precision. Raises ValueError for dimensions that FP8 cannot take."""
        if self.name == "fp8":
            config.check_fp8()
        model = MiniGPT(config, self.backend, self.device, generator)
        return emulation.emulate(model) if self.kind == "emulated" else model

    @contextmanager
    def autocast(self):
        """The context for the forward pass (and only for it: backward belongs outside)."""
        with ExitStack() as stack:
            if self.name != "fp32":
                stack.enter_context(torch.autocast(self.device, torch.bfloat16))
            if self.kind == "emulated":
                stack.enter_context(emulation.autocast(recipe=self.recipe, generator=self.generator))
            elif self.name == "fp8":
                te, _ = import_te()
                stack.enter_context(te.autocast(enabled=True, recipe=self.recipe))
            yield


def choose(name: str, hardware: Hardware, recipe: str = "delayed", seed: int = 0, **fields) -> Precision:
    """The precision `name` on this machine; for "fp8", a recipe's name and its fields (`fp8_format="E4M3"`, ...).

    FP8 is REAL where this GPU runs the recipe, else EMULATED. `seed` is for the emulator's stochastic rounding; TE draws
    from torch's own CUDA generator. Raises ValueError for an unknown name, recipe or field.
    """
    if name not in NAMES:
        raise ValueError(f"precision {name!r} is not known; choose one of {', '.join(NAMES)}")
    if name == "bf16" and not hardware.bf16:
        raise ValueError(f"BF16 needs compute capability 8.0; this GPU has {hardware.capability}. Use 'fp32'")
    if name != "fp8":
        return Precision(name, "real", hardware.backend, hardware.device)
    if recipe not in RECIPES:
        raise ValueError(f"recipe {recipe!r} is not known; choose one of {', '.join(RECIPES)}")
    real = hardware.recipes[recipe] == ""
    module = importlib.import_module("transformer_engine.common.recipe") if real else emulation
    if recipe == "delayed":
        fields = DELAYED_DEFAULTS | fields
    if "fp8_format" in fields:
        try:
            fields["fp8_format"] = module.Format[fields["fp8_format"]]
        except KeyError:
            raise ValueError(f"fp8_format {fields['fp8_format']!r} is not known; choose 'HYBRID' or 'E4M3'") from None
    try:
        built = getattr(module, RECIPES[recipe][1])(**fields)
    except TypeError as error:
        raise ValueError(f"recipe {recipe!r} does not take {', '.join(fields)}: {error}") from error
    if real:
        return Precision("fp8", "real", "te", hardware.device, built)
    return Precision("fp8", "emulated", "torch", hardware.device, built, seed)
