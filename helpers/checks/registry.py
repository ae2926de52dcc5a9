"""The registry that the modules of checks fill, and what they draw their cases with."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Exercise:
    """One exercise. Its name is also that of its function, its solution, and `ex-name` of its stub cell, with dashes."""

    name: str
    notebook: str  # "01"
    outcome: str  # "1.2", a line of WORKSHOP.md
    hints: tuple[str, str]
    check: Callable[[Callable, torch.Generator], None]  # raises Wrong
    deeper: bool  # folded, for those who want more


registered: dict[str, Exercise] = {}


def exercise(notebook: str, outcome: str, hints: tuple[str, str], deeper: bool = False):
    """Lists a check under its function's name."""

    def listed(check):
        registered[check.__name__] = Exercise(check.__name__, notebook, outcome, hints, check, deeper)
        return check

    return listed


def integers(generator, low: int, high: int, n: int) -> list[int]:
    """`n` whole numbers from `low` to `high`, both included."""
    return torch.randint(low, high + 1, (n,), generator=generator).tolist()


def uniform(generator, low: float, high: float, n: int) -> list[float]:
    return [low + (high - low) * u for u in torch.rand(n, generator=generator, dtype=torch.float64).tolist()]


def normal(generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator)
