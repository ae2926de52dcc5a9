"""What this machine can do: device, versions, Transformer Engine or the reason why not, each recipe or the reason why not.

    python -m helpers.hardware              the hardware report
    python -m helpers.hardware --json       the same as JSON
    python -m helpers.hardware --fresh      decides anew (--fresh 600: each probing process may take 600 seconds)

The verdict comes from helpers/verdict.py, which has it from fresh processes (helpers/probe.py) or from the last time.
Two environment variables are read here:
    WORKSHOP_TIER     shows a lower tier on a better machine (a teacher preparing a room of T4s)
    WORKSHOP_PRESET   picks the model's size
"""

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from html import escape

from helpers import probe, verdict
from helpers.advice import Advice
from helpers.probe import OLDEST_CAPABILITY, RECIPES

TIERS = ("cpu", "fp32", "bf16", "fp8", "blackwell")
PRESET_NAMES = ("laptop", "compact", "scale_up")
FP8_KINDS = ("real", "emulated", "recorded", "off")
CARD_MIME = "application/vnd.fp8-workshop.card+json"
BLACKWELL_RECIPES = ("mxfp8", "nvfp4")
FIX_FIRST = "To fix, most useful first (run it in the workshop's folder, then restart the kernel):"


@dataclass(frozen=True)
class Hardware:
    """One machine as the workshop sees it. `recipes` maps a recipe's name to "" (works) or to the reason why not."""

    tier: str  # what the notebooks do; at most `machine_tier`
    machine_tier: str  # what the machine could do
    preset: str
    device: str  # "cpu" or "cuda"
    device_reason: str  # why there is no GPU; "" if there is one
    gpu: str | None
    capability: tuple[int, int] | None
    memory_gb: float | None
    driver: str | None
    cuda: str | None
    cudnn: str | None
    torch: str
    python: str
    te: str | None  # Transformer Engine's version if it is used
    te_reason: str  # why it is not used; "" if it is
    recipes: dict[str, str] = field(hash=False)
    advice: tuple[Advice, ...]  # what would make more work here, most useful first
    decided: str  # when, in UTC

    @property
    def backend(self) -> str:
        """ "te" where Transformer Engine's layers run, else "torch"."""
        return "te" if self.te else "torch"

    @property
    def fp8(self) -> bool:
        """Whether FP8 matrix multiplications run on this machine's tensor cores."""
        return self.recipes["delayed"] == ""

    @property
    def bf16(self) -> bool:
        """Whether BF16 is worth using: natively from compute capability 8.0, and on CPUs.

        `torch.cuda.is_bf16_supported()` says True on a T4 as well, where BF16 is emulated.
        """
        return self.device == "cpu" or self.tier != "fp32"

    @property
    def slug(self) -> str:
        """The folder under results/ for this machine, such as "nvidia-h200" or "cpu"; "nvidia-h200-as-bf16" for a lower tier.

        What a GPU measures while it plays a lesser one must not replace what it can do.
        """
        name = (self.gpu or "cpu").lower().replace(" ", "-")
        return name if self.gpu is None or self.tier == self.machine_tier else f"{name}-as-{self.tier}"

    def mode(self) -> str:
        """One line: what is on, what is off, and why."""
        te = f"TE {self.te} ON" if self.te else f"TE OFF ({self.te_reason})"
        why = self.recipes["delayed"]
        fp8 = "FP8 REAL" if self.fp8 else f"FP8 on this machine OFF{'' if why == self.te_reason else f' ({why})'}"
        return f"tier {self.tier} | {te} | {fp8}"

    def recipe_rows(self) -> list[tuple[str, str]]:
        """The recipes that work, then the others; those with the same reason together."""
        groups = {}
        for name, why in self.recipes.items():
            groups.setdefault(why, []).append(name)
        rows = []
        for why, names in sorted(groups.items(), key=lambda group: group[0] != ""):
            told = "they need Transformer Engine" if why and why == self.te_reason else why
            told = told or "a forward and a backward pass ran here"
            rows.append((f"recipes {'off' if why else 'REAL'}", f"{', '.join(names)}: {told}"))
        return rows

    def rows(self) -> list[tuple[str, str]]:
        """What works here and what does not, most useful first: (what, value)."""
        asked = f" (this machine could do {self.machine_tier})" if self.tier != self.machine_tier else ""
        rows = [
            ("tier", self.tier + asked),
            ("GPU", self.gpu or f"none: {self.device_reason}"),
            ("compute capability", f"{self.capability[0]}.{self.capability[1]}" if self.capability else "-"),
            ("GPU memory", f"{self.memory_gb:.0f} GB" if self.memory_gb else "-"),
            ("Transformer Engine", self.te or f"off: {self.te_reason}"),
            *self.recipe_rows(),
            ("model preset", self.preset),
            ("driver | CUDA | cuDNN", " | ".join(v or "-" for v in (self.driver, self.cuda, self.cudnn))),
            ("torch | Python", f"{self.torch} | {self.python}"),
            (
                "decided",
                f"{self.decided}, kept until something changes; `python -m helpers.hardware --fresh` decides anew",
            ),
        ]
        return rows

    def __str__(self) -> str:
        width = max(len(k) for k, _ in self.rows())
        fixes = [f"  {i}. {problem}\n       {fix}" for i, (problem, fix) in enumerate(self.advice, 1)]
        parts = [
            self.mode(),
            *([FIX_FIRST, *fixes] if fixes else []),
            *(f"  {k:<{width}}  {v}" for k, v in self.rows()),
        ]
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        body = "".join(
            f"<tr><th style='text-align:left'>{escape(k)}</th><td style='text-align:left'>{escape(v)}</td></tr>"
            for k, v in self.rows()
        )
        fixes = "".join(f"<li>{escape(problem)}<br><code>{escape(fix)}</code></li>" for problem, fix in self.advice)
        fixes = f"<p>{FIX_FIRST}</p><ol>{fixes}</ol>" if fixes else ""
        return f"<p><b>{escape(self.mode())}</b></p>{fixes}<table>{body}</table>"

    def card(self, fp8: str, note: str = "") -> "Card":
        """The card at the top of a notebook; `fp8` says where its FP8 numbers come from: real, emulated, recorded or off."""
        if fp8 not in FP8_KINDS:
            raise ValueError(f"fp8={fp8!r} is not known; choose one of {', '.join(FP8_KINDS)}")
        return Card(self, fp8, note)

    def as_dict(self) -> dict:
        advice = [entry._asdict() for entry in self.advice]
        return asdict(self) | {"advice": advice, "backend": self.backend, "fp8": self.fp8, "mode": self.mode()}


