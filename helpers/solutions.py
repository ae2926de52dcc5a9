"""One answer to each exercise, shown by `solution.name()`. Tests run them through the checks, and mutants of them."""

import math

from helpers import formats

# ------------------------------------------------------------------------------------------------ 01


def decode_byte(code):
    sign = -1.0 if code >= 128 else 1.0
    exponent = (code >> 3) & 0b1111
    fraction = (code & 0b111) / 8
    if exponent == 0:  # subnormal: no leading 1, and the exponent of the smallest normal numbers
        return sign * 2.0**-6 * fraction
    return sign * 2.0 ** (exponent - 7) * (1 + fraction)


def scale_from_amax(x, fp8_max):
    amax = x.abs().max().item()
    return fp8_max / amax if amax > 0 else 1.0


def block_scales(x, fp8_max):
    blocks = x.view(x.shape[0], -1, 128)
    return fp8_max / blocks.abs().amax(dim=2)


def break_even_size(bf16_rate, fp8_rate, cast_seconds):
    # 2 n³ / bf16_rate = 2 n³ / fp8_rate + 2 n² cast_seconds, divided by 2 n²
    if fp8_rate <= bf16_rate:
        return math.inf
    return cast_seconds / (1 / bf16_rate - 1 / fp8_rate)


# ------------------------------------------------------------------------------------------------ 02


def delayed_update(history, scale, fp8_max, margin):
    amax = history.max()
    if amax > 0 and amax.isfinite():
        scale = fp8_max / amax / 2**margin
    history = history.roll(-1)
    history[0] = 0
    return history, scale


def legal_shape(rows, features, training):
    multiple = 16 if training else 8
    return -(-rows // multiple) * multiple, -(-features // 16) * 16


def fp8_linear(x, w, bias, scale_x, scale_w):
    x8 = formats.quantize(x * scale_x, formats.E4M3)
    w8 = formats.quantize(w * scale_w, formats.E4M3)
    return x8 @ w8.T / (scale_x * scale_w) + bias


def clipped_steps(amaxes, length):
    return [step for step in range(1, len(amaxes)) if amaxes[step] > max(amaxes[max(0, step - length) : step])]
