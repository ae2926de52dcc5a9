"""The checks: for each exercise the cases it is tried on, what is expected, and the common mistakes by name.

One module a notebook. What is expected comes from elsewhere than helpers/solutions.py: from torch's own FP8 types, from
the emulator, from counting or simulating. So a solution that passes is right twice.
"""

from helpers.checks import formats_01, models_03, modules_02, state_05, training_04
from helpers.checks.registry import Exercise, registered

__all__ = ["EXERCISES", "Exercise", "formats_01", "models_03", "modules_02", "state_05", "training_04"]

EXERCISES: dict[str, Exercise] = dict(sorted(registered.items(), key=lambda item: item[1].notebook))
