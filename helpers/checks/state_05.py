"""Notebook 05: the last real position, the sabotaged layer, quiet evaluation, FP8 weights."""

import pandas as pd
import torch
from torch import nn

from helpers import emulation, formats, fp8_state
from helpers.checks.registry import exercise, integers, normal, uniform
from helpers.grading import Wrong, call, compare, same, show, show_difference


@exercise(
    "05",
    outcome="5.1",
    hints=(
        "Sequence i has lengths[i] real tokens, at positions 0 to lengths[i] - 1; the last of them predicts the next token.",
        "logits[torch.arange(n), lengths - 1] picks one position from each row: (n, vocab). The token is its argmax.",
    ),
)
def next_tokens(answer, generator):
    cases = []
    for n, seq, vocab in [(3, 8, 16), (4, 16, 96), (5, 16, 96)]:
        lengths = torch.tensor(integers(generator, 2, seq - 1, n))
        lengths[:3] = torch.tensor([3, 1, seq - 1])
        cases.append((normal(generator, n, seq, vocab), lengths))
    cases[-1][1][3] = 16  # no padding at all

    def at(position):
        def tokens(logits, lengths):
            n, seq = logits.shape[:2]
            places = position(lengths, seq).expand(n)
            return logits[range(n), places].argmax(-1)

        return tokens

    compare(
        answer,
        cases,
        lambda logits, lengths: torch.tensor(
            [
                max(range(logits.shape[2]), key=row[n - 1].tolist().__getitem__)
                for row, n in zip(logits, lengths.tolist(), strict=True)
            ]
        ),
        {
            "the last position is padding, and its prediction continues the padding": at(
                lambda n, seq: torch.tensor(seq - 1)
            ),
            "positions count from 0: the last real token is at lengths - 1": at(lambda n, seq: n),
            "the sequences have different lengths: each needs its own position": at(lambda n, seq: n[:1] - 1),
            "the longest sequence's position is padding in the others": at(lambda n, seq: n.max() - 1),
            "these are the logits: the token is the place of the largest, argmax": lambda logits, lengths: logits[
                range(len(logits)), lengths - 1
            ],
            "these are the largest logits; argmax gives their places": lambda logits, lengths: logits[
                range(len(logits)), lengths - 1
            ].amax(-1),
        },
        name_case=lambda logits, lengths: f"logits of shape {tuple(logits.shape)}, lengths {lengths.tolist()}",
    )


def state_with_a_fault(generator, layer: str, role: str, factor: float) -> pd.DataFrame:
    """A table as of fp8_state, in which one tensor's scale is `factor` times what its history asks for."""
    rows = []
    for name in (f"blocks.{i}.{gemm}" for i in range(2) for gemm in ("qkv", "proj", "fc1", "fc2")):
        for kind, low, high in (("input", 1, 3), ("weight", -4, -1), ("grad_output", -20, -12)):
            fmt = formats.E5M2 if kind == "grad_output" else formats.E4M3
            power, share = uniform(generator, low, high, 1)[0], uniform(generator, 0.8, 1.0, 1)[0]
            # Gradients in block 1 are the largest and the smallest, so that looking for extremes finds no fault of block 0.
            power = {"blocks.1.fc1": -21, "blocks.1.fc2": -11}.get(name, power) if kind == "grad_output" else power
            rows.append(
                {"layer": name, "role": kind, "format": fmt.name, "scale": share * fmt.max / 2**power}
                | {"amax newest": share * 2**power, "amax max": 2**power, "amax staged": 0.0, "history": 16}
            )
    state = pd.DataFrame(rows)
    state.loc[(state["layer"] == layer) & (state["role"] == role), "scale"] *= factor
    how = f"{factor:.0f} times too large" if factor > 1 else f"{1 / factor:.0f} times too small"
    state.attrs = {"layer": layer, "case": f"24 tensors; the scale of the {role} of {layer} is {how}"}
    return state


@exercise(
    "05",
    outcome="5.2",
    hints=(
        "A scale fits if it takes the largest amax of its history near to the format's largest number: scale * amax max.",
        "Divide that by 448 for E4M3 and 57344 for E5M2. The fault is where the share is farthest from 1, above or below.",
    ),
)
def sabotaged_layer(answer, generator):
    faults = [
        ("blocks.0.qkv", "input", 1 / 32),
        ("blocks.0.proj", "weight", 32.0),
        ("blocks.0.fc1", "grad_output", 1 / 32),
        ("blocks.0.fc2", "input", 2.0),
    ]
    for _ in range(6):
        (block,), (gemm,), (role,), (power,) = (
            integers(generator, low, high, 1) for low, high in ((0, 1), (0, 3), (0, 2), (5, 12))
        )
        factor = 2.0**power if integers(generator, 0, 1, 1)[0] else 2.0**-power
        faults.append((f"blocks.{block}.{['qkv', 'proj', 'fc1', 'fc2'][gemm]}", fp8_state.USED_ROLES[role], factor))

    def share(state, largest=None):
        largest = largest or {"E4M3": 448.0, "E5M2": 57344.0}
        return state["scale"] * state["amax max"] / state["format"].map(largest)

    def farthest(share):
        return share.where(share > 1, 1 / share).idxmax()

    def layer_of(find):
        return lambda state: state["layer"][find(state)]

    compare(
        answer,
        [(state_with_a_fault(generator, *fault),) for fault in faults],
        lambda state: state.attrs["layer"],
        {
            "a large scale is no fault: a tensor with a small amax, such as a gradient, needs one": layer_of(
                lambda s: s["scale"].idxmax()
            ),
            "a small amax is no fault, if its scale fits it": layer_of(lambda s: s["amax max"].idxmin()),
            "a small scale is no fault: a tensor with a large amax needs one": layer_of(lambda s: s["scale"].idxmin()),
            "a large amax is no fault, if its scale fits it": layer_of(lambda s: s["amax max"].idxmax()),
            "a scale can be too small as well, and then the small numbers are flushed": layer_of(
                lambda s: share(s).idxmax()
            ),
            "a scale can be too large as well, and then the large numbers are cut off": layer_of(
                lambda s: share(s).idxmin()
            ),
            "gradients are in E5M2, whose largest number is 57344": layer_of(
                lambda s: farthest(share(s, {"E4M3": 448.0, "E5M2": 448.0}))
            ),
            "factors count, not differences: half as large is as far off as twice as large": layer_of(
                lambda s: (share(s) - 1).abs().idxmax()
            ),
        },
        name_case=lambda state: state.attrs["case"],
    )


