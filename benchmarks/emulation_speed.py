"""How much longer is an emulated training step than a BF16-autocast step of the same model? Prints the ratio per recipe.

    python -m benchmarks.emulation_speed [--repeats 30] [--threads 2]

The laptop preset on the CPU; rivals take turns, so that a change in the machine's load hits all of them.
"""

import argparse
from contextlib import nullcontext

import torch
import torch.nn.functional as F

from helpers import emulation
from helpers.benchmark import time_in_turns
from helpers.models import PRESETS, MiniGPT

RECIPES = {
    "delayed": emulation.DelayedScaling(amax_history_len=16),
    "current": emulation.Float8CurrentScaling(),
    "block": emulation.Float8BlockScaling(),
    "mxfp8": emulation.MXFP8BlockScaling(),
    "nvfp4": emulation.NVFP4BlockScaling(),
}


def make_step(recipe):
    """A function that runs one training step; recipe None: BF16 autocast."""
    preset, generator = PRESETS["laptop"], torch.Generator().manual_seed(0)
    model = MiniGPT(preset.config)
    model = model if recipe is None else emulation.emulate(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(preset.config.vocab, (preset.batch, preset.config.seq_len + 1), generator=generator)

    def step():
        context = emulation.autocast(recipe=recipe, generator=generator) if recipe else nullcontext()
        with torch.autocast("cpu", torch.bfloat16), context:
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    steps = {"bf16": make_step(None)} | {name: make_step(recipe) for name, recipe in RECIPES.items()}
    table = time_in_turns(steps, "cpu", warmup=3, repeats=arguments.repeats).set_index("variant")
    table["fastest_ms"] = table["samples"].map(min)  # what other work on the machine disturbed least
    print(f"torch {torch.__version__}, {arguments.threads} threads, {arguments.repeats} steps each")
    for name, row in table.iterrows():
        median, fastest = (row[column] / table[column]["bf16"] for column in ("median_ms", "fastest_ms"))
        print(
            f"{name:8} median {row.median_ms:6.1f} ms (interquartile range {row.iqr_ms:.1f}), fastest {row.fastest_ms:6.1f} ms: "
            f"{median:.2f} x the BF16 step, fastest by fastest {fastest:.2f} x"
        )


if __name__ == "__main__":
    main()
