"""Looks at torch, the GPU and Transformer Engine (TE) in a process of its own, which may crash or hang without harm.

helpers/verdict.py starts it with one JSON argument:
    path       the module search path to use
    report     the file to write
    te         whether to import TE
    layers     which test layers to run: "bf16" and names of RECIPES
Every finding is one JSON line in the report, written at once; {"step": ...} comes before each step that might not return,
{"end": ...} last. It imports nothing else of the workshop, and torch only when it is told its search path.
"""

import ctypes
import faulthandler
import importlib
import json
import os
import sys
import warnings

# name -> (TE's own answer, TE's recipe class). Source: transformer_engine/pytorch/quantization.py, common/recipe/__init__.py.
RECIPES = {
    "delayed": ("is_fp8_available", "DelayedScaling"),
    "current": ("is_fp8_available", "Float8CurrentScaling"),
    "block": ("is_fp8_block_scaling_available", "Float8BlockScaling"),
    "mxfp8": ("is_mxfp8_available", "MXFP8BlockScaling"),
    "nvfp4": ("is_nvfp4_available", "NVFP4BlockScaling"),
}
OLDEST_TE = (2, 9)
OLDEST_CAPABILITY = (8, 0)  # of a GPU that TE's layers run on
IMPORT = "importing Transformer Engine"
BF16 = "bf16"
CLAIMED = "claimed by TE, but a test layer"


def one_line(error: BaseException, limit: int = 300) -> str:
    """An exception as "OSError: what it says first"; of a validation error everything, since its first line only counts."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    text = " ".join(lines) if type(error).__name__ == "ValidationError" else lines[0]
    return f"{type(error).__name__}: {text}"[:limit]


def import_te():
    """(transformer_engine.pytorch, its version), or (None, the reason in one line). Tries it in this very process.

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
        return None, f"Transformer Engine does not import: {one_line(error)}"
    except Exception as error:
        return None, f"Transformer Engine does not import: {one_line(error)}"
    if tuple(int(n) for n in version.split(".")[:2]) < OLDEST_TE:
        return None, f"Transformer Engine {version} is older than {'.'.join(map(str, OLDEST_TE))}; install a newer one"
    return te, version


def why_no_gpu(torch) -> str:
    """ "" if torch sees a GPU, else why not. The reason that torch knows is in a warning."""
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) was built without CUDA"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return ""
    for said in (" ".join(str(warning.message).split()) for warning in caught):
        if "CUDA" in said or "NVIDIA" in said:
            said = said.removeprefix("CUDA initialization: ")
            return said.partition(" (Triggered internally")[0].partition(" Please ")[0]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "torch finds no NVIDIA GPU" if visible is None else f"CUDA_VISIBLE_DEVICES={visible!r} hides it"


def why_no_computing(torch) -> str:
    """ "" if a small sum runs on the GPU. One that torch sees may be taken by another process, or no GPU for this torch."""
    name = "the GPU"
    try:
        gpu = torch.cuda.get_device_properties(0)
        name = f"{gpu.name} ({gpu.major}.{gpu.minor})"
        torch.ones(8, device="cuda").sum().item()
    except Exception as error:
        return f"{name}: {one_line(error).partition(': ')[2]}"
    return ""


def cudnn_version(torch) -> int:
    """The cuDNN that is loaded, as 91400 for 9.14.0. Torch refuses to say when TE brought another than torch was built with."""
    try:
        return torch.backends.cudnn.version()
    except RuntimeError:
        return ctypes.CDLL("libcudnn.so.9").cudnnGetVersion()


def prove_bf16(te) -> str:
    """Runs TE's layers without FP8, forward and backward: "" if that worked, else the reason. Attention is cuDNN's."""
    import torch

    try:
        projection = te.LayerNormLinear(128, 384, params_dtype=torch.bfloat16, device="cuda")
        attention = te.DotProductAttention(2, 64, qkv_format="bshd", attn_mask_type="causal")
        x = torch.ones(2, 16, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        q, k, v = (part.reshape(2, 16, 2, 64).contiguous() for part in projection(x).chunk(3, -1))
        return passed_back(torch, attention(q, k, v), x)
    except Exception as error:
        return one_line(error)


def prove(te, name: str) -> str:
    """Runs one layer forward and backward under a recipe: "" if it worked, else the reason.

    TE's own answer is a claim, so it only opens the door: NVFP4 was called available on 12.0 and failed wherever the
    inner dimension is a multiple of 128, as it is here and in most models (TE issue 2956).
    """
    import torch

    answer, recipe_class = RECIPES[name]
    try:
        available, reason = getattr(te, answer)(return_reason=True)
        if not available:
            return reason
        recipe = getattr(importlib.import_module("transformer_engine.common.recipe"), recipe_class)()
        layer = te.Linear(128, 128, params_dtype=torch.bfloat16, device="cuda")
        x = torch.ones(128, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        with te.autocast(enabled=True, recipe=recipe):
            y = layer(x)
        why = passed_back(torch, y, x)
    except Exception as error:
        why = one_line(error)
    return why and f"{CLAIMED} failed: {why}"


def passed_back(torch, y, x) -> str:
    y.sum().backward()
    torch.cuda.synchronize()
    return "" if bool(torch.isfinite(x.grad).all()) else "its gradient is not finite"


def look(request: dict, say) -> None:
    """Finds out what `request` asks for and tells `say` each thing as it is found."""
    say(step="importing torch")
    import torch

    say(torch=torch.__version__, cuda=torch.version.cuda, step="asking torch for a GPU")
    no_gpu = why_no_gpu(torch)
    te = None
    if request["te"]:
        # Before anything touches cuDNN: where the system has another cuDNN than torch brings, only this order works.
        say(step=IMPORT)
        te, version = import_te()
        say(te=version if te else None, te_reason="" if te else version)
    if not no_gpu:
        say(step="computing on the GPU")
        no_gpu = why_no_computing(torch)
    say(device_reason=no_gpu)
    if no_gpu:
        return say(end="all")
    gpu, cudnn = torch.cuda.get_device_properties(0), cudnn_version(torch)
    say(
        gpu=gpu.name,
        capability=[gpu.major, gpu.minor],
        memory_gb=gpu.total_memory / 1e9,
        cudnn=f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}",
    )
    for name in request["layers"] if te and (gpu.major, gpu.minor) >= OLDEST_CAPABILITY else ():
        say(step=name)
        why = prove_bf16(te) if name == BF16 else prove(te, name)
        say(layers={name: why})
        if why.startswith(CLAIMED) or (why and name == BF16):
            return say(end="failed")  # a failed kernel can spoil the process: the rest is tried in another one
    say(end="all")


def main(request: dict) -> None:
    sys.path[:] = request["path"]
    faulthandler.enable()
    if os.name == "posix":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash leaves no core file in the reader's folder
    with open(request["report"], "w", encoding="utf-8") as report:

        def say(**found):
            report.write(json.dumps(found) + "\n")
            report.flush()

        look(request, say)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