class LikeTE(nn.Module):
    """Keeps, as TE does and the emulator does not, the amax of a forward pass without gradients in the staging row."""

    def __init__(self, generator):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(96, 16), emulation.EmulatedLinear(16, 32)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(normal(generator, *p.shape))

    def forward(self, tokens):
        x = self.embedding(tokens)
        y = self.linear(x)
        if emulation.active_region() and not torch.is_grad_enabled():
            self.linear.fp8_meta["scaling_fwd"].record(0, x.abs().max())
        return y


def finished(tensor: torch.Tensor) -> torch.Tensor:
    """A scale, or the rows of a history below the staging row: what only a training step changes."""
    return tensor[1:] if tensor.ndim == 2 else tensor


@exercise(
    "05",
    outcome="5.3",
    deeper=True,
    hints=(
        "fp8_state.delayed_state(model) gives the live tensors: clone each one. fp8_state.load_delayed_state(model, saved) puts them back.",
        "Copy the state, run the model under torch.no_grad() and autocast(), put the state back, return the logits.",
    ),
)
def evaluate_quietly(answer, generator):
    for _ in range(2):
        model = LikeTE(generator)
        for size in (2.0, 1.0):  # two training steps, so that there is a state
            with emulation.autocast():
                y = model(torch.randint(96, (2, 16), generator=generator)) * size
            y.sum().backward()
        tokens = torch.randint(96, (1, 32), generator=generator)
        state = fp8_state.delayed_state(model)
        before = {name: tensor.clone() for name, tensor in state.items()}
        with torch.no_grad():
            plain = model(tokens)
            with emulation.autocast():
                expected = model(tokens)
        fp8_state.load_delayed_state(model, before)

        case = "a model after two training steps, 32 tokens"
        logits = call(answer, (model, tokens, emulation.autocast), case)
        now = fp8_state.delayed_state(model)
        moved = [name for name in before if not torch.equal(finished(now[name]), finished(before[name]))]
        if moved:
            raise Wrong(
                "gradients were enabled, so it counted as a training step: use torch.no_grad()",
                case, f"{moved[0]} changed", "the state as before",
            )  # fmt: skip
        if logits is None:
            raise Wrong(
                "it returns nothing: is there a `return`?", case, "None", f"logits of shape {tuple(expected.shape)}"
            )
        if isinstance(logits, torch.Tensor) and logits.requires_grad:
            raise Wrong(
                "the logits hold a graph for a backward pass: use torch.no_grad()", case, "requires_grad", "no graph"
            )
        if same(logits, plain, 1e-6):
            raise Wrong(
                "the forward pass ran outside of `with autocast():`, so not in FP8",
                case,
                *show_difference(logits, expected, 1e-6),
            )
        if not same(logits, expected, 1e-6):
            raise Wrong(
                "it is to return the model's logits under autocast", case, *show_difference(logits, expected, 1e-6)
            )
        name = "linear.scaling_fwd.amax_history"
        if not torch.equal(now[name], before[name]):
            raise Wrong(
                "the staging row keeps the evaluation's amax: copy the state before, each tensor with .clone(), and put it back after",
                case, f"row 0 of the input's history is {show(now[name][0, 0])}", show(before[name][0, 0]),
            )  # fmt: skip


@exercise(
    "05",
    outcome="5.4",
    deeper=True,
    hints=(
        "How many FP8 copies does Hopper need of a weight in a product, without and with a backward pass?",
        "One byte a copy: one copy for inference, two in training. Biases and LayerNorm parameters stay in BF16, two bytes.",
    ),
)
def weight_bytes(answer, generator):
    cases = [(1000, 0, False), (1000, 0, True), (1000, 50, False)]
    for products, others in zip(integers(generator, 1000, 10**9, 6), integers(generator, 10, 10**6, 6), strict=True):
        cases.append((products, others, bool(integers(generator, 0, 1, 1)[0])))

    def total(copies, others=2):
        return lambda products, rest, training: copies(training) * products + others * rest

    compare(
        answer,
        cases,
        lambda products, rest, training: sum([products, products][: 1 + training]) + sum([rest, rest]),
        {
            "for inference one copy is enough": total(lambda training: 2),
            "in training Hopper needs the transpose as well: two copies": total(lambda training: 1),
            "it is the other way round: inference needs one copy, training two": total(lambda training: 2 - training),
            "biases and LayerNorm parameters stay in BF16: 2 bytes": total(lambda training: 1 + training, 1),
            "biases and LayerNorm parameters are in BF16 here: 2 bytes, not 4": total(lambda training: 1 + training, 4),
            "biases and LayerNorm parameters are missing": total(lambda training: 1 + training, 0),
            "an FP8 number has one byte": total(lambda training: 2 * (1 + training)),
        },
    )
