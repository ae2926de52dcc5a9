"""Notebook 04: a training step, fair benchmarks, underflow, what a step gains."""

import copy
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from helpers import emulation, formats
from helpers.checks.registry import exercise, integers, normal, uniform
from helpers.grading import Wrong, call, compare, show

ORDER = "[forward] loss, zero_grad, backward, step; [] is the autocast region"


class Watched(TorchFunctionMode):
    """A small FP8 model with old gradients, an optimizer and an autocast, which note what is done to them, in order."""

    def __init__(self, generator):
        super().__init__()
        self.events: list[str] = []
        self.inside: list[bool] = []
        self.in_region = False
        self.model = nn.Sequential(nn.Embedding(96, 16), emulation.EmulatedLinear(16, 96))
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(normal(generator, *p.shape) / 4)
        self.twin = copy.deepcopy(self.model)
        for p in self.model.parameters():
            p.grad = torch.full_like(p, 3.0)
        self.model.register_forward_hook(lambda *_: self.note("forward"))
        self.weight = self.model[1].weight
        self.weight.register_hook(lambda _: self.note("backward"))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.optimizer.register_step_pre_hook(lambda *_: self.before_step())
        self.used = None  # the gradient that the optimizer found

    def note(self, event):
        self.events.append(event)
        self.inside.append(self.in_region)

    def before_step(self):
        self.note("step")
        self.used = None if self.weight.grad is None else self.weight.grad.clone()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.cross_entropy:
            self.note("loss")
        return function(*args, **(kwargs or {}))

    @contextmanager
    def autocast(self):
        with emulation.autocast():
            self.in_region = True
            try:
                yield
            finally:
                self.in_region = False

    def __str__(self):
        text, inside = "", False
        for event, now_inside in zip([*self.events, ""], [*self.inside, False], strict=True):
            text += "]" * (inside and not now_inside) + (", " if text and event else "")
            text += "[" * (now_inside and not inside) + event
            inside = now_inside
        return text or "nothing"

    def fault(self, loss, expected):
        """What is wrong with the step that was watched, "" if nothing. `expected`: (loss, gradient of the weight)."""
        within = {event for event, inside in zip(self.events, self.inside, strict=True) if inside}
        right_loss, right_gradient = expected
        if self.events.count("forward") != 1:
            return f"the model is to be called once, and was called {self.events.count('forward')} times"
        if "forward" not in within:
            return "the forward pass runs outside of `with autocast():`, so not in FP8"
        if "loss" in within:
            return "the loss is computed inside the region: it belongs outside, in FP32"
        if "backward" not in self.events:
            return "there is no backward pass: loss.backward()"
        if "backward" in within:
            return "backward runs inside the region: each operation knows its precision from the forward, so it belongs outside"
        if "step" not in self.events:
            return "the weights are not updated: optimizer.step()"
        if self.events.index("step") < self.events.index("backward"):
            return "the optimizer steps before there are gradients: backward first"
        if self.used is None or not self.used.any():
            return "the gradients are cleared between backward and step, so nothing is left to step with"
        if torch.allclose(self.used, right_gradient + 3.0, atol=1e-4):
            return "the gradients of the step before were not cleared: they are added to the new ones"
        if isinstance(loss, float):
            return "the loss is returned as a Python number: .item() makes Python wait for the GPU at each step"
        if not isinstance(loss, torch.Tensor):
            return "it is to return the loss, a tensor"
        if loss.requires_grad:
            return "the loss it returns still holds the whole graph: loss.detach()"
        if loss.shape != () or not torch.allclose(loss, right_loss, rtol=1e-4):
            return f"the loss is to be the mean over all tokens, {show(right_loss)}, and is {show(loss)}"
        if not torch.allclose(self.used, right_gradient, rtol=1e-3, atol=1e-5):
            return "the gradient is not that of this batch's loss"
        return ""


