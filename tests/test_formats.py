"""The four number formats, against their definitions and against rounding done here by brute force."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.formats import E2M1, E4M3, E5M2, E8M0, FORMATS, decode, encode, quantize, spacing, split_bits, values

SIGNED = [E4M3, E5M2, E2M1]


def codes(fmt):
    return torch.arange(2**fmt.bits, dtype=torch.uint8)


def value_by_definition(code: int, fmt) -> float:
    """A code's value from its bit fields, as the module's docstring states it."""
    sign, exponent, mantissa = (int(bits, 2) if bits else 0 for bits in split_bits(code, fmt))
    if fmt is E8M0:
        return math.nan if code == 255 else 2.0 ** (exponent - 127)
    if fmt is E4M3 and (exponent, mantissa) == (15, 7):
        return math.nan
    if fmt is E5M2 and exponent == 31:
        return math.nan if mantissa else math.copysign(math.inf, -sign)
    fraction = mantissa / 2**fmt.mantissa_bits
    magnitude = 2.0 ** (exponent - fmt.bias) * (1 + fraction) if exponent else 2.0 ** (1 - fmt.bias) * fraction
    return math.copysign(magnitude, -sign if sign else 1)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_every_code(fmt):
    expected = torch.tensor([value_by_definition(int(c), fmt) for c in codes(fmt)])
    found = decode(codes(fmt), fmt)
    assert torch.equal(found.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))
    number, finite = ~found.isnan(), found.isfinite()
    assert torch.equal(found[number].signbit(), expected[number].signbit())
    assert torch.equal(encode(found[finite], fmt), codes(fmt)[finite])


@pytest.mark.parametrize(
    ("fmt", "count", "largest", "smallest_normal", "smallest"),
    [(E4M3, 253, 448, 2**-6, 2**-9), (E5M2, 247, 57344, 2**-14, 2**-16), (E2M1, 15, 6, 1, 0.5), (E8M0, 255, 2.0**127, 2.0**-127, 2.0**-127)],
    ids=["E4M3", "E5M2", "E2M1", "E8M0"],
)  # fmt: skip
def test_range(fmt, count, largest, smallest_normal, smallest):
    every = values(fmt)
    assert len(every) == count
    assert every[-1] == fmt.max == largest
    assert every[every > 0][0] == fmt.min_subnormal == smallest
    assert fmt.min_normal == smallest_normal
    assert fmt.min_normal in every


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_spacing_is_the_distance_to_the_next_value(fmt):
    positive = values(fmt)[values(fmt) >= (0 if fmt.signed else fmt.min_normal)]
    assert torch.equal(spacing(positive[:-1], fmt), positive.diff())
    assert spacing(1e30, fmt) == (spacing(fmt.max, fmt) if fmt is not E8M0 else 2.0**99)


def nearest(x: float, fmt) -> float:
    """The nearest value, of two equally near ones that with the even code: rounding without any float8 cast."""
    if fmt is E8M0:
        x = min(max(x, fmt.min_normal), fmt.max)
        below = 2.0 ** math.floor(math.log2(x))
        return below if x < 1.5 * below else min(2 * below, fmt.max)
    finite = [(v, c) for c, v in enumerate(decode(codes(fmt), fmt).tolist()) if math.isfinite(v)]
    return min(finite, key=lambda pair: (abs(pair[0] - x), pair[1] % 2))[0]


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_quantize_rounds_to_the_nearest_and_ties_to_even(fmt):
    generator = torch.Generator().manual_seed(0)
    every = values(fmt)
    middles = ((every[1:].double() + every[:-1].double()) / 2).float()
    scales = 10.0 ** torch.randint(-6, 6, (400,), generator=generator)
    x = torch.cat([every, middles, torch.randn(400, generator=generator) * scales])
    x = x if fmt.signed else x.abs().clamp(min=2.0**-126)
    expected = torch.tensor([nearest(v, fmt) for v in x.tolist()])
    assert torch.equal(quantize(x, fmt), expected)


@pytest.mark.parametrize("fmt", SIGNED, ids=lambda f: f.name)
def test_special_values(fmt):
    x = torch.tensor([math.inf, -math.inf, 1e38, -1e38, 0.0, -0.0, 1e-40, math.nan])
    found = quantize(x, fmt)
    assert found[:7].tolist() == [fmt.max, -fmt.max, fmt.max, -fmt.max, 0, 0, 0]
    assert found[:7].signbit().tolist() == [False, True, False, True, False, True, False]
    assert found[7].isnan()
    assert decode(encode(x, fmt), fmt)[7].isnan() or fmt is E2M1  # whose NaN, having no code, becomes 6


@settings(max_examples=60, deadline=None)
@given(
    fmt=st.sampled_from(SIGNED),
    shape=st.lists(st.integers(0, 6), min_size=0, max_size=3),
    exponent=st.integers(-12, 12),
    special=st.sampled_from([0.0, math.inf, -math.inf, math.nan, 448.0, 464.0, 57344.0, 2.0**-10]),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_quantize_properties(fmt, shape, exponent, special, seed, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent
    if x.numel():
        x.view(-1)[seed % x.numel()] = special
    x = x.to(dtype)
    q = quantize(x, fmt)
    assert q.shape == x.shape
    assert q.dtype == torch.float32
    assert torch.equal(q.isnan(), x.isnan())
    number = ~x.isnan()
    assert torch.equal(quantize(q, fmt)[number], q[number])  # idempotent
    assert torch.equal(quantize(-x, fmt)[number], -q[number])  # odd
    assert (q[number].abs() <= fmt.max).all()
    assert torch.isin(q[number], values(fmt)).all()
    order = x[number].float().argsort()
    assert (q[number][order].diff() >= 0).all()  # monotone
    inside = number & (x.abs() <= fmt.max)
    assert ((q - x.float()).abs()[inside] <= spacing(x, fmt)[inside] / 2).all()


@pytest.mark.parametrize("call", [quantize, encode, spacing])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool])
def test_other_dtypes_are_refused(call, dtype):
    with pytest.raises(ValueError, match=f"{dtype}.*allowed are float32"):
        call(torch.ones(3, dtype=dtype), E4M3)


def test_bad_codes_are_refused():
    with pytest.raises(ValueError, match=r"got codes of torch\.int64"):
        decode(torch.arange(3), E4M3)
    with pytest.raises(ValueError, match="got code 16; E2M1 has 4 bits"):
        decode(torch.tensor([16], dtype=torch.uint8), E2M1)
    with pytest.raises(ValueError, match="got code 256; E4M3 has 8 bits"):
        split_bits(256, E4M3)
    with pytest.raises(ValueError, match="E8M0, which has no sign"):
        quantize(-1.0, E8M0)


def test_split_bits():
    assert split_bits(int(encode(-448.0, E4M3)), E4M3) == ("1", "1111", "110")
    assert split_bits(int(encode(1.5, E5M2)), E5M2) == ("0", "01111", "10")
    assert split_bits(int(encode(6.0, E2M1)), E2M1) == ("0", "11", "1")
    assert split_bits(int(encode(2.0, E8M0)), E8M0) == ("", "10000000", "")
