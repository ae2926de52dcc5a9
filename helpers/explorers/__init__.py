"""Explorers: figures with controls. Each draws a picture of its starting values where widgets do not run."""

from helpers.explorers.bits import explore_format
from helpers.explorers.break_even import explore_break_even
from helpers.explorers.delayed import explore_delayed_scaling
from helpers.explorers.memory import explore_memory
from helpers.explorers.quantization import explore_quantization
from helpers.explorers.state import explore_state

__all__ = [
    "explore_break_even",
    "explore_delayed_scaling",
    "explore_format",
    "explore_memory",
    "explore_quantization",
    "explore_state",
]
