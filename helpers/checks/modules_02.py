"""Notebook 02: delayed scaling, an FP8 layer by hand, legal shapes."""

import math

import torch

from helpers import emulation, formats
from helpers.checks.registry import exercise, integers, normal
from helpers.grading import compare


def update_by_emulator(history, scale, fp8_max, margin):
    """What helpers.emulation, and TE, make of one tensor's history and scale."""
    state = emulation.ScalingState(1, len(history), torch.device("cpu"))
    state.amax_history[:, 0], state.scale[0] = history, scale
    state.update(emulation.DelayedScaling(amax_history_len=len(history), margin=margin), fp8_max)
    return state.amax_history[:, 0], state.scale[0]


def update_by(amax=lambda h: h.max(), shift=-1, clear=True, scale_of=None, careful=True):
    """delayed_update with one part exchanged."""
    scale_of = scale_of or (lambda top, a, margin: top / a / 2**margin)

    def update(history, scale, fp8_max, margin):
        a = amax(history)
        new = scale_of(fp8_max, a, margin)
        if careful and not (a > 0 and a.isfinite()):
            new = scale
        history = history.roll(shift)
        if clear:
            history[0] = 0
        return history, new

    return update


@exercise(
    "02",
    outcome="2.2",
    hints=(
        "The order matters: first the maximum over the whole history, row 0 included, then the scale, then the shift.",
        "history.roll(-1) moves every row up by one and row 0 to the end; then history[0] = 0. Keep the scale if amax is 0 or infinite.",
    ),
)
def delayed_update(answer, generator):
    old = torch.tensor(2.0)
    cases = [
        (torch.tensor([3.0, 1.0, 1.5, 2.0]), old, formats.E4M3.max, 0),  # the newest, still in row 0, is the largest
        (torch.tensor([1.0, 4.0, 1.5, 2.0]), old, formats.E4M3.max, 0),  # the oldest is
        (torch.tensor([1.0, 0.5, 1.5, 6.0]), old, formats.E5M2.max, 2),
        (torch.tensor([2e-6, 3e-6, 1e-6]), old, formats.E5M2.max, 0),
        (torch.zeros(3), old, formats.E4M3.max, 0),
        (torch.tensor([1.0, math.inf, 2.0]), old, formats.E4M3.max, 0),
    ]
    for length, margin in zip(integers(generator, 2, 8, 6), integers(generator, 0, 3, 6), strict=True):
        cases.append((normal(generator, length).exp(), old, formats.E4M3.max, margin))
    compare(
        answer,
        cases,
        update_by_emulator,
        {
            "only the last row was looked at: row 0 holds the step that just ended, and all rows count": update_by(
                lambda h: h[-1]
            ),
            "only row 0 was looked at: that is `most_recent`; here the largest of the history counts": update_by(
                lambda h: h[0]
            ),
            "row 0, where the step that just ended left its amax, was left out": update_by(lambda h: h[1:].max()),
            "the oldest amax was dropped before the maximum was taken: first the maximum, then the shift": update_by(
                lambda h: torch.cat([h[:1], h[2:]]).max()
            ),
            "the history was shifted the wrong way: row 0 becomes the last one": update_by(shift=1),
            "row 0 was not set to zero: the next step's amax is collected there": update_by(clear=False),
            "the history was not shifted": update_by(shift=0),
            "the margin makes room: the scale is *divided* by 2**margin": update_by(
                scale_of=lambda top, a, margin: top / a * 2**margin
            ),
            "the margin is missing: divide by 2**margin": update_by(scale_of=lambda top, a, margin: top / a),
            "the scale is upside down: it takes amax to fp8_max": update_by(
                scale_of=lambda top, a, margin: a / top / 2**margin
            ),
            "an amax of 0 or infinity says nothing: the scale has to stay": update_by(careful=False),
            "an amax of infinity says nothing: the scale has to stay": lambda history, *rest: update_by(
                careful=not history.isinf().any()
            )(history, *rest),
        },
        tolerance=1e-6,
    )


