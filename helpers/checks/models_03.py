"""Notebook 03: parameters and FLOPs, the leak test, the order of q, k and v, memory."""

import torch
from torch import nn

from helpers.checks.registry import exercise, integers, normal
from helpers.grading import compare


def count(weights=4, biases=5, norms=4, flops=6, mlp=2, counted=lambda w, b: w):
    """parameters_and_flops with one part exchanged."""

    def formula(d, ffn, layers, tokens):
        w = weights * d * d + mlp * d * ffn
        b = biases * d + (ffn if biases else 0)
        return layers * (w + b + norms * d), flops * tokens * layers * counted(w, b)

    return formula


@exercise(
    "03",
    outcome="3.3",
    hints=(
        "Weights that multiply, in one layer: qkv 3 d², proj d², fc1 d·ffn, fc2 ffn·d. Biases: one number an output. "
        "LayerNorms: two, of 2 d each.",
        "FLOPs: 2 a weight and token forward and 4 backward, 6 in all; biases and LayerNorms do not count. Everything times `layers`.",
    ),
)
def parameters_and_flops(answer, generator):
    cases = [(64, 256, 1, 1), (64, 100, 2, 32)]
    drawn = [integers(generator, low, high, 6) for low, high in ((8, 300), (8, 900), (1, 9), (1, 5000))]
    cases += list(zip(*drawn, strict=True))

    def expected(d, ffn, layers, tokens):
        """By counting real modules, which take no memory on the meta device."""
        with torch.device("meta"):
            linears = [nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Linear(d, ffn), nn.Linear(ffn, d)]
            block = nn.ModuleList([*linears, nn.LayerNorm(d), nn.LayerNorm(d)])
        flops = sum(2 * 3 * tokens * linear.weight.numel() for linear in linears)
        return layers * sum(p.numel() for p in block.parameters()), layers * flops

    compare(
        answer,
        cases,
        expected,
        {
            "2 FLOPs a weight and token are the forward pass: the backward takes 4 more": count(flops=2),
            "4 FLOPs a weight and token are the backward pass: the forward takes 2 more": count(flops=4),
            "each gradient is a product of its own: the backward takes 4 FLOPs a weight and token, not 2": count(
                flops=4
            ),
            "a multiplication and an addition are 2 FLOPs, so a step takes 6 a weight and token": count(flops=3),
            "biases take part in no product: they do not count as FLOPs": count(counted=lambda w, b: w + b),
            "the biases are missing among the parameters": count(biases=0),
            "the LayerNorms are missing among the parameters: two of 2 d each": count(norms=0),
            "there are two LayerNorms, with 2 d parameters each": count(norms=2),
            "qkv is three matrices of d², and proj a fourth": count(weights=2),
            "proj is missing: d² more": count(weights=3, biases=4),
            "the MLP has two matrices, fc1 and fc2": count(mlp=1),
            "it is not multiplied by the number of layers": lambda d, ffn, layers, tokens: count()(d, ffn, 1, tokens),
            "the hidden width is ffn, which need not be 4 d": lambda d, ffn, layers, tokens: count()(
                d, 4 * d, layers, tokens
            ),
        },
    )


@exercise(
    "03",
    outcome="3.2",
    hints=(
        "Run the model on `tokens` and on a clone in which row 0 holds other tokens (still 0 to 95). Which logits differ?",
        "Only rows 1 and later count, as in (a - b)[1:].abs(). Rounding may move a bit, so ask for more than 1e-6.",
    ),
)
def leaks_across_batch(answer, generator):
    table, head = normal(generator, 96, 8), normal(generator, 8, 96)

    def separate_rows(tokens):
        return table[tokens].cumsum(1) @ head

    def attends_across_the_batch(tokens):  # the trap: causal, but over the batch
        return table[tokens].cumsum(0) @ head

    def normalizes_over_the_batch(tokens):
        x = table[tokens].cumsum(1)
        return (x - x.mean(0)) @ head

    def leaks_faintly(tokens):
        return separate_rows(tokens) + 1e-4 * attends_across_the_batch(tokens)

    def lowers_the_next_row(tokens):  # nothing but decreases, and nothing beyond one row
        logits = separate_rows(tokens)
        logits[1:] -= 0.01 * tokens[:-1, :, None]
        return logits

    leaking = [attends_across_the_batch, normalizes_over_the_batch, leaks_faintly, lowers_the_next_row]
    models = [separate_rows, *leaking, separate_rows]
    cases = []
    for model in models:
        tokens = torch.randint(95, (4, 8), generator=generator)
        tokens[0, 0] = 94 if model is lowers_the_next_row else 95
        cases.append((model, tokens))

    def moved(model, tokens, row=0):
        changed = tokens.clone()
        changed[row] = (changed[row] + 1) % 96
        return (model(changed) - model(tokens)).abs()

    compare(
        answer,
        cases,
        lambda model, tokens: model is not separate_rows,
        {
            "row 0 is the one that was changed, so it may move: look at the other rows": lambda *case: True,
            "it is the wrong way round: True means that there is a leak": lambda model, _: model is separate_rows,
            "a causal mask over the batch hides *later* rows from earlier ones: change row 0, which all others see": (
                lambda model, tokens: bool((moved(model, tokens, -1)[:-1] > 1e-6).any())
            ),
            "a faint leak is a leak: allow no more than rounding, such as 1e-6": (
                lambda model, _: model not in (separate_rows, leaks_faintly)
            ),
        },
    )


