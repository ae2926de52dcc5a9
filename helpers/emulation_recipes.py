"""The recipes of `emulation`, with TE's names, fields and defaults (TE: common/recipe/__init__.py).

Fields about attention, several GPUs and kernels are left out: the emulator has no use for them. Give fields by name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from helpers import formats


class Format(Enum):
    """TE's name for a choice of two number formats, (forward, backward). (`formats.Format` is one number format.)"""

    E4M3 = (formats.E4M3, formats.E4M3)
    HYBRID = (formats.E4M3, formats.E5M2)  # gradients need E5M2's range more than a third mantissa bit
    E5M2 = (formats.E5M2, formats.E5M2)

    def __repr__(self):
        return f"Format.{self.name}"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the recipes share. Raises ValueError for formats that TE does not train in."""

    fp8_format: Format = Format.HYBRID

    split_forward = False  # TE: the forward GEMM accumulates fast, backward ones split (see helpers/tensor_core.py)
    multiple_of = 16  # what the dimensions of a matrix must be multiples of: tensor-core tiles, or the recipe's blocks
    tokens_multiple_of = 8  # and the number of tokens in inference, which does not sum over them

    def __post_init__(self):
        if self.fp8_format not in (Format.E4M3, Format.HYBRID):
            raise ValueError(
                f"Pure E5M2 training is not supported: got fp8_format={self.fp8_format}; use Format.HYBRID or Format.E4M3"
            )

    def number_format(self, role: str) -> formats.Format:
        """The format of an "input", a "weight" or a "grad_output"."""
        forward, backward = self.fp8_format.value
        return backward if role == "grad_output" else forward


@dataclass(frozen=True, kw_only=True)
class DelayedScaling(Recipe):
    """One scale a tensor, computed from the amaxes of earlier steps: scale = fp8_max / amax / 2**margin.

    `amax_compute_algo`: "max" of the history, "most_recent", or a function amax_history (length, columns) -> amax (columns,).
    `scaling_factor_compute_algo`: None, or a function (amax, scale, fp8_max, recipe) -> scale, such as `unscaled`.
    """

    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable = "max"
    scaling_factor_compute_algo: Callable | None = None

    def __post_init__(self):
        super().__post_init__()
        if not callable(self.amax_compute_algo) and self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(
                f"got amax_compute_algo={self.amax_compute_algo!r}; use 'max', 'most_recent' or a function of the history"
            )
        if self.amax_history_len < 1:
            raise ValueError(
                f"got amax_history_len={self.amax_history_len}; the history needs at least its staging row"
            )


def unscaled(amax: Tensor, scale: Tensor, fp8_max: float, recipe: DelayedScaling) -> Tensor:
    """For `scaling_factor_compute_algo`, here and in TE: every scale stays 1. What FP8 training is without scaling."""
    return torch.ones_like(scale)


@dataclass(frozen=True, kw_only=True)
class Float8CurrentScaling(Recipe):
    """One scale a tensor, from its own amax: no state, but one more pass over the data."""

    use_power_2_scales: bool = False


@dataclass(frozen=True, kw_only=True)
class Float8BlockScaling(Recipe):
    """A scale for every 1x128 values of inputs and gradients and every 128x128 of a weight; dims are 1 or 2 accordingly."""

    fp8_format: Format = Format.E4M3
    use_f32_scales: bool = False  # False: powers of two
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1

    split_forward = True
    multiple_of = 128

    def __post_init__(self):
        super().__post_init__()
        dims = (self.x_block_scaling_dim, self.w_block_scaling_dim, self.grad_block_scaling_dim)
        if any(dim not in (1, 2) for dim in dims) or dims.count(2) > 1:
            raise ValueError(
                f"got block scaling dims (x, w, grad) = {dims}; each is 1 or 2, and no GEMM takes two operands in 2-D blocks"
            )

    def block(self, role: str) -> tuple[int, int]:
        dims = {
            "input": self.x_block_scaling_dim,
            "weight": self.w_block_scaling_dim,
            "grad_output": self.grad_block_scaling_dim,
        }
        return (1, 128) if dims[role] == 1 else (128, 128)


@dataclass(frozen=True, kw_only=True)
class MXFP8BlockScaling(Recipe):
    """A power-of-two scale (E8M0) for every 32 values."""

    fp8_format: Format = Format.E4M3

    multiple_of = tokens_multiple_of = 32

    def block(self, role: str) -> tuple[int, int]:
        return (1, 32)


@dataclass(frozen=True, kw_only=True)
class NVFP4BlockScaling(Recipe):
    """Four bits (E2M1), an E4M3 scale for every 16 values (every 16x16 of a weight) and one scale a tensor.

    The operands of the weight gradient pass a random Hadamard transform (RHT); gradients are rounded stochastically.
    """

    fp8_format: Format = Format.E4M3  # of the block scales
    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False

    tokens_multiple_of = 16

    def block(self, role: str) -> tuple[int, int]:
        return (16, 16) if role == "weight" and not self.disable_2d_quantization else (1, 16)

    def rounds_stochastically(self, role: str) -> bool:
        return role == "grad_output" and not self.disable_stochastic_rounding

    def transforms(self, role: str) -> bool:
        return role != "weight" and not self.disable_rht
