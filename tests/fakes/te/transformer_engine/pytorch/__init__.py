import json
import os
import threading
from contextlib import contextmanager

import torch

from transformer_engine.common import recipe as recipes

FAILS = json.loads(os.environ.get("FAKE_TE_FAILS", "{}"))
NAMES = {
    None: "bf16",
    recipes.DelayedScaling: "delayed",
    recipes.Float8CurrentScaling: "current",
    recipes.Float8BlockScaling: "block",
    recipes.MXFP8BlockScaling: "mxfp8",
    recipes.NVFP4BlockScaling: "nvfp4",
}
active = None


def answer(available, why_not):
    return (True, "") if available else (False, why_not)


def is_fp8_available(return_reason=False):
    capability = torch.cuda.get_device_capability()
    return answer(capability >= (8, 9), "Device compute capability 8.9 or higher required for FP8 execution.")


def is_fp8_block_scaling_available(return_reason=False):
    new_enough = torch.cuda.get_device_capability() >= (9, 0) and float(torch.version.cuda) >= 12.9
    return answer(new_enough, "FP8 block scaled GEMM requires compute capability 9.0 or higher and CUDA >= 12.9.")


def is_mxfp8_available(return_reason=False):
    capability = torch.cuda.get_device_capability()
    if capability >= (12, 0):
        return False, "MXFP8 (for all gemm layouts) is not supported on 12.0+ architectures yet."
    return answer(capability >= (10, 0), "Device compute capability 10.0 or higher required for MXFP8 execution.")


def is_nvfp4_available(return_reason=False):
    capability = torch.cuda.get_device_capability()
    return answer(capability >= (10, 0), "Device compute capability 10.0 or higher required for NVFP4 execution.")


@contextmanager
def autocast(enabled=True, recipe=None):
    global active
    active = type(recipe) if enabled else None
    yield
    active = None


class Layer:
    def __init__(self, *sizes, params_dtype=None, device=None, **options):
        pass

    def __call__(self, x, *others):
        failure = FAILS.get(NAMES[active])

        def passes_back():
            if failure == "abort":
                os.abort()
            if failure == "hang":
                threading.Event().wait()
            if failure:
                torch.spoiled = True
                raise RuntimeError(failure)

        return torch.Tensor(x.source or x, passes_back)


class Linear(Layer):
    pass


class LayerNormLinear(Layer):
    pass


class DotProductAttention(Layer):
    pass