@dataclass(frozen=True)
class Card:
    """Which machine this is, and what is REAL, EMULATED or RECORDED below. Carries the same as JSON for the runner."""

    hardware: Hardware
    fp8: str
    note: str

    def __str__(self) -> str:
        return f"{self.hardware.gpu or 'CPU'} | {self.hardware.mode()}\nFP8 below: {self.fp8.upper()}. {self.note}{self.more()}"

    def more(self) -> str:
        return " `python -m helpers.hardware` says how to make more work here." if self.hardware.advice else ""

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        h = self.hardware
        html = (
            "<div style='border:1px solid #888;border-left:6px solid #0072b2;padding:.6em 1em;max-width:52em'>"
            f"<b>{escape(h.gpu or 'CPU, no NVIDIA GPU')}</b> · tier <b>{h.tier}</b> · preset <b>{h.preset}</b><br>"
            f"{escape(h.mode())}<br>FP8 below: <b>{self.fp8.upper()}</b>. {escape(self.note + self.more())}</div>"
        )
        return {"text/plain": str(self), "text/html": html, CARD_MIME: {"tier": h.tier, "fp8": self.fp8}}


def choose_tier(capability: tuple[int, int] | None, te: str | None, recipes: dict[str, str]) -> str:
    """The decision table. A claim is not enough: `recipes` says what ran (helpers/probe.py)."""
    if capability is None:
        return "cpu"
    if capability < OLDEST_CAPABILITY:
        return "fp32"
    if te and any(recipes[name] == "" for name in BLACKWELL_RECIPES):
        return "blackwell"
    if te and recipes["delayed"] == "":
        return "fp8"
    return "bf16"


