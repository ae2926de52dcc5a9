"""Times one training step of the same model in every variant, side by side. One run does one case and merges its rows.

    python -m benchmarks.training_step --case compact [--variants te-bf16 te-fp8-delayed …] [--processes 3]

Each variant lives in a process of its own; they take turns (a turn is a few steps in a row), so that a drifting clock hits
all alike. The reference takes part in every group; a group is as many variants as fit into the GPU's memory. Before timing,
the losses of twelve steps on the same batches are compared with the reference's. Writes artifacts/results/<gpu>/benchmarks.json.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from statistics import mean, median

import pandas as pd

from benchmarks.variants import CASES, VARIANTS, Case
from helpers import hardware, results
from helpers.benchmark import paired_speedup, quartiles

REFERENCE = "torch-compile-graphs-bf16"
ON_CPU = ("torch-eager-bf16", "torch-compile-bf16")
TURNS, STEPS_A_TURN, LOSSES = 8, 5, 12
LARGEST_LOSS_DIFFERENCE = 0.15  # nats, in the first steps; FP8 and BF16 round differently
CLOCK_QUERY = "clocks.sm,power.draw,temperature.gpu,clocks_event_reasons.active"


class Rival:
    """A worker process and what it has measured."""

    def __init__(self, case: str, variant: str):
        self.variant, self.error, self.found = variant, "", {}
        self.turns: list[list[float]] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", case, variant],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=results.ROOT,
        )

    def answer(self):
        """The next answer; None after an error, which is kept."""
        if self.error:
            return None
        line = self.process.stdout.readline()
        reply = json.loads(line) if line else {"error": f"the process ended with status {self.process.wait()}"}
        if "error" in reply:
            self.error = reply["error"]
            self.process.kill()
        return reply.get("ok")

    def ask(self, command: str):
        if not self.error:
            try:
                self.process.stdin.write(command + "\n")
                self.process.stdin.flush()
            except BrokenPipeError:
                pass  # answer() says why
        return self.answer()

    def stop(self) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()


class Clocks:
    """Samples the GPU's SM clock (MHz), power (W), temperature and throttle reasons while a group is timed."""

    def __enter__(self):
        self.lines: list[str] = []
        try:
            self.process = subprocess.Popen(
                ["nvidia-smi", f"--query-gpu={CLOCK_QUERY}", "--format=csv,noheader,nounits", "-lms", "200"],
                stdout=subprocess.PIPE,
                text=True,
            )
        except OSError:
            self.process = None
            return self
        self.thread = threading.Thread(target=lambda: self.lines.extend(self.process.stdout), daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *exception):
        if self.process:
            self.process.kill()
            self.thread.join(timeout=5)

    def summary(self) -> dict:
        samples = [parts for line in self.lines if len(parts := [p.strip() for p in line.split(",")]) == 4]
        if not samples:
            return {}
        clock, power, temperature = ([float(s[i]) for s in samples] for i in range(3))
        return {
            "sm_clock_mhz": [min(clock), median(clock), max(clock)],
            "power_w": [min(power), median(power), max(power)],
            "temperature_c": max(temperature),
            "throttle_reasons": sorted({s[3] for s in samples}),
        }


def time_group(case: str, names: list[str]) -> list[Rival]:
    """All of `names` side by side. What fails keeps its error; the others go on."""
    rivals = [Rival(case, name) for name in names]
    for rival in rivals:
        rival.answer()  # ready
        print(f"    {rival.variant}: {rival.error or 'ready'}", flush=True)
    for rival in rivals:
        rival.found["losses"] = rival.ask(f"losses {LOSSES}")
    with Clocks() as clocks:
        for _ in range(TURNS):
            for rival in rivals:
                if (ms := rival.ask(f"time {STEPS_A_TURN}")) is not None:
                    rival.turns.append(ms)
    for rival in rivals:
        rival.found |= rival.ask("memory") or {}
        rival.found |= rival.ask("kernels") or {}
        rival.found["clocks"] = clocks.summary()
        rival.stop()
    return rivals


