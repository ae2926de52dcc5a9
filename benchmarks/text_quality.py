"""Does FP8 learn text as well as BF16? Validation loss over seeds, for each precision, REAL and EMULATED.

    python -m benchmarks.text_quality [--seeds 8] [--steps 300]

The `laptop` model learns the help texts of Python (characters), batch 32. A seed sets the weights and the batches, the same
for every variant. Variants run in processes of their own, side by side. Writes artifacts/results/<machine>/text_quality.json.
"""

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pandas as pd
import torch

from helpers import data, emulation, hardware, models, precision, results, training

BATCH, LR = 32, 1e-3
VALIDATION = 256  # sequences
UNSCALED = {"scaling_factor_compute_algo": emulation.unscaled}
# variant -> (precision, recipe, fields, whether to emulate even where the hardware could)
VARIANTS = {
    "BF16": ("bf16", None, {}, False),
    "delayed HYBRID": ("fp8", "delayed", {}, False),
    "current HYBRID": ("fp8", "current", {}, False),
    "delayed HYBRID, emulated": ("fp8", "delayed", {}, True),
    "current HYBRID, emulated": ("fp8", "current", {}, True),
    "E4M3 unscaled, emulated": ("fp8", "delayed", {"fp8_format": "E4M3"} | UNSCALED, True),
    "HYBRID unscaled, emulated": ("fp8", "delayed", UNSCALED, True),
}


def emulated(hw: hardware.Hardware, recipe: str, fields: dict) -> precision.Precision:
    """The recipe in the emulator on this device, although the hardware may have it."""
    without = replace(hw, recipes=dict.fromkeys(hw.recipes, "emulated on request"))
    return precision.choose("fp8", without, recipe, **fields)


def run(variant: str, seeds: int, steps: int) -> list[dict]:
    torch.set_num_threads(1)
    hw = hardware.detect()
    name, recipe, fields, emulate = VARIANTS[variant]
    if emulate:
        chosen = emulated(hw, recipe, fields)
    else:
        chosen = precision.choose(name, hw, **({"recipe": recipe} if recipe else {}), **fields)
    config = models.preset("laptop").config
    train_text, validation_text = data.text_tokens()
    held_out = data.text_batch(validation_text, VALIDATION, config.seq_len, torch.Generator().manual_seed(7), hw.device)
    rows = []
    for seed in range(seeds):
        model = chosen.build(config, torch.Generator().manual_seed(seed))
        generator = torch.Generator().manual_seed(1000 + seed)
        history = training.train(
            model,
            chosen,
            lambda g=generator: data.text_batch(train_text, BATCH, config.seq_len, g, hw.device),
            steps,
            LR,
        )
        with torch.no_grad():
            loss = training.loss_of(model, *held_out, chosen).item()
        rows.append(
            {
                "variant": variant,
                "precision": chosen.label,
                "seed": seed,
                "validation_loss": loss,
                "train_loss_last10": history["loss"].tail(10).mean(),
                "kind": "emulated" if chosen.kind == "emulated" else "measured",
            }
        )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    hw = hardware.detect()
    workers = len(VARIANTS) if hw.device == "cuda" else 1
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(run, variant, options.seeds, options.steps) for variant in VARIANTS]
        rows = [row for job in jobs for row in job.result()]
    method = f"laptop model, {options.steps} steps of {BATCH} x 64 characters, lr {LR}, {options.seeds} seeds; validation on {VALIDATION} sequences; Python {hw.python}'s help texts"
    print(
        results.save(
            "text_quality",
            hw,
            rows,
            method,
            command=f"python -m benchmarks.text_quality --seeds {options.seeds} --steps {options.steps}",
        )
    )
    table = pd.DataFrame(rows).groupby("variant", sort=False)["validation_loss"].agg(["mean", "std", "min", "max"])
    base = table.loc["BF16"]
    table["minus BF16"] = table["mean"] - base["mean"]
    print(table.round(4).to_string())
    print(
        f"BF16's spread over seeds: {base['max'] - base['min']:.4f} nats; standard error of its mean {base['std'] / options.seeds**0.5:.4f}"
    )
