"""Notebook 01: a byte as a number, scales, break-even."""

import math

import torch

from helpers import formats
from helpers.checks.registry import exercise, integers, normal, uniform
from helpers.grading import compare


def e4m3_by(exponent_of=lambda e: 2.0 ** (e - 7), subnormal=lambda f: 2.0**-6 * f, lead=1, sign=True, top=None):
    """decode_byte with one part exchanged."""

    def decode(code):
        e, f = (code >> 3) & 15, (code & 7) / 8
        magnitude = top if e == 15 and top else subnormal(f) if e == 0 and subnormal else exponent_of(e) * (lead + f)
        return -magnitude if sign and code >= 128 else magnitude

    return decode


@exercise(
    "01",
    outcome="1.2",
    hints=(
        "Cut out the fields with shifts and masks: `code >> 7`, `(code >> 3) & 0b1111`, `code & 0b111`.",
        "Two cases: with exponent field 0 it is 2**-6 * m/8; otherwise 2**(e - 7) * (1 + m/8). The sign bit makes it negative.",
    ),
)
def decode_byte(answer, generator):
    codes = [0b0_0111_000, 0b0_0101_010, 0b1_0111_100, 0b0_0000_001, 0b0_0000_111, 0b0_0001_000, 0b0_1111_110, 0]
    codes += [code for code in integers(generator, 0, 255, 40) if code & 127 != 127]  # no NaN
    compare(
        answer,
        [(code,) for code in codes],
        lambda code: torch.tensor([code], dtype=torch.uint8).view(torch.float8_e4m3fn).item(),
        {
            "the bias is missing: the exponent is e - 7, so that it can be negative": e4m3_by(lambda e: 2.0**e),
            "the bias is off by one: E4M3's is 7": e4m3_by(lambda e: 2.0 ** (e - 8), lambda f: 2.0**-7 * f),
            "the leading 1 is missing: with e > 0 it is 1 + m/8": e4m3_by(lead=0),
            "subnormal numbers (e = 0) have no leading 1": e4m3_by(subnormal=None),
            "subnormal numbers (e = 0) have the exponent 1 - 7, not 0 - 7": e4m3_by(subnormal=lambda f: 2.0**-7 * f),
            "the sign bit, the first one, is ignored": e4m3_by(sign=False),
            "E4M3 has no infinity: exponent field 15 is an ordinary one, up to 448": e4m3_by(top=math.inf),
            "these are E5M2's fields: E4M3 has 4 bits of exponent and 3 of mantissa": lambda code: (
                torch.tensor([code], dtype=torch.uint8).view(torch.float8_e5m2).item()
            ),
        },
        name_case=lambda code: f"decode_byte(0b{code >> 7}_{(code >> 3) & 15:04b}_{code & 7:03b})",
    )


@exercise(
    "01",
    outcome="1.3",
    hints=(
        "amax is the largest *magnitude*: the largest number of x.abs().",
        "scale = fp8_max / amax. Dividing by an amax of 0 gives nothing useful, so that case is asked for first.",
    ),
)
def scale_from_amax(answer, generator):
    tensors = [torch.tensor([0.5, -2.0, 1.0]), torch.tensor([3.0, 1.0]), torch.zeros(3)]
    tensors += [
        normal(generator, 4) * 2.0**power * torch.tensor([1, 1, 1, -9]) for power in integers(generator, -20, 10, 6)
    ]
    maxima = [formats.E4M3.max, formats.E4M3.max, formats.E5M2.max, *[formats.E4M3.max, formats.E5M2.max] * 3]
    compare(
        answer,
        list(zip(tensors, maxima, strict=True)),
        lambda x, top: top / max(map(abs, x.tolist())) if x.any() else 1.0,
        {
            "amax is the largest magnitude, and numbers can be negative: x.abs() first": lambda x, top: (
                top / x.max().item() if x.any() else 1.0
            ),
            "it is upside down: multiplied by the scale, amax has to land on fp8_max": lambda x, top: (
                x.abs().max().item() / top if x.any() else 1.0
            ),
            "a tensor of zeros has no amax to scale by: its scale is to be 1": lambda x, top: top / x.abs().max(),
            "the scale goes by the largest magnitude, not by the mean": lambda x, top: (
                top / x.abs().mean().item() if x.any() else 1.0
            ),
        },
        tolerance=1e-5,
    )