def check_losses(rival: Rival, reference: Rival) -> None:
    """An honest rival trains as the reference does: its losses fall, and stay near the reference's."""
    losses, others = rival.found["losses"], reference.found["losses"]
    if not losses or not others:
        return
    difference = max(abs(a - b) for a, b in zip(losses, others, strict=True))
    rival.found["largest_loss_difference"] = difference
    if difference > LARGEST_LOSS_DIFFERENCE:
        rival.error = (
            f"its losses differ from {reference.variant}'s by up to {difference:.3f} nats: not the same training"
        )
    elif mean(losses[-3:]) >= mean(losses[:3]):
        rival.error = f"its loss does not fall ({mean(losses[:3]):.3f} to {mean(losses[-3:]):.3f}, means of three)"


def row_of(case_name: str, rival: Rival, reference: Rival, ceilings: dict, round_: int, group: int) -> dict:
    case = CASES[case_name]
    row = {
        "case": case_name,
        "variant": rival.variant,
        "params": case.config.n_params(),
        "process": round_,
        "group": group,
        "reference": reference.variant,
        "kind": "measured",
        "error": rival.error,
        **rival.found,
    }
    if rival.turns and not rival.error:
        samples = [ms for turn in rival.turns for ms in turn]
        row["samples"], row["turns"] = samples, rival.turns
        row["median_ms"], row["iqr_ms"] = quartiles(samples)
        row["tflops"] = case.config.flops_per_step(case.batch) / row["median_ms"] / 1e9
        row["ceiling_tflops"] = ceilings.get("fp8" if "fp8" in rival.variant else "bf16")
        row["ceiling_share"] = row["tflops"] / row["ceiling_tflops"] if row["ceiling_tflops"] else None
        if reference.turns and not reference.error:
            row["speedup"] = paired_speedup(reference.turns, rival.turns)
    return row


def groups_of(names: list[str], reference: str, together: int) -> list[list[str]]:
    others = [name for name in names if name != reference]
    size = max(1, together - 1)
    return [[reference, *others[i : i + size]] for i in range(0, len(others), size)] or [[reference]]


def fit_together(case: Case, memory_gb: float) -> int:
    """How many variants' memory fits at once, by a rough estimate: 24 bytes a parameter and 60 a token, layer and width."""
    config = case.config
    one = (24 * config.n_params() + 60 * case.tokens * config.n_layers * config.d_model) / 1e9 + 1.5
    return max(2, int(0.9 * memory_gb / one))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", required=True, choices=CASES)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, metavar="VARIANT", help="default: all")
    parser.add_argument("--processes", type=int, default=1, help="repeat with fresh processes")
    parser.add_argument("--together", type=int, help="variants at once; default: what fits into memory")
    options = parser.parse_args()
    hw = hardware.detect()
    on_gpu = hw.device == "cuda"
    names = options.variants or (list(VARIANTS) if on_gpu else list(ON_CPU))
    reference = REFERENCE if on_gpu else ON_CPU[0]
    together = options.together or (fit_together(CASES[options.case], hw.memory_gb) if on_gpu else 2)
    asker = Rival(options.case, "ceiling")
    ceilings = asker.answer() or {}
    asker.stop()
    print(
        f"{options.case}: GEMM alone, TFLOP/s: { ({k: round(v) for k, v in ceilings.items()}) }; {together} at a time"
    )
    rows = []
    for process in range(options.processes):
        for group, members in enumerate(groups_of(names, reference, together)):
            started = time.monotonic()
            print(f"  process {process + 1}, group {group + 1}: {', '.join(members)}", flush=True)
            rivals = time_group(options.case, members)
            for rival in rivals:
                check_losses(rival, rivals[0])
                rows.append(row_of(options.case, rival, rivals[0], ceilings, process, group))
            method = (
                f"processes in turns of {STEPS_A_TURN} steps after one untimed, {TURNS} turns; CUDA events; whole step, batches "
                f"made before; losses of {LOSSES} steps compared first; kernels from 3 profiled steps"
            )
            results.merge("benchmarks", hw, rows, method, keys=("case", "variant", "process", "group"))
            print(f"    took {time.monotonic() - started:.0f} s", flush=True)
    table = pd.DataFrame(rows)
    if "median_ms" not in table:
        table["median_ms"] = None
    shown = table.reindex(
        columns=[
            "variant",
            "process",
            "median_ms",
            "iqr_ms",
            "tflops",
            "ceiling_share",
            "reserved_gb",
            "speedup",
            "error",
        ]
    )
    with pd.option_context("display.width", 200, "display.max_colwidth", 60):
        print(shown.round(3).to_string(index=False))


if __name__ == "__main__":
    main()
