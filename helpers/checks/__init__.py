"""The checks: for each exercise the cases it is tried on, what is expected, and the common mistakes by name.

One module a notebook. What is expected comes from elsewhere than helpers/solutions.py: from torch's own FP8 types, from
the emulator, from counting or simulating. So a solution that passes is right twice.

A new exercise is a check here, a function of its name in helpers/solutions.py, wrong answers in tests/wrong_answers.py, a
row in WORKSHOP.md, and three cells in its notebook, tagged `exercise` (and `deeper` if folded): `ex-its-name-task`,
`ex-its-name` with the stub and `ex-its-name-check`. Tests compare them all. A folded one stands under a heading whose
cell has the metadata `jp-MarkdownHeadingCollapsed` for JupyterLab, and an `id` in the notebook's `collapsed_sections`
for Colab: a heading and its title stay in sight, where `source_hidden` or a form would hide single cells without a name.
"""

from helpers.checks import formats_01, models_03, modules_02, state_05, training_04
from helpers.checks.registry import Exercise, registered

__all__ = ["EXERCISES", "Exercise", "formats_01", "models_03", "modules_02", "state_05", "training_04"]

EXERCISES: dict[str, Exercise] = dict(sorted(registered.items(), key=lambda item: item[1].notebook))