@exercise(
    "01",
    outcome="1.3",
    deeper=True,
    hints=(
        "Give the blocks a dimension of their own: x.view(rows, columns // 128, 128).",
        "The amax of each block is .abs().amax(dim=2); the scale follows from it as for a whole tensor.",
    ),
)
def block_scales(answer, generator):
    shapes = zip(integers(generator, 2, 4, 4), integers(generator, 2, 4, 4), strict=True)
    tensors = [normal(generator, rows, 128 * blocks) for rows, blocks in [(1, 2), (2, 3), *shapes]]
    for x in tensors:
        x[0, 0] = -100.0  # an outlier
    compare(
        answer,
        [(x, formats.E4M3.max) for x in tensors],
        lambda x, top: torch.stack(
            [
                torch.stack([top / block.abs().max() for block in columns.split(128)])
                for columns in x  # one row
            ]
        ),
        {
            "this is one scale for the whole tensor": lambda x, top: top / x.abs().max(),
            "this is the same scale for every block: each has an amax of its own": lambda x, top: (
                top / x.abs().max()
            ).expand(x.shape[0], x.shape[1] // 128),
            "this is one scale for each row: a row has several blocks of 128": lambda x, top: (
                top / x.abs().amax(1, keepdim=True).expand(-1, x.shape[1] // 128)
            ),
            "these are the amaxes: the scale is fp8_max / amax": lambda x, top: (
                x.view(x.shape[0], -1, 128).abs().amax(2)
            ),
            "the magnitudes count, and numbers can be negative: .abs() first": lambda x, top: (
                top / x.view(x.shape[0], -1, 128).amax(2)
            ),
            "every 128th number is not a block: a block is 128 neighbours in a row": lambda x, top: (
                top / x.view(x.shape[0], 128, -1).abs().amax(1)
            ),
        },
        tolerance=1e-5,
    )


@exercise(
    "01",
    outcome="1.4",
    deeper=True,
    hints=(
        "Write both times down: 2 n³ / rate for a product, and for FP8 in addition 2 n² numbers to cast. Where are they equal?",
        "Divide by 2 n²: n / bf16_rate = n / fp8_rate + cast_seconds. If FP8's rate is no higher, no n does it: math.inf.",
    ),
)
def break_even_size(answer, generator):
    rates = uniform(generator, 1e14, 8e14, 6)
    gains = [2.0, 1.5, 0.9, 1.0, *uniform(generator, 1.1, 2.0, 2)]
    casts = uniform(generator, 1e-13, 5e-12, 6)
    cases = [(bf16, bf16 * gain, cast) for bf16, gain, cast in zip(rates, gains, casts, strict=True)]

    def expected(bf16, fp8, cast):
        """By bisection on the two times."""
        if not any(2 * n**3 / fp8 + 2 * n**2 * cast < 2 * n**3 / bf16 for n in (10.0**k for k in range(13))):
            return math.inf
        low, high = 0.0, 1e12
        for _ in range(200):
            n = (low + high) / 2
            faster = 2 * n**3 / fp8 + 2 * n**2 * cast < 2 * n**3 / bf16
            low, high = (low, n) if faster else (n, high)
        return high

    def unless_slower(formula):
        return lambda bf16, fp8, cast: formula(bf16, fp8, cast) if fp8 > bf16 else math.inf

    compare(
        answer,
        cases,
        expected,
        {
            "FP8 that multiplies no faster never pays: math.inf": lambda bf16, fp8, cast: (
                cast / (1 / bf16 - 1 / fp8) if fp8 != bf16 else NotImplemented
            ),
            "two operands of n² numbers are cast, against 2 n³ operations": unless_slower(
                lambda bf16, fp8, cast: cast / 2 / (1 / bf16 - 1 / fp8)
            ),
            "a product takes 2 n³ operations, not n³": unless_slower(
                lambda bf16, fp8, cast: 2 * cast / (1 / bf16 - 1 / fp8)
            ),
            "seconds are operations *divided* by the rate": unless_slower(lambda bf16, fp8, cast: cast * (fp8 - bf16)),
            "FP8's multiplication takes time, too: only the difference pays for the cast": unless_slower(
                lambda bf16, fp8, cast: cast * bf16
            ),
        },
        tolerance=1e-5,
    )