@exercise(
    "04",
    outcome="4.1",
    hints=(
        "Only one line is indented under `with autocast():`, the model's call.",
        "Then F.cross_entropy(logits.flatten(0, 1), targets.flatten()), zero_grad, backward, step; return loss.detach().",
    ),
)
def train_step(answer, generator):
    for _ in range(2):
        watched = Watched(generator)
        inputs, targets = (torch.randint(96, (2, 16), generator=generator) for _ in range(2))
        with emulation.autocast():
            logits = watched.twin(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        arguments = (watched.model, watched.optimizer, watched.autocast, inputs, targets)
        case = "one step of a model that still has old gradients"
        with watched:
            got = call(answer, arguments, case)
        fault = watched.fault(got, (loss.detach(), watched.twin[1].weight.grad))
        if fault:
            raise Wrong(fault, case, str(watched), ORDER)


@exercise(
    "04",
    outcome="4.3",
    hints=(
        "Three fields have to be the same for both: mask, dropout, tokens. Precision and library are what is compared.",
        "Warm-up and waits are not about being equal: each rival needs at least one step of warm-up and a clock that waits.",
    ),
)
def unfair_because(answer, generator):
    fair = {
        "precision": "bf16",
        "library": "te",
        "mask": "causal",
        "dropout": 0.0,
        "tokens": 4096,
        "warm-up": 5,
        "waits": True,
    }
    cases = [
        (fair, fair | {"precision": "fp8"}),
        (fair, fair | {"precision": "fp8", "library": "torch", "warm-up": 10}),
        (fair | {"mask": "none"}, fair),
        (fair | {"warm-up": 0}, fair | {"warm-up": 0}),
        (fair | {"waits": False}, fair | {"waits": False}),
        (fair, fair | {"warm-up": 0, "dropout": 0.1}),
        (fair, fair | {"waits": False, "tokens": 8192}),
    ]
    choices = {
        "precision": ["bf16", "fp8"], "library": ["te", "torch"], "mask": ["causal", "none"], "dropout": [0.0, 0.1],
        "tokens": [4096, 8192], "warm-up": [0, 1, 5], "waits": [True, False],
    }  # fmt: skip

    def draw():
        return {field: values[integers(generator, 0, len(values) - 1, 1)[0]] for field, values in choices.items()}

    cases += [(draw(), draw()) for _ in range(20)]

    def equal(fields):
        return lambda a, b: {field for field in fields if a[field] != b[field]}

    def alone(rival):
        return ({"warm-up"} if rival["warm-up"] < 1 else set()) | (set() if rival["waits"] else {"waits"})

    same = equal(["mask", "dropout", "tokens"])
    compare(
        answer,
        cases,
        lambda a, b: same(a, b) | alone(a) | alone(b),
        {
            "precision and library may differ: they are what is compared": lambda a, b: (
                same(a, b) | alone(a) | alone(b) | equal(["precision", "library"])(a, b)
            ),
            "the precision may differ: it is what is compared": lambda a, b: (
                same(a, b) | alone(a) | alone(b) | equal(["precision"])(a, b)
            ),
            "not every difference is unfair, and two rivals may be timed wrongly in the same way": equal(choices),
            "warm-up and waits are not about being equal: two rivals may both lack them": equal(
                ["mask", "dropout", "tokens", "warm-up", "waits"]
            ),
            "warm-up and clock have to be looked at for both rivals, not for the first alone": lambda a, b: (
                same(a, b) | alone(a)
            ),
            "warm-up and clock have to be looked at for both rivals, not for the second alone": lambda a, b: (
                same(a, b) | alone(b)
            ),
            "warm-up and clock have to be looked at, too": same,
            "one rival without warm-up, or timed by a clock that does not wait, is enough": lambda a, b: (
                same(a, b) | (alone(a) & alone(b))
            ),
        },
        name_case=lambda a, b: f"a = {a}, b = {b}",
    )


@exercise(
    "04",
    outcome="4.2",
    deeper=True,
    hints=(
        "E4M3's smallest positive number is 2**-9. What lies nearer to 0 than to it becomes 0.",
        "A number is lost if it is not 0 and (x * scale).abs() <= 2**-10: a tie goes to 0. Divide by the number of nonzero ones.",
    ),
)
def underflow_share(answer, generator):
    edge = torch.tensor([2.0**-10, -(2.0**-10), 1.5 * 2.0**-10, 2.0**-9, -1.0, 1e-5, 0.0, 0.0])
    cases = [(edge, 1.0), (edge / 64, 64.0), (edge * 16, 1 / 16)]
    for power in integers(generator, -12, -2, 6):
        x = normal(generator, 400) * 2.0**power * (torch.rand(400, generator=generator) < 0.8)
        cases.append((x, 2.0 ** integers(generator, -3, 6, 1)[0]))

    def becomes_zero(x, scale):
        return (formats.quantize(x * scale, formats.E4M3) == 0) & (x != 0)

    def share(lost):
        return lambda x, scale: (lost(x * scale) & (x != 0)).sum().item() / (x != 0).sum().item()

    compare(
        answer,
        cases,
        lambda x, scale: becomes_zero(x, scale).sum().item() / (x != 0).sum().item(),
        {
            "what is below 2**-9 is not all lost: from half of it on, it is rounded up": share(
                lambda y: y.abs() < 2.0**-9
            ),
            "what is below 2**-9 is not all lost: half of that is the limit": share(lambda y: y.abs() <= 2.0**-9),
            "2**-6 is the smallest *normal* number; subnormal ones go down to 2**-9": share(
                lambda y: y.abs() < 2.0**-6
            ),
            "exactly half of 2**-9 is a tie, and goes to 0, the even one": share(lambda y: y.abs() < 2.0**-10),
            "numbers can be negative: the magnitude decides": share(lambda y: y <= 2.0**-10),
            "zeros are not lost: they were zero before": lambda x, scale: (
                ((x * scale).abs() <= 2.0**-10).double().mean().item()
            ),
            "the share is of the numbers that are not zero": lambda x, scale: (
                becomes_zero(x, scale).double().mean().item()
            ),
            "the scale multiplies before rounding": lambda x, scale: (
                becomes_zero(x, 1 / scale).sum().item() / (x != 0).sum().item()
            ),
            "the scale is not used": lambda x, scale: becomes_zero(x, 1.0).sum().item() / (x != 0).sum().item(),
        },
        tolerance=1e-5,
        name_case=lambda x, scale: f"underflow_share({show(x)}, scale={scale:g})",
    )


@exercise(
    "04",
    outcome="4.4",
    deeper=True,
    hints=(
        "Call the old step's time 1. What remains of it: everything that FP8 leaves alone, 1 - share, and the products, now faster.",
        "New time = (1 - share) + share / gain + casts. The speedup is old time / new time.",
    ),
)
def step_speedup(answer, generator):
    drawn = (uniform(generator, low, high, 6) for low, high in ((0.2, 0.9), (1.2, 2.0), (0.01, 0.3)))
    cases = [(0.5, 2.0, 0.0), (0.5, 2.0, 0.1), (1.0, 1.6, 0.0), *zip(*drawn, strict=True)]

    def expected(share, gain, casts):
        """A step of a million units of time, part by part."""
        products, rest = 1e6 * share, 1e6 * (1 - share)
        return 1e6 / (products / gain + rest + 1e6 * casts)

    compare(
        answer,
        cases,
        expected,
        {
            "only the products become faster, not the whole step": lambda share, gain, casts: gain,
            "this is the new time: the speedup is the old one divided by it": lambda share, gain, casts: (
                1 - share + share / gain + casts
            ),
            "the casts are missing": lambda share, gain, casts: 1 / (1 - share + share / gain),
            "the casts cost time, they do not save any": lambda share, gain, casts: (
                1 / (1 - share + share / gain - casts)
            ),
            "times add up, speeds do not": lambda share, gain, casts: 1 - share + share * gain - casts,
            "the rest of the step, 1 - share, is missing": lambda share, gain, casts: 1 / (share / gain + casts),
        },
        tolerance=1e-6,
    )
