"""How a Hopper tensor core adds up an FP8 matrix product, bit for bit.

One instruction takes 32 products a result. It does not add them in FP32: the products and the sum so far are lined up at the
largest exponent among them, cut off 13 bits below it, and added; the sum is cut to 13 bits again. "Fast accumulation" goes on
so over the whole of K. "Split accumulation" adds the sum to an FP32 number after every 128 products and starts anew.

The exponent of a product is the sum of its operands' exponents, before the product is normalized, and that of a subnormal
operand is the format's lowest. A long sum with a small result is also cut along K by the library: cuBLAS made six parts of
K = 16384 for 128 x 128 results, added up in FP32.

The rule was found by trying: of accumulators with 12 to 14 bits over groups of 16 or 32, this one alone gives every bit of
what te.Linear computed on an H200 (tests/test_tensor_core.py and tests/test_emulation_gpu.py). That FP8 sums on Hopper keep about 14 bits is reported in the
DeepSeek-V3 report (arXiv:2412.19437, section 3.5.2).
"""

import torch
from torch import Tensor

GROUP = 32  # products a result and instruction
FRACTION_BITS = 13  # kept below the leading bit
SPLIT_EVERY = 128  # products between two additions in FP32
NOTHING = -300  # the "exponent" of 0: below all others


def exponent(x: Tensor) -> Tensor:
    """floor(log2 |x|), and NOTHING for 0."""
    return torch.where(x == 0, NOTHING, torch.frexp(x).exponent - 1)


def cut(x: Tensor, leading: Tensor) -> Tensor:
    """`x` without what lies more than FRACTION_BITS below the exponent `leading`; rounds towards zero."""
    step = torch.ldexp(torch.ones_like(x), leading.clamp(min=NOTHING + 10) - FRACTION_BITS)
    return torch.trunc(x / step) * step


def add_group(sum_so_far: Tensor, a: Tensor, b: Tensor, lowest_a: int, lowest_b: int) -> Tensor:
    """One instruction: sum (m, n) and operands a (m, 32), b (32, n), all float64, to the new sum."""
    a, b = a[:, None, :], b.t()[None, :, :]
    products = a * b  # exact in float64
    # Added before the product is normalized: 1.5 x 1.5 counts as 2^0, although it is 2.25.
    exponents = exponent(a).clamp(min=lowest_a) + exponent(b).clamp(min=lowest_b)
    exponents = torch.where(products == 0, NOTHING, exponents)
    leading = torch.maximum(exponents.amax(-1), exponent(sum_so_far))
    total = cut(products, leading[..., None]).sum(-1) + cut(sum_so_far, leading)
    return cut(total, exponent(total))


def matmul(a: Tensor, b: Tensor, split: bool, lowest_a: int | None = None, lowest_b: int | None = None) -> Tensor:
    """a (m, k) times b (k, n) as the tensor core adds it: float32, before scales and bias.

    The operands hold FP8 values in float32, times powers of two at most. `split`: split instead of fast accumulation.
    `lowest_a`, `lowest_b`: the lowest exponent of each one's format, -6 in E4M3 and -14 in E5M2; None takes subnormal
    numbers as if they were normal.
    Memory and time are 32 m n at a time, K/32 times: for looking at small products, not for training.
    """
    a, b = a.double(), b.double()
    lowest_a, lowest_b = (NOTHING if lowest is None else lowest for lowest in (lowest_a, lowest_b))
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64, device=a.device)
    part = total.clone()
    for start in range(0, a.shape[1], GROUP):
        part = add_group(part, a[:, start : start + GROUP], b[start : start + GROUP], lowest_a, lowest_b)
        if split and (start + GROUP) % SPLIT_EVERY == 0:
            total, part = (total + part).float().double(), torch.zeros_like(part)
    return (total + part).float()
