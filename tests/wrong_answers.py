"""For each exercise, answers that a reader may well give, and what the check has to say about each."""

import math

import torch
import torch.nn.functional as F

from helpers import formats, fp8_state


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


def no_sign_and_no_subnormals(code):
    _, e, m = fields(code)
    return 2.0 ** (e - 7) * (1 + m / 8)


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


def block_weights(d, ffn):
    return 4 * d * d + 2 * d * ffn


def block_parameters(d, ffn):
    return block_weights(d, ffn) + 5 * d + ffn + 4 * d


def moves(model, tokens, row, seen, least=1e-6):
    changed = tokens.clone()
    changed[row] = (changed[row] + 1) % 96
    return bool(((model(changed) - model(tokens)).abs()[seen] > least).any())


def in_place(model, tokens):
    changed = tokens
    changed[0] = (changed[0] + 1) % 96
    return bool((model(changed)[1:] != model(tokens)[1:]).any())


def beyond_the_vocabulary(model, tokens):
    changed = tokens.clone()
    changed[0] += 1
    return bool((model(changed)[1:] != model(tokens)[1:]).any())


def mean_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def no_region(model, optimizer, autocast, inputs, targets):
    loss = mean_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def all_in_the_region(model, optimizer, autocast, inputs, targets):
    with autocast():
        loss = mean_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.detach()


def backward_in_the_region(model, optimizer, autocast, inputs, targets):
    optimizer.zero_grad()
    with autocast():
        logits = model(inputs)
        loss = torch.nn.functional.nll_loss(logits.flatten(0, 1).log_softmax(1), targets.flatten())
        loss.backward()
    optimizer.step()
    return loss.detach()


def gradients_add_up(model, optimizer, autocast, inputs, targets):
    with autocast():
        logits = model(inputs)
    loss = mean_loss(logits, targets)
    loss.backward()
    optimizer.step()
    return loss.detach()


def cleared_too_late(model, optimizer, autocast, inputs, targets):
    with autocast():
        logits = model(inputs)
    loss = mean_loss(logits, targets)
    loss.backward()
    optimizer.zero_grad()
    optimizer.step()
    return loss.detach()


def step_too_early(model, optimizer, autocast, inputs, targets):
    with autocast():
        logits = model(inputs)
    loss = mean_loss(logits, targets)
    optimizer.step()
    loss.backward()
    return loss.detach()


