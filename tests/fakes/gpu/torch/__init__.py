"""Stands in for torch on a GPU machine that we do not have, and says what torch says there.

FAKE_MACHINE describes the machine, as JSON; what it leaves out is an H100's:
    torch, cuda, name, capability, cudnn   what there is
    warning      torch.cuda.is_available() warns so, and finds no GPU
    error        [exception, message] of the first computation on the GPU
    hangs        asking for a GPU never returns
FAKE_LOG is a file that gets a line for each process that imports this.
"""

import builtins
import json
import os
import threading
import warnings
from types import SimpleNamespace

MACHINE = json.loads(os.environ.get("FAKE_MACHINE", "{}"))
__version__ = MACHINE.get("torch", "2.11.0+cu130")
version = SimpleNamespace(cuda=MACHINE.get("cuda", "13.0"))
bfloat16 = "bfloat16"
spoiled = False  # a kernel failed: on a GPU, everything after it may fail in this process

if "FAKE_LOG" in os.environ:
    with open(os.environ["FAKE_LOG"], "a") as log:
        log.write(f"{os.getpid()}\n")


class OutOfMemoryError(RuntimeError):
    pass


class Tensor:
    def __init__(self, source=None, passes_back=None):
        self.grad, self.source, self.passes_back = None, source, passes_back

    def same(self, *_):
        return Tensor(self.source, self.passes_back)

    reshape = contiguous = sum = same

    def chunk(self, chunks, dim=0):
        return (self.same(),) * chunks

    def backward(self):
        if self.passes_back:
            self.passes_back()
        self.source.grad = Tensor()

    def item(self):
        return 8.0

    def all(self):
        return True


def ones(*size, dtype=None, device=None, requires_grad=False):
    if spoiled:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if device == "cuda" and "error" in MACHINE:
        kind, message = MACHINE["error"]
        raise {"OutOfMemoryError": OutOfMemoryError}.get(kind, getattr(builtins, kind, None))(message)
    return Tensor()


def isfinite(tensor):
    return tensor


class cuda:
    @staticmethod
    def is_available():
        if MACHINE.get("hangs"):
            threading.Event().wait()
        if "warning" in MACHINE:
            warnings.warn(MACHINE["warning"], stacklevel=2)
            return False
        return os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1")

    @staticmethod
    def get_device_properties(device):
        major, minor = MACHINE.get("capability", [9, 0])
        return SimpleNamespace(
            name=MACHINE.get("name", "NVIDIA H100"), major=major, minor=minor, total_memory=80 * 10**9
        )

    @staticmethod
    def get_device_capability(device=0):
        return tuple(MACHINE.get("capability", [9, 0]))

    @staticmethod
    def synchronize():
        pass


class backends:
    class cudnn:
        @staticmethod
        def version():
            return MACHINE.get("cudnn", 91900)


class _dynamo:
    config = SimpleNamespace(recompile_limit=8)
