"""From what does not work to one command that mends it, most useful first.

Symptoms are messages as they were reported; "TE issue n" is an issue of NVIDIA/TransformerEngine, "torch issue n" one of
pytorch/pytorch. A symptom without a remedy, such as a GPU that has no FP8, gets no advice.
"""

import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TAKEN = "out of memory|busy or unavailable"
NOT_READY = "Error 802|system not yet initialized"
UNFIT = (
    "Error 80[34]|forward compatibility|unknown error|initialization (failed|error)|took more than|ended the process"
)
NOT_A_STRAY = ("NVTE_BUILD_", "NVTE_CUDA_", "NVTE_FRAMEWORK")  # these matter while TE is compiled


class Advice(NamedTuple):
    problem: str
    fix: str  # one command line, to be run in the workshop's folder


def python() -> str:
    """The running Python as one types it in the workshop's folder."""
    if Path(sys.prefix) == ROOT / ".venv":
        return str(Path(sys.executable).relative_to(ROOT))
    return shlex.quote(sys.executable)


def commands(cuda: str | None, installed: dict) -> dict[str, str]:
    """The commands that the advice is made of, for a torch built for this CUDA."""
    major = (cuda or "13").split(".")[0]
    suffix = "-cu12" if major == "12" else ""  # NVIDIA's packages for CUDA 13 have none, cuDNN and TE's core excepted
    # colab_setup.sh looks for .venv by itself
    setup = "bash colab_setup.sh --force" + ("" if python().startswith(".venv") else f" --python {python()}")
    pip = f"{python()} -m pip"
    names = "transformer_engine transformer_engine_torch transformer_engine_cu12 transformer_engine_cu13"
    return {
        "setup": setup,
        "pip": pip,
        "remove": f"{pip} uninstall -y {names}",
        # pip keeps the extension that it compiled and would install the same again
        "rebuild": f"{pip} cache remove transformer_engine_torch; {setup}",
        "newest": f'{pip} install --upgrade --no-build-isolation "transformer_engine[pytorch,core_cu{major}]"',
        "torch": f"{pip} install --upgrade torch && {setup}",
        "cublas": f"{pip} install --upgrade nvidia-cublas{suffix}",
        "nvrtc": f"{pip} install nvidia-cuda-nvrtc{suffix}",
        "curand": f"{pip} install nvidia-curand{suffix}",
        "cudnn_package": f"nvidia-cudnn-cu{major}",
        "own_cudnn": f'export CUDNN_HOME="$({python()} -c "import nvidia.cudnn as c; print(c.__path__[0])")"',
        "have_cudnn": installed.get(f"nvidia_cudnn_cu{major}", ["0"])[0],
        "driver": {"12": "525", "13": "580"}.get(major, "a newer one"),
        "who": "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv",
    }


def version(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text)[:3])


# ------------------------------------------------------------------------------------------------ symptoms

# (symptom, what is wrong, fix); braces: `commands`, or a group of the symptom's own. The first that fits counts.
MEMORY = (
    "out of memory",
    "Other processes hold nearly all of the GPU's memory. Stop one, such as another notebook's kernel. This lists them:",
    "{who}",
)
BUSY = (
    "busy or unavailable",
    "Another process holds the GPU, whose compute mode allows one (torch issue 100691). Stop it. This shows it:",
    "{who}",
)
CUDNN_MIXED = (
    r"[Ss]ublibrar|SUBLIBRARY|cuDNN version incompatib",
    "cuDNN libraries of two installations are mixed (torch issue 185512). Let Transformer Engine use torch's; before Jupyter starts:",
    "{own_cudnn}",
)