def returns_item(model, optimizer, autocast, inputs, targets):
    with autocast():
        logits = model(inputs)
    loss = mean_loss(logits, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def keeps_the_graph(model, optimizer, autocast, inputs, targets):
    with autocast():
        logits = model(inputs)
    loss = mean_loss(logits, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def two_forwards(model, optimizer, autocast, inputs, targets):
    with autocast():
        logits = model(inputs)
        logits = model(inputs)
    return mean_loss(logits, targets)


def differing(*fields):
    return lambda a, b: {field for field in fields if a[field] != b[field]}


def first_rival_only(a, b):
    found = differing("mask", "dropout", "tokens")(a, b)
    if not a["warm-up"]:
        found.add("warm-up")
    if not a["waits"]:
        found.add("waits")
    return found


def precision_too(a, b):
    return first_rival_only(a, b) | first_rival_only(b, a) | differing("precision")(a, b)


def largest_of(column):
    return lambda state: state["layer"][state[column].idxmax()]


def share(state):
    return state["scale"] * state["amax max"] / state["format"].map({"E4M3": 448, "E5M2": 57344})


def one_format(state):
    off = (state["scale"] * state["amax max"] / 448).map(lambda s: max(s, 1 / s))
    return state["layer"][off.idxmax()]


def with_gradients(model, tokens, autocast):
    with autocast():
        return model(tokens)


@torch.no_grad()
def without_autocast(model, tokens, autocast):
    return model(tokens)


@torch.no_grad()
def without_the_state(model, tokens, autocast):
    with autocast():
        return model(tokens)


@torch.no_grad()
def saved_without_clone(model, tokens, autocast):
    before = fp8_state.delayed_state(model)
    with autocast():
        logits = model(tokens)
    fp8_state.load_delayed_state(model, before)
    return logits


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
        (lambda bf16, fp8, cast: cast / (1 / bf16 - 1 / fp8) if bf16 != fp8 else 0.0, "never pays"),
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
    "parameters_and_flops": [
        (lambda d, f, n, t: (n * block_parameters(d, f), 2 * t * n * block_weights(d, f)), "forward pass"),
        (lambda d, f, n, t: (n * block_weights(d, f), 6 * t * n * block_weights(d, f)), "not the expected one"),
        (
            lambda d, f, n, t: (n * (block_weights(d, f) + 5 * d + f), 6 * t * n * block_weights(d, f)),
            "LayerNorms are missing",
        ),
        (lambda d, f, n, t: (block_parameters(d, f), 6 * t * block_weights(d, f)), "number of layers"),
        (lambda d, f, n, t: (n * (12 * d * d + 13 * d), 72 * t * n * d * d), "need not be 4 d"),
        (lambda d, f, n, t: n * block_parameters(d, f), "2 things"),
    ],
    "leaks_across_batch": [
        (lambda model, tokens: moves(model, tokens, 0, slice(None)), "row 0 is the one that was changed"),
        (lambda model, tokens: moves(model, tokens, -1, slice(0, -1)), "hides *later* rows"),
        (lambda model, tokens: not moves(model, tokens, 0, slice(1, None)), "wrong way round"),
        (lambda model, tokens: moves(model, tokens, 0, slice(1, None), least=0.01), "faint leak"),
        (in_place, "x.clone()"),
        (beyond_the_vocabulary, "IndexError"),
    ],
    "interleave_qkv": [
        (lambda q, k, v, heads: torch.cat([q, k, v]), "*not* interleaved"),
        (lambda q, k, v, heads: torch.stack([q, k, v], dim=1).reshape(-1, q.shape[1]), "row by row"),
        (lambda q, k, v, heads: torch.cat([q, k, v], dim=1), "side by side as columns"),
        (
            lambda q, k, v, heads: torch.cat([w[h::heads] for h in range(heads) for w in (q, k, v)]),
            "every heads-th one",
        ),
    ],
    "training_bytes": [
        (lambda p, n, hopper: 12 * p + n + n * hopper, "gradients are missing"),
        (lambda p, n, hopper: 16 * p, "copies are missing"),
        (lambda p, n, hopper: 16 * p + n, "transpose is kept as well"),
        (lambda p, n, hopper: 16 * (p - n) + 13 * n + n * hopper, "does not replace"),
    ],
    "train_step": [
        (no_region, "outside of `with autocast():`"),
        (all_in_the_region, "loss is computed inside"),
        (backward_in_the_region, "backward runs inside"),
        (gradients_add_up, "were not cleared"),
        (cleared_too_late, "between backward and step"),
        (step_too_early, "backward first"),
        (returns_item, ".item()"),
        (keeps_the_graph, "loss.detach()"),
        (two_forwards, "called 2 times"),
    ],
    "unfair_because": [
        (differing("precision", "library", "mask", "dropout", "tokens", "warm-up", "waits"), "not every difference"),
        (differing("mask", "dropout", "tokens", "warm-up", "waits"), "not about being equal"),
        (differing("mask", "dropout", "tokens"), "have to be looked at, too"),
        (first_rival_only, "not for the first alone"),
        (precision_too, "precision may differ"),
        (lambda a, b: a["mask"] != b["mask"], "return a set"),
    ],
    "underflow_share": [
        (lambda x, s: (((x * s).abs() < 2**-9) & (x != 0)).sum().item() / (x != 0).sum().item(), "from half of it on"),
        (lambda x, s: (((x * s).abs() < 2**-10) & (x != 0)).sum().item() / (x != 0).sum().item(), "a tie"),
        (lambda x, s: ((x * s).abs() <= 2**-10).float().mean(), "zeros are not lost"),
        (lambda x, s: (((x / s).abs() <= 2**-10) & (x != 0)).sum() / (x != 0).sum(), "multiplies before rounding"),
        (lambda x, s: ((x * s <= 2**-10) & (x != 0)).sum() / (x != 0).sum(), "can be negative"),
    ],
    "step_speedup": [
        (lambda share, gain, casts: gain, "not the whole step"),
        (lambda share, gain, casts: 1 - share + share / gain + casts, "new time"),
        (lambda share, gain, casts: 1 / (1 - share + share / gain), "casts are missing"),
        (lambda share, gain, casts: 1 - share + share * gain - casts, "speeds do not"),
    ],
    "next_tokens": [
        (lambda logits, lengths: logits[:, -1].argmax(-1), "last position is padding"),
        (lambda logits, lengths: logits[:, lengths[0] - 1].argmax(-1), "its own position"),
        (lambda logits, lengths: logits[range(len(logits)), lengths - 1], "these are the logits"),
        (
            lambda logits, lengths: logits[range(len(logits)), lengths.clamp(max=logits.shape[1] - 1)].argmax(-1),
            "positions count from 0",
        ),
        (lambda logits, lengths: logits[:, lengths - 1].argmax(-1), "the shape"),
    ],
    "sabotaged_layer": [
        (largest_of("scale"), "a large scale is no fault"),
        (lambda state: state["layer"][state["scale"].idxmin()], "a small scale is no fault"),
        (lambda state: state["layer"][share(state).idxmax()], "too small as well"),
        (lambda state: state["layer"][share(state).idxmin()], "too large as well"),
        (one_format, "57344"),
        (lambda state: state, "return a str"),
    ],
    "evaluate_quietly": [
        (with_gradients, "counted as a training step"),
        (without_autocast, "outside of `with autocast():`"),
        (without_the_state, "staging row"),
        (lambda *arguments: without_the_state(*arguments).argmax(-1), "return the model's logits"),
    ],
    "weight_bytes": [
        (lambda n, others, training: n + 2 * others, "needs the transpose as well"),
        (lambda n, others, training: 2 * n + 2 * others, "one copy is enough"),
        (lambda n, others, training: n + n * training + others, "stay in BF16: 2 bytes"),
        (lambda n, others, training: 2 * (n + n * training + others), "one byte"),
    ],
}
