"""For each exercise, answers that a reader may well give, and what the check has to say about each."""

import math

import torch

from helpers import formats


def fields(code):
    return code >> 7, (code >> 3) & 15, code & 7


def no_bias(code):
    s, e, m = fields(code)
    return (-1) ** s * (2.0**-6 * m / 8 if e == 0 else 2.0**e * (1 + m / 8))


def no_subnormals(code):
    s, e, m = fields(code)
    return (-1) ** s * 2.0 ** (e - 7) * (1 + m / 8)


def no_sign(code):
    _, e, m = fields(code)
    return 2.0**-6 * m / 8 if e == 0 else 2.0 ** (e - 7) * (1 + m / 8)


def no_leading_one(code):
    s, e, m = fields(code)
    return (-1) ** s * (2.0**-6 * m / 8 if e == 0 else 2.0 ** (e - 7) * m / 8)


def with_infinity(code):
    s, e, m = fields(code)
    return (-1) ** s * (math.inf if e == 15 else 2.0**-6 * m / 8 if e == 0 else 2.0 ** (e - 7) * (1 + m / 8))


def shifted_first(history, scale, fp8_max, margin):
    history = history.roll(-1)
    staged, history[0] = history[-1].clone(), 0
    amax = max(history.max(), staged)
    if 0 < amax < math.inf:
        scale = fp8_max / amax / 2**margin
    return history, scale


def newest_only(history, scale, fp8_max, margin):
    amax = history[0].clone()
    if 0 < amax < math.inf:
        scale = fp8_max / amax / 2**margin
    history = history.roll(-1)
    history[0] = 0
    return history, scale


def no_care(history, scale, fp8_max, margin):
    amax = history.max()
    history = history.roll(-1)
    history[0] = 0
    return history, fp8_max / amax / 2**margin


def not_cleared(history, scale, fp8_max, margin):
    amax = history.max()
    return history.roll(-1), fp8_max / amax / 2**margin if 0 < amax < math.inf else scale


def margin_up(history, scale, fp8_max, margin):
    amax = history.max()
    history = history.roll(-1)
    history[0] = 0
    return history, fp8_max * 2**margin / amax if 0 < amax < math.inf else scale


def rounded(t):
    return formats.quantize(t, formats.E4M3)


def any_earlier(amaxes, length):
    return [t for t in range(1, len(amaxes)) if amaxes[t] > max(amaxes[:t])]


def ties_too(amaxes, length):
    return [t for t in range(1, len(amaxes)) if amaxes[t] >= max(amaxes[max(0, t - length) : t])]


def first_step_too(amaxes, length):
    found = []
    for t, amax in enumerate(amaxes):
        known = amaxes[max(0, t - length) : t]
        if not known or amax > max(known):
            found.append(t)
    return found


# name -> [(answer, words of the message)]
WRONG = {
    "decode_byte": [
        (no_bias, "bias is missing"),
        (no_subnormals, "no leading 1"),
        (no_sign, "sign bit"),
        (no_leading_one, "leading 1 is missing"),
        (with_infinity, "no infinity"),
        (lambda code: 0.3125, "not the expected one"),
        (lambda code: None, "returns nothing"),
    ],
    "scale_from_amax": [
        (lambda x, top: top / x.max().item() if x.any() else 1.0, "x.abs() first"),
        (lambda x, top: x.abs().max().item() / top if x.any() else 1.0, "upside down"),
        (lambda x, top: top / x.abs().max(), "tensor of zeros"),
        (lambda x, top: top / x.abs(), "one number"),
    ],
    "block_scales": [
        (lambda x, top: top / x.abs().max(), "for the whole tensor"),
        (lambda x, top: top / x.unflatten(1, (-1, 128)).amax(2), "can be negative"),
        (lambda x, top: x.unflatten(1, (-1, 128)).abs().amax(2), "these are the amaxes"),
        (lambda x, top: top / x.unflatten(1, (128, -1)).abs().amax(1), "128 neighbours"),
        (lambda x, top: top / x.abs().amax(1), "shape"),
    ],
    "break_even_size": [
        (lambda bf16, fp8, cast: cast / (1 / bf16 - 1 / fp8) if bf16 != fp8 else 0.0, "not the expected one"),
        (lambda bf16, fp8, cast: math.inf if fp8 <= bf16 else 0.5 * cast / (1 / bf16 - 1 / fp8), "two operands"),
        (lambda bf16, fp8, cast: math.inf if fp8 <= bf16 else 2 * cast / (1 / bf16 - 1 / fp8), "2 n³ operations"),
        (lambda bf16, fp8, cast: math.inf if fp8 <= bf16 else cast * (fp8 - bf16), "*divided* by the rate"),
    ],
    "delayed_update": [
        (shifted_first, "first the maximum, then the shift"),
        (newest_only, "only row 0"),
        (no_care, "0 or infinity"),
        (not_cleared, "not set to zero"),
        (margin_up, "*divided* by 2**margin"),
        (lambda history, scale, fp8_max, margin: scale, "2 things"),
    ],
    "legal_shape": [
        (lambda r, f, training: ((r + 15) // 16 * 16, (f + 15) // 16 * 16), "multiples of 8 are enough"),
        (lambda r, f, training: ((r + 7) // 8 * 8, (f + 15) // 16 * 16), "wgrad"),
        (lambda r, f, training: (r + 8 + 8 * training - r % (8 + 8 * training), f + 16 - f % 16), "legal already"),
        (lambda r, f, training: (r // (8 + 8 * training) * (8 + 8 * training), f // 16 * 16), "rounds down"),
    ],
    "fp8_linear": [
        (lambda x, w, b, sx, sw: rounded(x * sx) @ rounded(w * sw).T + b, "not undone"),
        (lambda x, w, b, sx, sw: (rounded(x * sx) @ rounded(w * sw).T + b) / (sx * sw), "after dividing"),
        (lambda x, w, b, sx, sw: torch.nn.functional.linear(x, w, b), "nothing was rounded"),
        (lambda x, w, b, sx, sw: rounded(x * sx) @ rounded(w * sw).T / sx + b, "only x's scale"),
        (lambda x, w, b, sx, sw: rounded(x * sx) @ rounded(w * sw) / sx / sw + b, "RuntimeError"),
    ],
    "clipped_steps": [
        (lambda a, n: [t for t in range(1, len(a)) if a[t] > a[t - 1]], "only the step before"),
        (any_earlier, "forgets"),
        (ties_too, "fits exactly"),
        (first_step_too, "step 0"),
        (lambda a, n: sum(a[t] > max(a[max(0, t - n) : t]) for t in range(1, len(a))), "list"),
    ],
}