GPU = [
    MEMORY,
    BUSY,
    (r"CUDA_VISIBLE_DEVICES=\S* hides it", "CUDA_VISIBLE_DEVICES hides every GPU. Before Jupyter starts:", "unset CUDA_VISIBLE_DEVICES"),
    (
        r"driver on your system is too old \(found version (?P<found>1[2-9]\d{3})\)",
        "The NVIDIA driver is too old: torch {torch_version}, built for CUDA {cuda}, needs driver {driver} or newer. Update the "
        "driver; where you cannot, take the last torch for CUDA 12:",
        '{pip} install "torch==2.10.*" && {setup}',
    ),
    (
        r"driver on your system is too old",
        "The NVIDIA driver is too old: torch {torch_version}, built for CUDA {cuda}, needs driver {driver} or newer. On Ubuntu:",
        "sudo apt-get install nvidia-driver-580 && sudo reboot",
    ),
    (
        "Found no NVIDIA driver",
        "No NVIDIA driver answers. If this machine has an NVIDIA GPU: install the driver; in a container, start it with "
        "--gpus all; in Colab, choose Runtime > Change runtime type > GPU. Then this must list the GPU:",
        "nvidia-smi",
    ),
    (
        NOT_READY,
        "The GPUs wait for NVIDIA's Fabric Manager (torch issue 35710):",
        "sudo systemctl restart nvidia-fabricmanager",
    ),
    (
        UNFIT,
        "The driver and its libraries do not fit each other, as after an update without a restart (torch issue 40671):",
        "sudo reboot",
    ),
    (
        r"\(([3-6]\.\d|7\.[0-4])\): .*no kernel image",
        "Torch {torch_version} does not know this GPU any more. The last one for CUDA 12.6 does:",
        '{pip} install "torch==2.7.*"',
    ),
    ("no kernel image", "This torch has no kernels for this GPU (torch issue 167244). Take a newer one:", "{torch}"),
]  # fmt: skip

TE = [
    MEMORY,
    BUSY,
    ("is not installed", "Transformer Engine is not installed for this Python:", "{setup}"),
    ("is older than", "This Transformer Engine is too old for the notebooks:", "{remove} && {setup}"),
    CUDNN_MIXED,
    (
        r"undefined symbol: cublas",
        "Transformer Engine needs a newer cuBLAS than torch brought (TE issue 2504):",
        "{cublas}",
    ),
    (
        r"undefined symbol: \S*transformer_engine|Multiple files found",
        "Two versions of Transformer Engine are mixed (TE issues 2504, 2410). Remove both and install one:",
        "{remove}; {rebuild}",
    ),
    (
        "undefined symbol",
        "Transformer Engine was compiled for another torch than this one (TE issues 1283, 1684). Compile it again:",
        "{rebuild}",
    ),
    (
        "ended the process",
        "Transformer Engine crashes: it was most likely compiled for another torch. Compile it again:",
        "{rebuild}",
    ),
    (
        "took more than",
        "Transformer Engine did not come to an end. On a slow disk, give it ten minutes:",
        "{python} -m helpers.hardware --fresh 600",
    ),
    (
        "cudnn shared object not found|libcudnn",
        "Transformer Engine finds no cuDNN:",
        '{pip} install "{cudnn_package}>=9.12,<10"',
    ),
    (
        r"lib(cuda|cu|nv)\w+\.so\.\d+: cannot open",
        "Transformer Engine was installed for another CUDA than torch's (TE issue 2040). Install the one for CUDA {cuda}:",
        "{setup}",
    ),
    (
        "Could not find shared object file|StopIteration",
        "Transformer Engine's core is there, its PyTorch extension is not (TE issues 1981, 1541):",
        "{setup}",
    ),
    (
        "package version mismatch|meta package|Could not find",
        "Transformer Engine's packages are incomplete, or left over from several installations (TE issue 2410). Begin anew:",
        "{remove}; {setup}",
    ),
    ("nvrtc shared object not found", "A CUDA library that Transformer Engine loads is missing:", "{nvrtc}"),
    ("curand shared object not found", "A CUDA library that Transformer Engine loads is missing:", "{curand}"),
    (r"No module named '(?P<module>\w+)", "Transformer Engine needs the package {module}:", "{pip} install {module}"),
    ("", "Transformer Engine is damaged. Remove it and install it again:", "{remove}; {rebuild}"),
]

RECIPE = [
    MEMORY,
    BUSY,
    CUDNN_MIXED,
    (
        "Unable to find suitable cuBLAS",
        "cuBLAS has no such product for this GPU ({recipes}; TE issue 1654). A newer one may:",
        "{cublas}",
    ),
    (
        "no kernel image",
        "Transformer Engine was compiled without kernels for this GPU ({recipes}; TE issue 3217). Install it anew:",
        "{remove}; {rebuild}",
    ),
    (
        "claimed by TE",
        "Transformer Engine offers {recipes} here, and it fails (as in TE issue 2956): it stays off, the rest is not "
        "affected. A newer version may have mended it:",
        "{newest}",
    ),
    (
        r"requires compute capability 9\.0 or higher and CUDA >= 12\.9|CublasLt version|Cuda version",
        "This GPU could run {recipes}, with a torch that is built for a newer CUDA than {cuda}:",
        "{torch}",
    ),
]