@exercise(
    "03",
    outcome="3.4",
    deeper=True,
    hints=(
        "Cut each weight into its heads first: q.view(heads, d // heads, d). Head 0 owns the first d // heads rows.",
        "torch.stack(..., dim=1) of the three puts q, k and v of each head side by side; then flatten the first three dimensions.",
    ),
)
def interleave_qkv(answer, generator):
    shapes = [(4, 2), (8, 2), (12, 3), (16, 4)]

    def expected(q, k, v, heads):
        size = len(q) // heads
        return torch.cat([w[h * size : (h + 1) * size] for h in range(heads) for w in (q, k, v)])

    compare(
        answer,
        [(*(normal(generator, d, d) for _ in range(3)), heads) for d, heads in shapes],
        expected,
        {
            "this is all q, then all k, then all v: what TE calls *not* interleaved": lambda q, k, v, _: torch.cat(
                [q, k, v]
            ),
            "this goes row by row; the rows of a head stay together": lambda q, k, v, _: torch.stack(
                [q, k, v], 1
            ).flatten(0, 1),
            "the weights are put side by side as columns; outputs are rows": lambda q, k, v, _: torch.cat([q, k, v], 1),
            "the heads are cut wrongly: head 0 has the first d // heads rows, not every heads-th one": (
                lambda q, k, v, heads: torch.cat([w[h::heads] for h in range(heads) for w in (q, k, v)])
            ),
            "the heads are cut wrongly: there are `heads` of them, of d // heads rows each": lambda q, k, v, heads: (
                torch.stack([w.unflatten(0, (-1, heads)) for w in (q, k, v)], 1).flatten(0, 2)
            ),
            "within each head the order is q, k, v": lambda q, k, v, heads: expected(k, q, v, heads),
        },
        name_case=lambda q, k, v, heads: f"weights of shape {tuple(q.shape)}, {heads} heads",
    )


@exercise(
    "03",
    outcome="3.3",
    deeper=True,
    hints=(
        "FP32 is 4 bytes, and there are four such numbers for each parameter.",
        "The FP8 copies come on top: 1 byte for each weight in a product, and on Hopper 1 more for the transpose.",
    ),
)
def training_bytes(answer, generator):
    cases = [(1000, 0, False), (1000, 800, False), (1000, 800, True)]
    for parameters, hopper in zip(integers(generator, 100, 10**9, 6), integers(generator, 0, 1, 6), strict=True):
        cases.append((parameters, parameters * 7 // 8, bool(hopper)))

    def total(states=16, copies=lambda hopper: 1 + hopper):
        return lambda parameters, in_products, hopper: states * parameters + copies(hopper) * in_products

    compare(
        answer,
        cases,
        lambda parameters, in_products, hopper: sum([4, 4, 4, 4]) * parameters + [in_products, 2 * in_products][hopper],
        {
            "FP8 does not replace the FP32 weights: its copies come on top": lambda p, n, hopper: (
                16 * p - 4 * n + (1 + hopper) * n
            ),
            "the gradients are missing: 4 bytes more a parameter": total(12),
            "AdamW keeps two moments, of 4 bytes each": total(8),
            "the FP8 copies are missing": total(copies=lambda hopper: 0),
            "on Hopper the transpose is kept as well": total(copies=lambda hopper: 1),
            "only Hopper needs the transpose": total(copies=lambda hopper: 2),
            "only the weights in FP8 products have FP8 copies": lambda p, n, hopper: 16 * p + (1 + hopper) * p,
            "an FP8 number has one byte": total(copies=lambda hopper: 2 * (1 + hopper)),
        },
    )
