"""Number formats by bit: E4M3, E5M2, E8M0 and E2M1.

A code of a signed format is `sign | exponent field | mantissa field`. With exponent field e > 0 its value is
(-1)^sign * 2^(e - bias) * (1 + mantissa / 2^mantissa_bits); with e = 0 it is subnormal:
(-1)^sign * 2^(1 - bias) * mantissa / 2^mantissa_bits. E8M0 is an exponent alone: 2^(e - 127), no sign and no zero.

Sources: Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv:2209.05433) for E4M3 and E5M2; the OCP
Microscaling Formats specification v1.0 for E8M0 and E2M1. Rounding is torch's wherever torch has the format.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """One number format. `dtype` is torch's name for it, None where torch cannot cast to it (E2M1)."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    min_normal: float
    min_subnormal: float  # the smallest positive value; E8M0 has no subnormals, there it is min_normal
    dtype: torch.dtype | None

    @property
    def signed(self) -> bool:
        return self.name != "E8M0"

    @property
    def bits(self) -> int:
        return self.signed + self.exponent_bits + self.mantissa_bits


# E4M3 gives up infinity: of its top exponent only 1.111 is taken, for NaN. So it reaches 448 = 2^8 * 1.75.
E4M3 = Format("E4M3", 4, 3, 7, 448.0, 2.0**-6, 2.0**-9, torch.float8_e4m3fn)
# E5M2 keeps IEEE's infinity and NaN, and is the upper byte of a float16.
E5M2 = Format("E5M2", 5, 2, 15, 57344.0, 2.0**-14, 2.0**-16, torch.float8_e5m2)
# E8M0 is the exponent field of a float32: a scale that is a power of two. 255 is NaN.
E8M0 = Format("E8M0", 8, 0, 127, 2.0**127, 2.0**-127, 2.0**-127, torch.float8_e8m0fnu)
# E2M1 has neither infinity nor NaN: its 16 codes are 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
E2M1 = Format("E2M1", 2, 1, 1, 6.0, 1.0, 0.5, None)

FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2, E8M0, E2M1)}


def check_dtype(x: Tensor) -> None:
    """Raises ValueError unless `x` is float32, bfloat16 or float16: the rest would be rounded on the way to float32."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"got a tensor of {x.dtype}; allowed are float32, bfloat16 and float16: convert it first, with x.float()"
        )


def as_float32(x: Tensor | float) -> Tensor:
    """`x` as float32, exactly. Raises ValueError for tensors that float32 cannot hold."""
    if isinstance(x, Tensor):
        check_dtype(x)
    return torch.as_tensor(x, dtype=torch.float32)


def power_of_two_below(x: Tensor) -> Tensor:
    """The largest power of two <= |x|, by clearing float32's sign and mantissa bits. 0 for its denormals, inf for NaN."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def spacing(x: Tensor | float, fmt: Format) -> Tensor:
    """Distance between neighbouring values of `fmt` at |x|, float32, shape of `x`. Of NaN it means nothing.

    It doubles with each power of two; below `min_normal` it stays `min_subnormal`, beyond `max` it stays as at `max`.
    """
    step = power_of_two_below(as_float32(x).clamp(-fmt.max, fmt.max)) * 2.0**-fmt.mantissa_bits
    return step.clamp(min=fmt.min_subnormal)


def quantize(x: Tensor | float, fmt: Format) -> Tensor:
    """The value of `fmt` nearest to each `x` (ties to the even mantissa; E8M0 has none, there up), float32, shape of `x`.

    Saturates: what lies beyond `max`, infinity too, becomes `max`, as in the hardware's conversion. NaN stays NaN.
    Raises ValueError for integer and float64 tensors, and for negative numbers in E8M0, which has no sign.
    """
    x = as_float32(x)
    if not fmt.signed and (x < 0).any():
        raise ValueError(f"got {x.min().item()} for {fmt.name}, which has no sign: pass magnitudes, x.abs()")
    # Clamp first: what a cast makes of 500 in E4M3 differs between torch versions (NaN in 2.11, 448 in 2.13).
    x = x.clamp(-fmt.max if fmt.signed else fmt.min_normal, fmt.max)
    if fmt.dtype is not None:
        return decode(x.to(fmt.dtype).view(torch.uint8), fmt)
    step = spacing(x, fmt)
    return torch.round(x / step) * step  # torch.round goes to the even multiple, which is the even mantissa


def encode(x: Tensor | float, fmt: Format) -> Tensor:
    """Codes of `quantize(x, fmt)`, uint8, shape of `x`. E2M1 uses the low four bits; its NaN, having no code, becomes 6."""
    value = quantize(x, fmt)
    if fmt.dtype is not None:
        return value.to(fmt.dtype).view(torch.uint8)
    value = value.nan_to_num(nan=fmt.max)
    magnitude_code = torch.bucketize(value.abs(), _value_table(fmt, value.device)[:8])
    return (magnitude_code + 8 * torch.signbit(value)).to(torch.uint8)


@functools.cache
def _value_table(fmt: Format, device: torch.device) -> Tensor:
    """The value of every code of `fmt`, in the codes' order. Looking values up is 3 times faster than torch's cast on a CPU."""
    codes = torch.arange(2**fmt.bits, dtype=torch.uint8)
    if fmt.dtype is not None:
        return codes.view(fmt.dtype).float().to(device)
    exponent, mantissa = codes >> 1 & 3, (codes & 1) / 2  # E2M1
    magnitude = torch.where(exponent == 0, mantissa, torch.ldexp(1 + mantissa, exponent.int() - fmt.bias))
    return torch.where(codes < 8, magnitude, -magnitude).to(device)


def decode(codes: Tensor, fmt: Format) -> Tensor:
    """Values of `codes` (uint8), float32, same shape. Raises ValueError for other dtypes and for codes of too many bits."""
    if codes.dtype != torch.uint8:
        raise ValueError(f"got codes of {codes.dtype}; a code is a torch.uint8")
    if fmt.bits < 8 and codes.numel() and codes.max() >= 2**fmt.bits:
        raise ValueError(
            f"got code {codes.max().item()}; {fmt.name} has {fmt.bits} bits, so codes 0 to {2**fmt.bits - 1}"
        )
    return _value_table(fmt, codes.device).index_select(0, codes.reshape(-1).int()).view(codes.shape)


def split_bits(code: int, fmt: Format) -> tuple[str, str, str]:
    """(sign, exponent, mantissa) bits of one code as strings; a field that the format lacks is ''."""
    if not 0 <= code < 2**fmt.bits:
        raise ValueError(f"got code {code}; {fmt.name} has {fmt.bits} bits, so codes 0 to {2**fmt.bits - 1}")
    text = f"{code:0{fmt.bits}b}"
    sign, rest = text[: fmt.signed], text[fmt.signed :]
    return sign, rest[: fmt.exponent_bits], rest[fmt.exponent_bits :]


def values(fmt: Format) -> Tensor:
    """All finite values of `fmt` in ascending order, each once (zero has two codes), float32, 1-D."""
    every = decode(torch.arange(2**fmt.bits, dtype=torch.uint8), fmt)
    return every[every.isfinite()].unique(sorted=True)
