"""Times a decoding step, argmax and append included, in every strategy. Each variant runs in a process of its own.

    python -m benchmarks.generation --case compact [--variants fixed-te-graph-b1 cache-graph-b1 …]

One model is trained first, in FP8; every variant gets its weights, and has to continue the held-out prompts exactly before it
is timed. Weights are held in BF16, so that no step casts them. Writes artifacts/results/<gpu>/generation.json.
"""

import argparse
import tempfile
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import pandas as pd
import torch

from benchmarks.variants import compile_ends
from helpers import checkpoints, data, generation, hardware, models, precision, results, training
from helpers.benchmark import quartiles, time_once
from helpers.hardware import import_te

CHECKED = data.CONTINUATION_LENGTH
SAMPLES = 20


@dataclass(frozen=True)
class Variant:
    strategy: str
    backend: str
    batch: int
    precision: str = "bf16"
    graph: bool = False
    compiled: bool = False


VARIANTS = {
    "growing-te-b1": Variant("growing", "te", 1),
    "growing-torch-b1": Variant("growing", "torch", 1),
    "fixed-te-b1": Variant("fixed", "te", 1),
    "fixed-te-graph-b1": Variant("fixed", "te", 1, graph=True),
    "fixed-te-graph-b64": Variant("fixed", "te", 64, graph=True),
    "fixed-te-fp8-graph-b64": Variant("fixed", "te", 64, "fp8", graph=True),
    # Our own cache: TE's copies a token's keys and values with one thread, and its attention takes more kernels.
    "cache-graph-b1": Variant("cached", "torch", 1, graph=True, compiled=True),
    "cache-graph-b64": Variant("cached", "torch", 64, graph=True, compiled=True),
}


def measure(name: str, case: str, weights: Path) -> dict:
    """One variant: the fields of its row. Raises ValueError if the prompts are not continued exactly."""
    import_te()  # before anything touches cuDNN: see helpers/hardware.py
    hw, it, config = hardware.detect(), VARIANTS[name], models.preset(case).config
    if it.precision == "fp8":
        chosen = precision.choose("fp8", hw)
        model = chosen.build(config)
        checkpoints.load(weights, model, chosen)
    else:
        chosen = precision.Precision(it.precision, "real", it.backend, hw.device)
        model = chosen.build(config)
        checkpoints.load_weights(weights, model)
    model.to(torch.bfloat16)
    if it.backend == "te" and it.graph:
        compile_ends(model)
    prompts, truth = (rows[: it.batch] for rows in data.held_out_prompts())
    per_sample = 1 if it.strategy == "growing" else (config.seq_len - data.PROMPT_LENGTH - CHECKED) // SAMPLES
    with generation.decoding(model, list(prompts), chosen, it.strategy, graph=it.graph, compiled=it.compiled) as step:
        found = torch.stack([step().clone() for _ in range(CHECKED)], 1).cpu()
        exact = int((found == truth).all(1).sum())
        if exact < 63 / 64 * it.batch:
            raise ValueError(f"{exact} of {it.batch} prompts are continued exactly; a step that errs is not timed")

        def some_steps():
            for _ in range(per_sample):
                step()

        samples = [time_once(some_steps, hw.device) / per_sample for _ in range(SAMPLES)]
    median, iqr = quartiles(samples)
    return {"precision": chosen.label, "exact": exact, "median_ms": median, "iqr_ms": iqr, "samples": samples}


def run(name: str, case: str, weights: Path) -> dict:
    """`measure` in a fresh process. What goes wrong there becomes the row's `error`."""
    row = {"case": case, "variant": name, **vars(VARIANTS[name]), "kind": "measured", "error": ""}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return row | pool.submit(measure, name, case, weights).result()
        except BrokenProcessPool:
            return row | {"error": "the process died"}
        except Exception as error:  # a rival that fails must not stop the others
            return row | {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]}


def trained(case: str, hw: hardware.Hardware, folder: Path) -> Path:
    """The weights and FP8 state that all variants use."""
    preset, chosen = models.preset(case), precision.choose("fp8", hw)
    model, generator = chosen.build(preset.config), torch.Generator().manual_seed(3)
    training.train(
        model,
        chosen,
        lambda: data.arithmetic_batch(preset.batch, preset.config.seq_len, generator, hw.device),
        preset.steps,
        preset.lr,
    )
    checkpoints.save(folder / "model.safetensors", model, chosen, preset.steps)
    return folder / "model.safetensors"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="compact", choices=models.PRESETS, help="laptop: for a try on a CPU")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, metavar="VARIANT", help="default: all")
    options = parser.parse_args()
    hw = hardware.detect()
    rows = []
    method = (
        f"prompts of {data.PROMPT_LENGTH} tokens, {CHECKED} steps checked first, then {SAMPLES} samples of several steps in a "
        "row (growing: of one); CUDA events; BF16 weights; a process of its own for each variant"
    )
    with tempfile.TemporaryDirectory() as folder:
        weights = trained(options.case, hw, Path(folder))
        for name in options.variants or VARIANTS:
            rows.append(run(name, options.case, weights))
            print(f"{name}: {rows[-1]['error'] or '{median_ms:.3f} ms'.format(**rows[-1])}", flush=True)
            results.merge("generation", hw, rows[-1:], method, keys=("case", "variant"))
    columns = ["variant", "precision", "median_ms", "iqr_ms", "exact", "error"]
    print(pd.DataFrame(rows).reindex(columns=columns).round(3).to_string(index=False))


if __name__ == "__main__":
    main()