@lru_cache(maxsize=1)
def import_te():
    """(transformer_engine.pytorch, version) or (None, the reason in one line). Imports it only where the verdict says that it works."""
    facts = _facts()
    if not facts["te"]:
        return None, facts["te_reason"]
    import torch

    if torch.__version__ != facts["torch"]:
        return (
            None,
            f"torch {facts['torch']} was installed while this process runs {torch.__version__}: restart the kernel",
        )
    te, version = probe.import_te()
    if te is None:
        return None, f"{version}. In a fresh process it works: restart the kernel"
    # TE compiles small functions anew for each shape; after 8 of them torch would warn and stop compiling.
    torch._dynamo.config.recompile_limit = 64
    return te, version


def from_environment(name: str, allowed: tuple[str, ...], default: str) -> str:
    value = os.environ.get(name) or default
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not known; choose one of {', '.join(allowed)}, or unset it")
    return value


@lru_cache(maxsize=1)
def _facts() -> dict:
    """The verdict on this machine, read or decided once a process."""
    return as_facts(verdict.verdict())


def as_facts(kept: dict) -> dict:
    """A verdict with tuples where JSON has lists."""
    capability = kept["capability"] and tuple(kept["capability"])
    return kept | {"capability": capability, "advice": tuple(Advice(*pair) for pair in kept["advice"])}


def detect() -> Hardware:
    """This machine, as WORKSHOP_TIER and WORKSHOP_PRESET show it. Imports Transformer Engine where it works.

    It does so first thing since TE must come before anything touches cuDNN: where the system has another cuDNN than torch
    brings, only this order works. Raises ValueError for a name that does not exist and for a tier above the machine's.
    """
    facts = _facts()
    te, why = import_te()
    if facts["te"] and te is None:
        restart = Advice("Transformer Engine works, but not in this process any more:", "Kernel > Restart Kernel")
        facts = facts | {"te": None, "te_reason": why, "recipes": dict.fromkeys(RECIPES, why), "advice": (restart,)}
    return as_hardware(facts)


def as_hardware(facts: dict) -> Hardware:
    """Facts about a machine, seen through WORKSHOP_TIER and WORKSHOP_PRESET. Raises as `detect` does."""
    machine_tier = choose_tier(facts["capability"], facts["te"], facts["recipes"])
    tier = from_environment("WORKSHOP_TIER", TIERS, machine_tier)
    if TIERS.index(tier) > TIERS.index(machine_tier):
        possible = ", ".join(TIERS[: TIERS.index(machine_tier) + 1])
        raise ValueError(f"WORKSHOP_TIER={tier!r} is above this machine ({machine_tier}); it can show {possible}")
    if tier != machine_tier:
        facts = facts | lower(facts, tier)
    preset = from_environment("WORKSHOP_PRESET", PRESET_NAMES, "laptop" if tier == "cpu" else "compact")
    return Hardware(tier=tier, machine_tier=machine_tier, preset=preset, **facts)


def lower(facts: dict, tier: str) -> dict:
    """The facts that change when a better machine shows a lower tier."""
    why = f"WORKSHOP_TIER={tier}"
    changed = {
        "recipes": {
            name: reason if tier == "fp8" and name not in BLACKWELL_RECIPES else reason or why
            for name, reason in facts["recipes"].items()
        }
    }
    if tier in ("cpu", "fp32"):
        changed |= {"te": None, "te_reason": why}
    if tier == "cpu":
        changed |= {
            "device": "cpu",
            "device_reason": why,
            "gpu": None,
            "capability": None,
            "memory_gb": None,
            "driver": None,
            "cudnn": None,
        }
    return changed


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m helpers.hardware", description="What this machine can do, and why not."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--fresh",
        nargs="?",
        type=float,
        const=verdict.LIMIT_S,
        metavar="SECONDS",
        help=f"decide anew; a probing process may take so long (default {verdict.LIMIT_S:g})",
    )
    asked = parser.parse_args()
    try:
        hw = as_hardware(as_facts(verdict.verdict(asked.fresh)))
    except (ValueError, RuntimeError) as error:
        sys.exit(f"hardware: {error}")
    print(json.dumps(hw.as_dict(), indent=1) if asked.json else hw)


if __name__ == "__main__":
    main()
