"""What this machine can do: device, versions, Transformer Engine or the reason why not, each recipe or the reason why not.

    python -m helpers.hardware           the hardware report
    python -m helpers.hardware --json    the same as JSON

This is the only module that reads environment variables:
    WORKSHOP_TIER     shows a lower tier on a better machine (a teacher preparing a room of T4s)
    WORKSHOP_PRESET   picks the model's size
"""

import ctypes
import importlib
import json
import os
import platform
import subprocess
import sys
import warnings
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from html import escape

import torch

TIERS = ("cpu", "fp32", "bf16", "fp8", "blackwell")
PRESET_NAMES = ("laptop", "compact", "scale_up")
OLDEST_TE = (2, 9)
FP8_KINDS = ("real", "emulated", "recorded", "off")
CARD_MIME = "application/vnd.fp8-workshop.card+json"

# name -> (TE's probe, TE's recipe class). Source: transformer_engine/pytorch/quantization.py, common/recipe/__init__.py.
RECIPES = {
    "delayed": ("is_fp8_available", "DelayedScaling"),
    "current": ("is_fp8_available", "Float8CurrentScaling"),
    "block": ("is_fp8_block_scaling_available", "Float8BlockScaling"),
    "mxfp8": ("is_mxfp8_available", "MXFP8BlockScaling"),
    "nvfp4": ("is_nvfp4_available", "NVFP4BlockScaling"),
}
BLACKWELL_RECIPES = ("mxfp8", "nvfp4")


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
        """The folder under results/ for this machine, such as "nvidia-h200" or "cpu"."""
        return (self.gpu or "cpu").lower().replace(" ", "-")

    def mode(self) -> str:
        """One line: what is on, what is off, and why."""
        te = f"TE {self.te} ON" if self.te else f"TE OFF ({self.te_reason})"
        fp8 = "FP8 REAL" if self.fp8 else f"FP8 on this machine OFF ({self.recipes['delayed']})"
        return f"tier {self.tier} | {te} | {fp8}"

    def rows(self) -> list[tuple[str, str]]:
        """The report, most useful first: (what, value)."""
        asked = f" (this machine could do {self.machine_tier})" if self.tier != self.machine_tier else ""
        rows = [
            ("tier", self.tier + asked),
            ("GPU", self.gpu or f"none: {self.device_reason}"),
            ("compute capability", f"{self.capability[0]}.{self.capability[1]}" if self.capability else "-"),
            ("GPU memory", f"{self.memory_gb:.0f} GB" if self.memory_gb else "-"),
            ("Transformer Engine", self.te or f"off: {self.te_reason}"),
            *(
                (f"recipe {name}", f"off: {why}" if why else "REAL: a forward and a backward ran here")
                for name, why in self.recipes.items()
            ),
            ("model preset", self.preset),
            ("driver | CUDA | cuDNN", " | ".join(v or "-" for v in (self.driver, self.cuda, self.cudnn))),
            ("torch | Python", f"{self.torch} | {self.python}"),
        ]
        return rows

    def __str__(self) -> str:
        width = max(len(k) for k, _ in self.rows())
        return "\n".join([self.mode(), *(f"  {k:<{width}}  {v}" for k, v in self.rows())])

    def _repr_html_(self) -> str:
        body = "".join(
            f"<tr><th style='text-align:left'>{escape(k)}</th><td style='text-align:left'>{escape(v)}</td></tr>"
            for k, v in self.rows()
        )
        return f"<p><b>{escape(self.mode())}</b></p><table>{body}</table>"

    def card(self, fp8: str, note: str = "") -> "Card":
        """The card at the top of a notebook; `fp8` says where its FP8 numbers come from: real, emulated, recorded or off."""
        if fp8 not in FP8_KINDS:
            raise ValueError(f"fp8={fp8!r} is not known; choose one of {', '.join(FP8_KINDS)}")
        return Card(self, fp8, note)

    def as_dict(self) -> dict:
        return asdict(self) | {"backend": self.backend, "fp8": self.fp8, "mode": self.mode()}


@dataclass(frozen=True)
class Card:
    """Which machine this is, and what is REAL, EMULATED or RECORDED below. Carries the same as JSON for the runner."""

    hardware: Hardware
    fp8: str
    note: str

    def __str__(self) -> str:
        return f"{self.hardware.gpu or 'CPU'} | {self.hardware.mode()}\nFP8 below: {self.fp8.upper()}. {self.note}"

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        h = self.hardware
        html = (
            "<div style='border:1px solid #888;border-left:6px solid #0072b2;padding:.6em 1em;max-width:52em'>"
            f"<b>{escape(h.gpu or 'CPU, no NVIDIA GPU')}</b> · tier <b>{h.tier}</b> · preset <b>{h.preset}</b><br>"
            f"{escape(h.mode())}<br>FP8 below: <b>{self.fp8.upper()}</b>. {escape(self.note)}</div>"
        )
        return {"text/plain": str(self), "text/html": html, CARD_MIME: {"tier": h.tier, "fp8": self.fp8}}


def choose_tier(capability: tuple[int, int] | None, te: str | None, recipes: dict[str, str]) -> str:
    """The decision table. A claim is not enough: `recipes` says what ran (see `prove`)."""
    if capability is None:
        return "cpu"
    if capability < (8, 0):
        return "fp32"
    if te and any(recipes[name] == "" for name in BLACKWELL_RECIPES):
        return "blackwell"
    if te and recipes["delayed"] == "":
        return "fp8"
    return "bf16"


