"""Quantization in blocks: FP8 block scaling, MXFP8 and NVFP4. `emulation` uses it; its per-tensor recipes need no blocks.

A block is a small tile of a matrix with a scale of its own, so that an outlier costs precision only to its neighbours.
Every function takes a matrix (rows, columns) in float32 or bfloat16 and gives `Blocks`. A GEMM sums over one dimension
of each operand, and the blocks lie along that one: forward and backward need a tensor in blocks along its rows and,
quantized afresh from the original, in blocks along its columns.
"""

from typing import NamedTuple

import torch
from torch import Generator, Tensor

from helpers.formats import E2M1, E4M3, Format, as_float32, power_of_two_below, quantize, spacing

FLOAT32_MAX = torch.finfo(torch.float32).max


class Blocks(NamedTuple):
    """A quantized matrix: `values` of the element format, and what each block's values are to be multiplied by."""

    values: Tensor  # (rows, columns) float32, numbers of E4M3, E5M2 or E2M1
    block_scale: Tensor  # (rows / block rows, columns / block columns) float32
    tensor_scale: Tensor | float = 1.0  # a second scale for the whole matrix; NVFP4 only

    def scaled(self) -> tuple[Tensor, Tensor | float]:
        """(`values` times their block's scale, tensor_scale): what a tensor core adds up, and what the sum is multiplied by."""
        return _multiply_blocks(self.values, self.block_scale), self.tensor_scale