@exercise(
    "02",
    outcome="2.4",
    hints=(
        "The next multiple of m at or above n: how many m's does it take to cover n?",
        "-(-n // m) * m rounds up. The rows' m depends on `training`, that of the features does not.",
    ),
)
def legal_shape(answer, generator):
    cases = [
        (9, 64, False),
        (9, 64, True),
        (32, 64, True),
        (64, 50257, False),
        (24, 100, True),
        (24, 8, False),
        (1, 1, True),
    ]
    rows, features = integers(generator, 1, 500, 12), integers(generator, 1, 5000, 12)
    cases += [(r, f, bool(t)) for r, f, t in zip(rows, features, integers(generator, 0, 1, 12), strict=True)]

    def up(n, m):
        return next(k for k in range(n, n + m) if k % m == 0)

    compare(
        answer,
        cases,
        lambda r, f, training: (up(r, 16 if training else 8), up(f, 16)),
        {
            "this rounds down, and would cut numbers off": lambda r, f, t: (
                r // (16 if t else 8) * (16 if t else 8),
                f // 16 * 16,
            ),
            "this adds a whole multiple to what is legal already": lambda r, f, t: (
                (r // (16 if t else 8) + 1) * (16 if t else 8),
                (f // 16 + 1) * 16,
            ),
            "in training the rows need multiples of 16, because wgrad sums over them": lambda r, f, t: (
                up(r, 8),
                up(f, 16),
            ),
            "without a backward multiples of 8 are enough for the rows": lambda r, f, t: (up(r, 16), up(f, 16)),
            "features need multiples of 16, in training or not": lambda r, f, t: (
                up(r, 16 if t else 8),
                up(f, 16 if t else 8),
            ),
            "rows and features are confused: the rows are the ones that may be multiples of 8": lambda r, f, t: (
                up(r, 16),
                up(f, 16 if t else 8),
            ),
        },
    )


@exercise(
    "02",
    outcome="2.1",
    deeper=True,
    hints=(
        "Each operand is multiplied by its scale *before* it is rounded: formats.quantize(x * scale_x, formats.E4M3).",
        "The product is then scale_x * scale_w times too large. Divide by that before the bias, which was never scaled, is added.",
    ),
)
def fp8_linear(answer, generator):
    cases = []
    for rows, d_in, d_out in [(1, 2, 1), (3, 16, 4), (4, 32, 8)]:
        x, w, bias = normal(generator, rows, d_in), normal(generator, d_out, d_in) / 16, normal(generator, d_out)
        # x's scale fits, or is a little too large, as after a spike: then values saturate
        scale_x = 448 / x.abs().max() * (1.0 if rows < 4 else 1.7)
        cases.append((x, w, bias, scale_x, 448 / w.abs().max()))

    def e4m3(t):
        return t.clamp(-448, 448).to(torch.float8_e4m3fn).double()

    def q(t):
        return formats.quantize(t, formats.E4M3)

    compare(
        answer,
        cases,
        lambda x, w, b, sx, sw: (e4m3(x * sx) @ e4m3(w * sw).T / (sx * sw).double() + b).float(),
        {
            "the scales are not undone: the product has to be divided by both": lambda x, w, b, sx, sw: (
                q(x * sx) @ q(w * sw).T + b
            ),
            "only x's scale is undone: the product carries both": lambda x, w, b, sx, sw: (
                q(x * sx) @ q(w * sw).T / sx + b
            ),
            "only w's scale is undone: the product carries both": lambda x, w, b, sx, sw: (
                q(x * sx) @ q(w * sw).T / sw + b
            ),
            "the bias was never scaled, so it is added after dividing": lambda x, w, b, sx, sw: (
                (q(x * sx) @ q(w * sw).T + b) / (sx * sw)
            ),
            "multiplying by the scales again makes it worse: divide": lambda x, w, b, sx, sw: (
                q(x * sx) @ q(w * sw).T * (sx * sw) + b
            ),
            "nothing was rounded to FP8: formats.quantize does it": lambda x, w, b, sx, sw: x @ w.T + b,
            "the scales were not used: multiply by them before rounding": lambda x, w, b, sx, sw: q(x) @ q(w).T + b,
            "the bias is missing": lambda x, w, b, sx, sw: q(x * sx) @ q(w * sw).T / (sx * sw),
        },
        tolerance=1e-3,
        name_case=lambda x, w, b, sx, sw: (
            f"x of shape {tuple(x.shape)}, w of shape {tuple(w.shape)}, scales {sx:.4g} and {sw:.4g}"
        ),
    )


@exercise(
    "02",
    outcome="2.3",
    deeper=True,
    hints=(
        "Step t's scale knows the amaxes of steps t - length to t - 1. What lies above the largest of them is cut off.",
        "The window is amaxes[max(0, step - length) : step]; it is empty for step 0, which does not count.",
    ),
)
def clipped_steps(answer, generator):
    cases = [([1.0, 2.0, 1.5, 2.0, 3.0], 4), ([5.0, 1.0, 2.0, 3.0, 4.0], 2), ([5.0, 1.0, 1.0, 1.0, 2.0, 6.0], 3)]
    for length in integers(generator, 2, 6, 8):
        cases.append((normal(generator, 30).exp().mul(4).round().div(4).add(0.25).tolist(), length))  # with ties

    def expected(amaxes, length):
        """By the emulator's scales: clipped is what would land above 448."""
        state, recipe, found = emulation.ScalingState(1, length, torch.device("cpu")), emulation.DelayedScaling(), []
        for step, amax in enumerate(amaxes):
            if step and amax * state.scale.item() > 448 * (1 + 1e-6):
                found.append(step)
            state.amax_history[0, 0] = amax
            state.update(recipe, formats.E4M3.max)
        return found

    def window(start, end=lambda t: t, first=1, above=lambda a, b: a > b):
        return lambda amaxes, length: [
            t
            for t in range(first, len(amaxes))
            if above(amaxes[t], max(amaxes[max(0, start(t, length)) : end(t)], default=0))
        ]

    compare(
        answer,
        cases,
        expected,
        {
            "only the step before is looked at: a history of `length` steps counts": window(lambda t, n: t - 1),
            "the window is one step too short: steps t - length to t - 1 count": window(lambda t, n: t - n + 1),
            "the window is one step too long: steps t - length to t - 1 count": window(lambda t, n: t - n - 1),
            "all earlier steps are looked at: the history forgets after `length` steps": window(lambda t, n: 0),
            "an amax equal to the largest known one fits exactly: nothing is cut off": window(
                lambda t, n: t - n, above=lambda a, b: a >= b
            ),
            "step 0 does not count: before it nothing is known": window(lambda t, n: t - n, first=0),
            "the step's own amax is in the window: the scale is made before it is known": window(
                lambda t, n: t - n, end=lambda t: t + 1
            ),
        },
    )
