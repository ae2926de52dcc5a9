"""Scales and amax histories of delayed scaling, real and emulated, under the model's plain layer names.

TE keeps them in `module.fp8_meta["scaling_fwd" | "scaling_bwd"]`: `scale` (columns,) and `amax_history` (length, columns),
three columns a GEMM forward (input, weight, output) and two backward (grad_output, grad_input). A `LayerNormMLP` holds two
GEMMs, so its second one (fc2) has columns 3 to 5 forward and 2 to 3 backward. The emulator's layers hold one GEMM each and keep
the same tensors under the same keys, so everything here reads both kinds alike.
The output and grad_input columns are never used by these layers: scale 1, amax 0.
"""

import pandas as pd
import torch

FORWARD_ROLES = ("input", "weight", "output")
BACKWARD_ROLES = ("grad_output", "grad_input")
USED_ROLES = ("input", "weight", "grad_output")

# TE's module inside a block -> the plain names of the GEMMs it holds.
TE_GEMMS = {"self_attention.layernorm_qkv": ("qkv",), "self_attention.proj": ("proj",), "layernorm_mlp": ("fc1", "fc2")}


def delayed_state(model) -> dict[str, torch.Tensor]:
    """The live tensors (views, not copies) as {"blocks.0.fc1.scaling_fwd.scale": (3,), "….amax_history": (length, 3), …}.

    Empty before the first forward under FP8, and under recipes that keep no state (their scales live with each tensor).
    """
    state = {}
    for name, module in model.named_modules():
        meta = getattr(module, "fp8_meta", None)
        if not meta or name.endswith("core_attention"):  # the attention core holds placeholders
            continue
        parent, gemms = name, ("",)
        for inner, plain in TE_GEMMS.items():
            if name.endswith("." + inner):
                parent, gemms = name.removesuffix(inner), plain
        for i, gemm in enumerate(gemms):
            for direction, columns in (("scaling_fwd", len(FORWARD_ROLES)), ("scaling_bwd", len(BACKWARD_ROLES))):
                scaling = meta.get(direction)
                if getattr(scaling, "amax_history", None) is None:
                    continue
                own = slice(i * columns, (i + 1) * columns)
                state[f"{parent}{gemm}.{direction}.scale"] = scaling.scale[own]
                state[f"{parent}{gemm}.{direction}.amax_history"] = scaling.amax_history[:, own]
    return state


def initial_delayed_state(n_layers: int, history_len: int) -> dict[str, torch.Tensor]:
    """What `delayed_state` gives before the first step, by the same names: scales of 1 and empty histories."""
    state = {}
    for i in range(n_layers):
        for gemm in (gemm for gemms in TE_GEMMS.values() for gemm in gemms):
            for direction, columns in (("scaling_fwd", len(FORWARD_ROLES)), ("scaling_bwd", len(BACKWARD_ROLES))):
                state[f"blocks.{i}.{gemm}.{direction}.scale"] = torch.ones(columns)
                state[f"blocks.{i}.{gemm}.{direction}.amax_history"] = torch.zeros(history_len, columns)
    return state


def load_delayed_state(model, saved: dict[str, torch.Tensor]) -> None:
    """Copies saved scales and histories into a model that already ran once under the same recipe.

    Raises ValueError, before anything is changed, naming what does not fit.
    """
    live = delayed_state(model)
    if live.keys() != saved.keys():
        differ = sorted(live.keys() ^ saved.keys())
        raise ValueError(
            f"the FP8 state is of another model or recipe: {len(differ)} tensors differ, such as {differ[0]}"
        )
    for name, tensor in live.items():
        if tensor.shape != saved[name].shape:
            raise ValueError(
                f"{name} has shape {tuple(saved[name].shape)}, this model needs {tuple(tensor.shape)} (another history length?)"
            )
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(saved[name])


def fp8_state(model, recipe=None) -> pd.DataFrame:
    """One row a tensor that is quantized: layer, role, format, scale, newest amax, largest amax in the history, staging row.

    `amax newest` is the last row of the history. Row 0, `amax staged`, is where the next step's amax is collected; it is
    zeroed at each update, which is why printing `amax_history[0]` shows zeros. The column `format` is there if `recipe`
    is given, the one that the model ran under (TE's or the emulator's). Empty if the model keeps no such state.
    """
    rows = []
    state = delayed_state(model)
    for name in state:
        if not name.endswith(".scale"):
            continue
        layer, direction, _ = name.rsplit(".", 2)
        backward = direction == "scaling_bwd"
        scale, history = state[name].tolist(), state[name.removesuffix("scale") + "amax_history"].cpu()
        for column, role in enumerate(BACKWARD_ROLES if backward else FORWARD_ROLES):
            if role in USED_ROLES:
                row = {"layer": layer, "role": role}
                if recipe is not None:
                    row["format"] = "E5M2" if backward and recipe.fp8_format.name == "HYBRID" else "E4M3"
                rows.append(
                    row
                    | {
                        "scale": scale[column],
                        "amax newest": history[-1, column].item(),
                        "amax max": history[:, column].max().item(),
                        "amax staged": history[0, column].item(),
                        "history": len(history),
                    }
                )
    return pd.DataFrame(rows)