def import_te():
    """(transformer_engine.pytorch, version) or (None, the reason in one line).

    A broken installation raises, according to what is broken, ImportError, OSError, FileNotFoundError, StopIteration,
    AssertionError or RuntimeError; the top-level `import transformer_engine` swallows some of them, so it is the
    submodule that is imported.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected a Jax installation")  # TE looks for its JAX half too
            te = importlib.import_module("transformer_engine.pytorch")
        version = importlib.import_module("transformer_engine").__version__
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("transformer_engine"):
            return None, f"Transformer Engine is not installed ({error})"
        return None, f"Transformer Engine does not import: {type(error).__name__}: {error}"
    except Exception as error:
        first_line = (str(error).strip().splitlines() or ["no message"])[0]
        return None, f"Transformer Engine does not import: {type(error).__name__}: {first_line}"
    if tuple(int(n) for n in version.split(".")[:2]) < OLDEST_TE:
        return None, f"Transformer Engine {version} is older than 2.9; install a newer one"
    # TE compiles small functions anew for each shape; after 8 of them torch would warn and stop compiling.
    torch._dynamo.config.recompile_limit = 64
    return te, version


def prove(te, name: str) -> str:
    """Runs one layer forward and backward under a recipe: "" if it worked, else the reason.

    TE's own probe is a claim (NVFP4 was reported available and crashed on 12.0, TE issue 2956), so it only opens the door.
    """
    probe, recipe_class = RECIPES[name]
    try:
        available, reason = getattr(te, probe)(return_reason=True)
        if not available:
            return reason
        recipe = getattr(importlib.import_module("transformer_engine.common.recipe"), recipe_class)()
        layer = te.Linear(128, 128, params_dtype=torch.bfloat16, device="cuda")
        x = torch.ones(128, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        with te.autocast(enabled=True, recipe=recipe):
            y = layer(x)
        y.sum().backward()
        torch.cuda.synchronize()
        if not bool(torch.isfinite(x.grad).all()):
            return "a test layer's gradient was not finite"
    except Exception as error:
        return f"claimed by TE, but a test layer failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""


def why_no_gpu() -> str:
    """ "" if torch sees a GPU, else the most likely reason."""
    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) was built without CUDA"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides it"
    return "no NVIDIA driver answers, or it is too old for this torch"


def driver_version() -> str | None:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return (
            subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()[0].strip()
        )
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def cudnn_version() -> int:
    """The cuDNN that is loaded, as 91400 for 9.14.0. Torch refuses to say when TE brought another than torch was built with."""
    try:
        return torch.backends.cudnn.version()
    except RuntimeError:
        return ctypes.CDLL("libcudnn.so.9").cudnnGetVersion()


def from_environment(name: str, allowed: tuple[str, ...], default: str) -> str:
    value = os.environ.get(name) or default
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not known; choose one of {', '.join(allowed)}, or unset it")
    return value


@lru_cache(maxsize=1)
def _facts() -> dict:
    """What does not depend on the environment variables; slow with a GPU (importing TE takes seconds), so done once a process."""
    no_gpu = why_no_gpu()
    # TE first: where the system has another cuDNN than torch brings, only this order works.
    te, te_version = import_te()
    cudnn = None if no_gpu else cudnn_version()
    te_reason = "" if te else te_version
    capability = None if no_gpu else torch.cuda.get_device_capability()
    if no_gpu:
        te_reason = te_reason or f"Transformer Engine {te_version} is installed but needs a GPU: {no_gpu}"
    elif capability < (8, 0):
        te_reason = f"compute capability {capability[0]}.{capability[1]} is below 8.0, which Transformer Engine needs"
    if te_reason:
        recipes = dict.fromkeys(RECIPES, te_reason if not no_gpu else f"no GPU: {no_gpu}")
    else:
        recipes = {name: prove(te, name) for name in RECIPES}
    return {
        "device": "cpu" if no_gpu else "cuda",
        "device_reason": no_gpu,
        "gpu": None if no_gpu else torch.cuda.get_device_name(),
        "capability": capability,
        "memory_gb": None if no_gpu else torch.cuda.get_device_properties(0).total_memory / 1e9,
        "driver": None if no_gpu else driver_version(),
        "cuda": torch.version.cuda,
        "cudnn": f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}" if cudnn else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "te": None if te_reason else te_version,
        "te_reason": te_reason,
        "recipes": recipes,
    }


def detect() -> Hardware:
    """Looks at this machine, and at WORKSHOP_TIER and WORKSHOP_PRESET.

    Raises ValueError for a name that does not exist and for a tier above the machine's.
    """
    facts = dict(_facts())
    machine_tier = choose_tier(facts["capability"], facts["te"], facts["recipes"])
    tier = from_environment("WORKSHOP_TIER", TIERS, machine_tier)
    if TIERS.index(tier) > TIERS.index(machine_tier):
        possible = ", ".join(TIERS[: TIERS.index(machine_tier) + 1])
        raise ValueError(f"WORKSHOP_TIER={tier!r} is above this machine ({machine_tier}); it can show {possible}")
    if tier != machine_tier:
        facts |= lower(facts, tier)
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


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--json"]):
        sys.exit(f"hardware: {' '.join(sys.argv[1:])!r} is not known; use no argument, or --json")
    try:
        found = detect()
    except ValueError as error:
        sys.exit(f"hardware: {error}")
    print(json.dumps(found.as_dict(), indent=2) if sys.argv[1:] else found)