# ------------------------------------------------------------------------------------------------ advising


def advise(facts: dict, here: dict) -> list[Advice]:
    """Advice for the `facts` of helpers/verdict.py, found in the state `here`."""
    names = commands(facts["cuda"], here["packages"]) | {
        "python": python(),
        "cuda": facts["cuda"],
        "torch_version": facts["torch"],
    }
    if facts["device_reason"]:
        if "built without CUDA" in facts["device_reason"]:
            return [no_cuda_build(names)] if here["driver"] and here["platform"] == "linux" else []
        return first_fitting(GPU, facts["device_reason"], names)
    strays = [name for name in here["variables"] if name.startswith("NVTE_") and not name.startswith(NOT_A_STRAY)]
    stray, failed = [], bool(facts["te_reason"]) or any("claimed by TE" in why for why in facts["recipes"].values())
    if strays:
        set_to = ", ".join(f"{name}={here['variables'][name]}" for name in strays)
        problem = f"{set_to} changes what Transformer Engine does. Unless you mean it, before Jupyter starts:"
        stray = [Advice(problem, f"unset {' '.join(strays)}")]
    if "is below 8.0" in facts["te_reason"]:
        return []
    if here["platform"] != "linux" and not facts["te"]:
        problem = "Transformer Engine exists for Linux only. On Windows, work inside its Linux (WSL):"
        return [Advice(problem, "wsl --install")] if here["platform"] == "win32" else []
    others = about_te(facts["te_reason"], names) if facts["te_reason"] else about_recipes(facts, names)
    return stray + others if failed else others + stray


def no_cuda_build(names: dict) -> Advice:
    problem = (
        f"This machine has an NVIDIA GPU, and torch {names['torch_version']} is a build without CUDA. Take one with:"
    )
    return Advice(problem, "{pip} uninstall -y torch && {pip} install torch && {setup}".format(**names))


def about_te(why: str, names: dict) -> list[Advice]:
    old = re.search(r"requires cuDNN (?P<needed>[\d.]+) or later, but the cuDNN runtime is (?P<found>[\d.]+\d)", why)
    if not old:
        return first_fitting(TE, why, names)
    if version(names["have_cudnn"]) >= version(old["needed"]):  # TE loads the system's first (TE issue 1210)
        problem = f"Transformer Engine finds the system's cuDNN {old['found']}, too old, before torch's {names['have_cudnn']}. Before Jupyter starts:"
        return [Advice(problem, names["own_cudnn"])]
    problem = f"Transformer Engine needs cuDNN {old['needed']}; {old['found']} is installed (TE issue 3236):"
    return [Advice(problem, f'{names["pip"]} install "{names["cudnn_package"]}>={old["needed"]},<10"')]


def about_recipes(facts: dict, names: dict) -> list[Advice]:
    """One advice for each cause, naming the recipes that it stops."""
    if tuple(facts["capability"]) < (8, 9):
        return []  # no FP8 in this GPU: nothing to mend
    causes = {}
    for recipe, why in facts["recipes"].items():
        if recipe == "block" and tuple(facts["capability"]) < (9, 0):
            continue
        for rule in RECIPE:
            if why and re.search(rule[0], why):
                causes.setdefault(rule, []).append(recipe)
                break
    order = sorted(causes, key=RECIPE.index)
    return [Advice(*(part.format(**names, recipes=", ".join(causes[rule])) for part in rule[1:])) for rule in order]


def first_fitting(rules: list[tuple], why: str, names: dict) -> list[Advice]:
    for symptom, problem, fix in rules:
        if match := re.search(symptom, why):
            return [Advice(*(part.format(**(names | match.groupdict())) for part in (problem, fix)))]
    return []


def passes(facts: dict) -> bool:
    """Whether the verdict is about this moment only: the GPU is taken, or the driver is in a state that a restart mends."""
    if re.search(f"{TAKEN}|{NOT_READY}|{UNFIT}", facts["device_reason"]):
        return True
    return any(re.search(TAKEN, why) for why in (facts["te_reason"], *facts["recipes"].values()))