def _tiles(x: Tensor, down: int, across: int) -> Tensor:
    """(rows, columns) as (down, block rows, across, block columns)."""
    return x.reshape(down, x.shape[0] // down, across, x.shape[1] // across)


def _block_counts(x: Tensor, block: tuple[int, int]) -> tuple[int, int]:
    if x.shape[0] % block[0] or x.shape[1] % block[1]:
        raise ValueError(
            f"blocks of {block[0]}x{block[1]} do not divide a matrix of shape {tuple(x.shape)}: "
            f"pad its rows to a multiple of {block[0]} and its columns to a multiple of {block[1]}"
        )
    return x.shape[0] // block[0], x.shape[1] // block[1]


def _block_amax(x: Tensor, down: int, across: int) -> Tensor:
    """Largest magnitude of each block, (down, across) float32. Like the GPU's fmaxf it passes over NaN."""
    amax = _tiles(x.abs(), down, across).amax(dim=(1, 3)).float()
    if amax.isnan().any():
        amax = _tiles(x.abs().nan_to_num(nan=0.0, posinf=float("inf")), down, across).amax(dim=(1, 3)).float()
    return amax


def _multiply_blocks(x: Tensor, scale: Tensor) -> Tensor:
    """Every element times the scale (down, across) of its block, float32."""
    return (_tiles(x.float(), *scale.shape) * scale[:, None, :, None]).reshape(x.shape)


def scale_from_amax(amax: Tensor, fmt_max: float, power_of_two: bool) -> Tensor:
    """The scale that takes `amax` to the format's maximum: one correctly rounded division of two tensors.

    (`448.0 / tensor` would be a reciprocal and a product in torch, one unit off at times.) 1 where amax is 0 or
    infinite, so that zeros stay zeros; float32's maximum where the quotient overflows. `power_of_two` drops its mantissa.
    Source: TE's common/recipe/recipe_common.cuh, compute_scale_from_amax.
    """
    scale = (torch.full_like(amax, fmt_max) / amax).clamp(max=FLOAT32_MAX)
    if power_of_two:
        scale = power_of_two_below(scale)
    return torch.where((amax > 0) & amax.isfinite(), scale, 1.0)


def quantize_fp8_blocks(x: Tensor, fmt: Format, block: tuple[int, int], power_of_two: bool = True) -> Blocks:
    """TE's `Float8BlockScaling`: `block` is (1, 128) or (128, 1) for activations and gradients, (128, 128) for weights.

    Raises ValueError if the blocks do not divide the matrix. Source: TE's common/transpose/quantize_transpose_*_blockwise.cu.
    """
    down, across = _block_counts(x, block)
    scale = scale_from_amax(_block_amax(x, down, across), fmt.max, power_of_two)
    return Blocks(quantize(_multiply_blocks(x, scale), fmt), 1 / scale)


def quantize_mxfp8(x: Tensor, fmt: Format = E4M3, block: tuple[int, int] = (1, 32)) -> Blocks:
    """MXFP8: blocks of 32 that share an E8M0 scale, 2^ceil(log2(amax / fmt.max)), the smallest that avoids saturation.

    Raises ValueError if the blocks do not divide the matrix. Source: OCP Microscaling specification v1.0, with the
    rounding of the scale that cuBLAS documents and TE uses (common/util/ptx.cuh, float_to_e8m0).
    """
    down, across = _block_counts(x, block)
    amax = _block_amax(x, down, across)
    mantissa, exponent = torch.frexp(amax / torch.full_like(amax, fmt.max))  # mantissa in [0.5, 1)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)  # exactly a power of two: no rounding up
    exponent = torch.where(amax > 0, exponent, -127).clamp(-127, 127)
    exponent = torch.where(amax.isfinite(), exponent, 127)
    one = torch.ones_like(amax)
    return Blocks(quantize(_multiply_blocks(x, torch.ldexp(one, -exponent)), fmt), torch.ldexp(one, exponent))


# The signs of TE's "random" Hadamard transform are drawn once and for all (nvfp4_tensor.py, get_wgrad_sign_vector):
# both operands of the weight gradient must use the same ones.
RHT_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def random_hadamard_transform(x: Tensor) -> Tensor:
    """Rotates every 16 neighbours along the rows of `x` (rows, columns): an outlier is spread over all 16. Same dtype.

    x·H with H orthogonal: transforming both operands along the dimension that a GEMM sums over leaves the product.
    Raises ValueError if 16 does not divide the columns. Source: NVIDIA, "Pretraining LLMs with NVFP4" (arXiv:2509.25149).
    """
    _block_counts(x, (1, 16))
    hadamard = torch.ones(1, 1)
    while len(hadamard) < 16:  # Sylvester's construction
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    matrix = (torch.tensor(RHT_SIGNS)[:, None] * hadamard / 4).to(x.device)  # 4 = sqrt(16)
    with torch.autocast(x.device.type, enabled=False):
        return (x.reshape(-1, 16).float() @ matrix).to(x.dtype).view(x.shape)


def stochastic_round(x: Tensor, fmt: Format, generator: Generator) -> Tensor:
    """One of the two values of `fmt` around each x, the nearer one more often, so that the mean is x. Saturates, float32."""
    x = as_float32(x).clamp(-fmt.max, fmt.max)
    step = spacing(x, fmt)
    below = (x / step).floor()
    up = torch.rand(x.shape, generator=generator, device=x.device) < x / step - below
    return (below + up) * step


def quantize_nvfp4(x: Tensor, block: tuple[int, int] = (1, 16), generator: Generator | None = None) -> Blocks:
    """NVFP4: E2M1 values, an E4M3 scale for each `block`, (1, 16) or (16, 16), and one float32 scale for the matrix.

    A `generator` rounds stochastically, as TE does for gradients. E2M1 has no NaN: the hardware makes 6 of one, here it
    stays NaN, to be seen. Raises ValueError if the blocks do not divide the matrix.
    Source: TE's custom_recipes/reference_nvfp4.py; the order of the divisions is its.
    """
    down, across = _block_counts(x, block)
    amax = _block_amax(x, down, across)
    # The tensor's scale takes the largest block scale to E4M3's maximum.
    encode = scale_from_amax(amax.max(), E4M3.max * E2M1.max, power_of_two=False)
    six = torch.full_like(encode, E2M1.max)
    block_scale = quantize((amax * (encode * (1 / six))).clamp(max=FLOAT32_MAX), E4M3)
    tensor_scale = 1 / encode
    scale = (1 / (block_scale * tensor_scale)).clamp(max=FLOAT32_MAX)
    scaled = _multiply_blocks(x, scale)
    values = quantize(scaled, E2M1) if generator is None else stochastic_round(scaled, E2M1, generator)
    return Blocks(values, block_scale, tensor_scale)
