"""How an answer is compared with what is expected, and what is said when it differs."""

import copy
import linecache
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

LARGE = 20  # elements: a tensor with more is not shown as a whole


@dataclass(eq=False)
class Wrong(Exception):
    """An answer that does not fit: what is wrong, the case that shows it, the answer's value and the expected one."""

    message: str
    case: str = ""
    yours: str = ""
    expected: str = ""


def call(answer: Callable, arguments: tuple, case: str) -> Any:
    """The answer's value. What it raises becomes Wrong, naming the line; a bare NotImplementedError goes through."""
    try:
        return answer(*arguments)
    except Exception as error:
        if type(error) is NotImplementedError and not str(error):
            raise
        where = line_of(error)
        text = " ".join(str(error).split())
        raise Wrong(
            f"it raised {type(error).__name__}{': ' if text else ''}{text[:300]}"
            + (f", at `{where}`" if where else ""),
            case,
        ) from None


def line_of(error: Exception) -> str:
    """The line of the answer in which it failed: the last one that is in no file, but in a notebook's cell."""
    found, trace = "", error.__traceback__
    while trace:
        name = trace.tb_frame.f_code.co_filename
        if "ipykernel_" in name or name.startswith("<"):
            found = linecache.getline(name, trace.tb_lineno).strip() or found
        trace = trace.tb_next
    return found


def compare(
    answer: Callable,
    cases: Iterable[tuple],
    expected: Callable,
    mistakes: dict[str, Callable] | None = None,
    tolerance: float = 0.0,
    name_case: Callable[..., str] | None = None,
) -> None:
    """Raises Wrong at the first case, a tuple of arguments, in which `answer` gives something else than `expected`.

    `mistakes` maps a message to a function that makes that mistake; the first one that gives all the answer's values is
    named, else the only one that gives the wrong value of that case. `tolerance` is relative. Every call gets copies of its arguments.
    """
    given, wrong, failed, changed = [], None, None, False
    for arguments in cases:
        case = name_case(*arguments) if name_case else f"{show(answer)}({', '.join(map(show, arguments))})"
        mine = copy.deepcopy(arguments)
        try:
            yours = call(answer, mine, case)
        except Wrong as error:
            failed = error
            break
        given.append((arguments, yours))
        right = expected(*copy.deepcopy(arguments))
        if wrong is None and not same(yours, right, tolerance):
            wrong = (len(given) - 1, case, yours, right)
            changed = any(
                isinstance(x, torch.Tensor) and not same(x, y, 0.0) for x, y in zip(mine, arguments, strict=True)
            )
    if wrong is None:
        if failed:
            raise failed
        return
    number, case, yours, right = wrong

    def explain(values):
        """The mistakes that give these values."""
        return [
            message
            for message, mistake in (mistakes or {}).items()
            if all(same(value, outcome(mistake, arguments), tolerance) for arguments, value in values)
        ]

    wholly, here = explain(given), explain([given[number]])
    if wholly:
        message = wholly[0]
    elif len(here) == 1:  # another mistake hides behind it
        message = here[0]
    elif changed:
        message = "it changes what it is given, in place; work on a copy, such as x.clone()"
    else:
        message = kind_of_problem(yours, right) or "the value is not the expected one"
    raise Wrong(message, case, *show_difference(yours, right, tolerance))


def outcome(function: Callable, arguments: tuple) -> Any:
    """What a mistaken function gives; a mistake that raises gives nothing comparable."""
    try:
        return function(*copy.deepcopy(arguments))
    except (ArithmeticError, LookupError, RuntimeError, ValueError):
        return NotImplemented


def same(a: Any, b: Any, tolerance: float) -> bool:
    """Equal in kind and, to a relative tolerance, in value; NaN equals NaN, a tuple a list, a number a 0-dim tensor.

    Small elements of a tensor may also differ by a hundredth of the tolerance times the largest: sums cancel.
    """
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same(x, y, tolerance) for x, y in zip(a, b, strict=True))
    for kind in (str, (set, frozenset)):
        if isinstance(a, kind) or isinstance(b, kind):
            return isinstance(a, kind) and isinstance(b, kind) and a == b
    try:
        a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    except (TypeError, ValueError, RuntimeError):  # no numbers
        return a is b
    if a.shape != b.shape:
        return False
    largest = b[b.isfinite()].abs().max().item() if b.isfinite().any() else 0.0
    return torch.allclose(a, b, rtol=tolerance, atol=0.01 * tolerance * largest, equal_nan=True)


def kind_of_problem(yours: Any, right: Any) -> str:
    """What is wrong with the kind of thing that came back; "" if it is a thing of the right kind."""
    if yours is None:
        return "it returns nothing: is there a `return`?"
    if yours is Ellipsis:
        return "it returns `...`"
    if isinstance(right, tuple) and not (isinstance(yours, (tuple, list)) and len(yours) == len(right)):
        return f"it is to return {len(right)} things, as in `return a, b`"
    if isinstance(right, (str, set, list)) and not isinstance(yours, type(right)):
        return f"it is to return a {type(right).__name__}, and returns a {type(yours).__name__}"
    if isinstance(right, torch.Tensor) and right.ndim:
        shape = tuple(yours.shape) if isinstance(yours, torch.Tensor) else type(yours).__name__
        return f"the shape is to be {tuple(right.shape)}, and is {shape}" if shape != tuple(right.shape) else ""
    if isinstance(right, (bool, int, float)) and isinstance(yours, torch.Tensor) and yours.ndim:
        return f"it is to return one number, and returns a tensor of shape {tuple(yours.shape)}"
    return ""


def show_difference(yours: Any, right: Any, tolerance: float) -> tuple[str, str]:
    """Both values; of large tensors of one shape the first element that differs."""
    tensors = isinstance(yours, torch.Tensor) and isinstance(right, torch.Tensor)
    if tensors and yours.shape == right.shape and right.numel() > LARGE:
        for place in torch.ones(right.shape).nonzero().tolist():
            a, b = yours[tuple(place)], right[tuple(place)]
            if not same(a, b, tolerance):
                return f"{show(a)} at {place}", f"{show(b)} at {place}"
    return show(yours), show(right)


def show(value: Any) -> str:
    """A value in a line: numbers in six digits, large tensors by their shape, a function by its name."""
    if isinstance(value, bool) or value is None:
        return repr(value)
    if isinstance(value, float):
        return "inf" if value == math.inf else f"{value:.6g}"
    if isinstance(value, torch.Tensor):
        if value.ndim == 0:
            return show(value.item())
        return show(value.tolist()) if value.numel() <= LARGE else f"<tensor of shape {tuple(value.shape)}>"
    if isinstance(value, (list, tuple, set)):
        opening, closing = {list: "[]", tuple: "()", set: "{}"}[type(value)]
        items = sorted(map(show, value)) if isinstance(value, set) else map(show, value)
        return opening + ", ".join(items) + closing
    if callable(value):
        return getattr(value, "__name__", type(value).__name__)
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + " …"
