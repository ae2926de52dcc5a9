"""One answer to each exercise, shown by `solution.name()`. Tests run them through the checks, and mutants of them."""

import math

import torch
import torch.nn.functional as F

from helpers import formats, fp8_state

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


# ------------------------------------------------------------------------------------------------ 03


def parameters_and_flops(d, ffn, layers, tokens):
    weights = 4 * d * d + 2 * d * ffn  # qkv 3 and proj 1; fc1 and fc2
    biases = 3 * d + d + ffn + d
    norms = 4 * d  # two of 2 d
    return layers * (weights + biases + norms), 6 * tokens * layers * weights


def leaks_across_batch(model, tokens):
    changed = tokens.clone()
    changed[0] = (changed[0] + 1) % 96  # row 0: the one that all others may see
    with torch.no_grad():
        moved = (model(changed) - model(tokens)).abs()
    return bool((moved[1:] > 1e-6).any())


def interleave_qkv(q, k, v, heads):
    split = [weight.unflatten(0, (heads, -1)) for weight in (q, k, v)]  # (heads, rows of a head, d) each
    return torch.stack(split, dim=1).flatten(0, 2)


def training_bytes(parameters, in_products, hopper):
    states = 4 * 4 * parameters  # weight, gradient and two moments, 4 bytes each
    return states + (2 if hopper else 1) * in_products


# ------------------------------------------------------------------------------------------------ 04


def train_step(model, optimizer, autocast, inputs, targets):
    with autocast():
        logits = model(inputs)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss.detach()


def unfair_because(a, b):
    reasons = {field for field in ("mask", "dropout", "tokens") if a[field] != b[field]}
    for rival in (a, b):
        if rival["warm-up"] == 0:
            reasons.add("warm-up")
        if not rival["waits"]:
            reasons.add("waits")
    return reasons


def underflow_share(x, scale):
    nonzero = x != 0
    lost = nonzero & ((x * scale).abs() <= 2.0**-10)  # half of the smallest number; a tie goes to zero, the even one
    return (lost.sum() / nonzero.sum()).item()


def step_speedup(share, gain, casts):
    return 1 / (1 - share + share / gain + casts)


# ------------------------------------------------------------------------------------------------ 05


def next_tokens(logits, lengths):
    rows = torch.arange(len(lengths))
    return logits[rows, lengths - 1].argmax(dim=-1)


def sabotaged_layer(state):
    largest = state["format"].map({"E4M3": 448.0, "E5M2": 57344.0})
    share = state["scale"] * state["amax max"] / largest  # of the range: near 1 where the scale fits
    off = share.where(share > 1, 1 / share)
    return state["layer"][off.idxmax()]


@torch.no_grad()
def evaluate_quietly(model, tokens, autocast):
    before = {name: tensor.clone() for name, tensor in fp8_state.delayed_state(model).items()}
    with autocast():
        logits = model(tokens)
    fp8_state.load_delayed_state(model, before)
    return logits


def weight_bytes(in_products, others, training):
    copies = 2 if training else 1  # on Hopper the backward pass needs the transpose, too
    return copies * in_products + 2 * others
