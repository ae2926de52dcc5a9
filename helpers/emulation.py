"""FP8 training emulated: the numerics of Transformer Engine's recipes in plain PyTorch, on any device.

    twin = emulate(model)       # a copy whose nn.Linear layers, but for the head, are EmulatedLinear
    with torch.autocast("cpu", torch.bfloat16), autocast(recipe=DelayedScaling()):
        loss = loss_of(twin(tokens))
    loss.backward()             # outside, as with te.autocast

Recipes, defaults and the layout of the state are TE's. Operands are really rounded to FP8, by torch's float8 casts, and
multiplied in float32, which holds FP8 values and their products exactly. What is left between this and a Hopper GPU is
how its tensor cores add up: one BF16 unit in a few percent of the results, and more in long sums. With
`autocast(hopper_sums=True)` sums are formed as they form them (helpers/tensor_core.py); every bit agrees then, but it is
very slow. `tests/test_emulation_traces.py` compares with recordings of TE 2.20.2 on an H200.

Different from TE on purpose: an evaluation under `torch.no_grad` leaves the state exactly as it was (TE keeps its amax
in the staging row, for the next training step), and leaving an autocast region updates the layers that ran in it (TE:
every layer that ever ran under that recipe).
"""

import copy
import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from helpers import formats, tensor_core
from helpers.emulation_blocks import (
    FLOAT32_MAX,
    quantize_fp8_blocks,
    quantize_mxfp8,
    quantize_nvfp4,
    random_hadamard_transform,
    scale_from_amax,
)
from helpers.emulation_recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    unscaled,
)

__all__ = [
    "DelayedScaling",
    "EmulatedLayerNorm",
    "EmulatedLinear",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "Recipe",
    "ScalingState",
    "autocast",
    "emulate",
    "unscaled",
]

# The tensors that a linear layer quantizes, and where TE keeps their scale and history: role -> (fp8_meta key, column).
# The columns for a quantized output and grad_input exist, too, and stay unused: scale 1, amax 0.
ROLES = {"input": ("scaling_fwd", 0), "weight": ("scaling_fwd", 1), "grad_output": ("scaling_bwd", 0)}
COLUMNS = {"scaling_fwd": 3, "scaling_bwd": 2}


class ScalingState:
    """Scales and amax histories of one layer in one direction, laid out as in TE's `module.fp8_meta["scaling_fwd"]`.

    scale (columns,) float32, 1 at first. amax_history (length, columns): row 0 is the staging row, which collects the
    amax of the step that is running; row -1 is the newest completed step.
    """

    def __init__(self, columns: int, history_len: int, device: torch.device):
        self.scale = torch.ones(columns, device=device)
        self.amax_history = torch.zeros(history_len, columns, device=device)

    def record(self, column: int, amax: Tensor) -> None:
        staged = self.amax_history[0, column]
        torch.maximum(staged, amax, out=staged)

    def update(self, recipe: DelayedScaling, fp8_max: float) -> None:
        """Computes the scales for the next step, then shifts the history by a row.

        Where amax is 0 or not finite the scale stays; where the quotient overflows it becomes float32's maximum.
        Source: TE's pytorch/quantization.py, _amax_and_scale_update.
        """
        history = self.amax_history
        if callable(recipe.amax_compute_algo):
            amax = recipe.amax_compute_algo(history)
        else:
            amax = history.amax(0) if recipe.amax_compute_algo == "max" else history[0].clone()
        if recipe.scaling_factor_compute_algo:
            self.scale.copy_(recipe.scaling_factor_compute_algo(amax, self.scale, fp8_max, recipe))
        else:
            # Tensor by tensor, which rounds once; torch makes a reciprocal and a product of 448.0 / tensor.
            scale = (torch.full_like(amax, fp8_max) / amax / 2**recipe.margin).clamp(max=FLOAT32_MAX)
            self.scale.copy_(torch.where((amax > 0) & amax.isfinite(), scale, self.scale))
        history.copy_(history.roll(-1, 0))
        history[0] = 0

    def fit_history(self, length: int) -> None:
        """Cuts or zero-pads the history at its end, as TE does for a recipe of another length."""
        padding = self.amax_history.new_zeros(length, len(self.scale))
        self.amax_history = torch.cat([self.amax_history, padding])[:length].clone()


def reduce_amaxes(states: list[ScalingState], group: "dist.ProcessGroup | None") -> None:
    """Makes the ranks of `group` (None: all) agree on the amaxes staged in `states`, in one collective. Alone: nothing."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        staged = torch.cat([state.amax_history[0] for state in states])
        dist.all_reduce(staged, dist.ReduceOp.MAX, group)
        for state, amax in zip(states, staged.split([len(state.scale) for state in states]), strict=True):
            state.amax_history[0] = amax


_regions: list["autocast"] = []  # the autocast regions we are in, outermost first


class autocast:
    """`te.autocast` for emulated layers: inside, they compute in `recipe` (default: DelayedScaling()).

    `generator` draws the stochastic rounding of NVFP4's gradients; it must live on their device. Leaving the outermost
    region while grad is enabled updates delayed scaling's forward scales; its backward scales follow each backward.
    In a job of several ranks those of `amax_reduction_group` (None: all) agree on each amax first, as in TE.
    `hopper_sums`: add up as a Hopper tensor core does, bit for bit, instead of in float32. For small layers.
    """

    def __init__(
        self,
        enabled: bool = True,
        recipe: Recipe | None = None,
        generator: Generator | None = None,
        hopper_sums: bool = False,
        amax_reduction_group: "dist.ProcessGroup | None" = None,
    ):
        recipe = DelayedScaling() if recipe is None else recipe
        if not isinstance(recipe, Recipe):
            raise ValueError(
                f"got a recipe of type {type(recipe).__qualname__}; use one of helpers.emulation, such as DelayedScaling()"
            )
        if enabled and isinstance(recipe, NVFP4BlockScaling) and not (recipe.disable_stochastic_rounding or generator):
            raise ValueError(
                "NVFP4BlockScaling rounds gradients stochastically: give autocast(generator=torch.Generator(device)), "
                "or set disable_stochastic_rounding=True in the recipe"
            )
        if hopper_sums and isinstance(recipe, (MXFP8BlockScaling, NVFP4BlockScaling)):
            raise ValueError(
                f"got hopper_sums=True with {type(recipe).__name__}, which Hopper GPUs do not have; leave it out"
            )
        self.enabled, self.recipe, self.generator, self.hopper_sums = enabled, recipe, generator, hopper_sums
        self.amax_reduction_group = amax_reduction_group

    def __enter__(self):
        self.to_update: dict[ScalingState, DelayedScaling] = {}
        _regions.append(self)
        return self

    def __exit__(self, error, *_):
        _regions.pop()
        # Not after an error: the other ranks may never come here.
        if self.enabled and torch.is_grad_enabled() and self.to_update and error is None:
            reduce_amaxes(list(self.to_update), self.amax_reduction_group)
            for state, recipe in self.to_update.items():  # layers list themselves in the outermost region only
                state.update(recipe, recipe.number_format("input").max)


def active_region() -> autocast | None:
    return _regions[-1] if _regions and _regions[-1].enabled else None


def result_dtype(x: Tensor) -> torch.dtype:
    """What a layer's results are rounded to: torch.autocast's dtype inside of it, else that of its input."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class Operand(NamedTuple):
    """A quantized matrix as a GEMM takes it: FP8 or FP4 values with their block scales applied, and a scale for the rest."""

    values: Tensor  # float32, the shape of the original
    scale_inv: Tensor | float  # scalar, multiplies the GEMM's result
    lowest_exponent: int | None = None  # of the format; None where block scales shift it

    def t(self) -> "Operand":
        return self._replace(values=self.values.t())


def multiply(a: Operand, b: Operand, split: bool | None, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """a (m, k) times b (k, n) plus bias (n,), rounded once to `dtype`.

    `split`: None adds up in float32; True or False as a Hopper tensor core, with split or fast accumulation.
    """
    with torch.autocast(a.values.device.type, enabled=False):
        if split is None:
            product = a.values @ b.values
        else:
            product = tensor_core.matmul(a.values, b.values, split, a.lowest_exponent, b.lowest_exponent)
        product = product.mul_(a.scale_inv * b.scale_inv)
    return (product if bias is None else product.add_(bias.to(dtype))).to(dtype)


@dataclass(frozen=True)
class Quantizer:
    """How one layer quantizes in one forward pass and its backward."""

    layer: "EmulatedLinear"
    recipe: Recipe
    generator: Generator | None
    dtype: torch.dtype
    training: bool  # grad was enabled in forward: record amaxes, prepare operands for backward
    hopper_sums: bool
    amax_reduction_group: "dist.ProcessGroup | None"

    def split(self, forward: bool) -> bool | None:
        """How `multiply` adds up: TE accumulates fast in a per-tensor recipe's forward GEMM, split everywhere else."""
        return (not forward or self.recipe.split_forward) if self.hopper_sums else None

    def __call__(self, x: Tensor, role: str) -> tuple[Operand, Operand]:
        """Quantizes `x` (rows, columns) for a GEMM that sums over its columns, and for one that sums over its rows.

        Both have the shape of `x`. In per-tensor scaling and square blocks they are the same; outside of training the
        second is not computed.
        """
        recipe, fmt = self.recipe, self.recipe.number_format(role)
        if role != "weight" and not isinstance(recipe, DelayedScaling):
            # Only delayed scaling knows its scale beforehand and lets TE fuse the cast into the LayerNorm or GELU before
            # it. The other recipes quantize what those wrote to memory, rounded.
            x = x.to(self.dtype)
        amax = self.layer.amax(x, role)
        match recipe:
            case DelayedScaling():
                key, column = ROLES[role]
                state = self.layer.fp8_meta[key]
                if self.training:
                    state.record(column, amax)
                return self._per_tensor(x, state.scale[column], fmt)
            case Float8CurrentScaling():
                return self._per_tensor(x, scale_from_amax(amax, fmt.max, recipe.use_power_2_scales), fmt)
            case Float8BlockScaling():
                return self._blocks(
                    x, role, partial(quantize_fp8_blocks, fmt=fmt, power_of_two=not recipe.use_f32_scales)
                )
            case MXFP8BlockScaling():
                return self._blocks(x, role, partial(quantize_mxfp8, fmt=fmt))
            case NVFP4BlockScaling():
                generator = self.generator if recipe.rounds_stochastically(role) else None
                return self._blocks(x, role, partial(quantize_nvfp4, generator=generator))

    def _per_tensor(self, x: Tensor, scale: Tensor, fmt: formats.Format) -> tuple[Operand, Operand]:
        # .float() first: a BF16 tensor times a 0-dim FP32 scale would stay BF16 and so be rounded twice.
        operand = Operand(formats.quantize(x.float() * scale, fmt), 1 / scale, int(math.log2(fmt.min_normal)))
        return operand, operand

    def _blocks(self, x: Tensor, role: str, quantize) -> tuple[Operand, Operand]:
        block = self.recipe.block(role)
        row = Operand(*quantize(x, block=block).scaled())
        if block[0] == block[1] or not self.training:
            return row, row
        if isinstance(self.recipe, NVFP4BlockScaling) and self.recipe.transforms(role):
            x = random_hadamard_transform(x.t()).t()
        return row, Operand(*quantize(x, block=block[::-1]).scaled())


class QuantizedLinear(torch.autograd.Function):
    """y = x·Wᵀ + b and its two backward GEMMs on quantized operands. Source: TE's pytorch/module/linear.py."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, quantizer: Quantizer) -> Tensor:
        x_row, x_col = quantizer(x, "input")
        w_row, w_col = quantizer(weight, "weight")
        ctx.save_for_backward(x_col.values, w_col.values)
        ctx.operands = x_col._replace(values=None), w_col._replace(values=None)
        ctx.quantizer = quantizer
        y = multiply(x_row, w_row.t(), quantizer.split(forward=True), quantizer.dtype, bias)
        # Cast in here: autograd would round the gradient on its way back through a y.float() outside.
        return y.float() if quantizer.layer.before_gelu and isinstance(quantizer.recipe, DelayedScaling) else y

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        quantizer = ctx.quantizer
        x, w = (operand._replace(values=v) for operand, v in zip(ctx.operands, ctx.saved_tensors, strict=True))
        grad_row, grad_col = quantizer(grad_output, "grad_output")
        needs_dx, needs_dw, needs_db, _ = ctx.needs_input_grad
        split = quantizer.split(forward=False)
        dx = multiply(grad_row, w, split, quantizer.dtype) if needs_dx else None
        dw = multiply(grad_col.t(), x, split, quantizer.dtype) if needs_dw else None
        db = grad_output.float().sum(0).to(quantizer.dtype) if needs_db else None  # of the unquantized gradient
        if isinstance(quantizer.recipe, DelayedScaling):
            state = quantizer.layer.fp8_meta["scaling_bwd"]
            reduce_amaxes([state], quantizer.amax_reduction_group)
            state.update(quantizer.recipe, quantizer.recipe.number_format("grad_output").max)
        return dx, dw, db, None


class EmulatedLinear(nn.Linear):
    """An nn.Linear that computes in the recipe of the surrounding `autocast`; outside of one it is an nn.Linear.

    Input (..., in_features) in float32, bfloat16 or float16; output (..., out_features) in torch.autocast's dtype, else
    the input's. `fp8_meta` holds delayed scaling's state under TE's keys, from the first forward on; `nan_count` (3,) the
    NaN met in inputs, weights and gradients: a NaN goes through to the result.

    `before_gelu`: under delayed scaling, hand the rounded result on as float32. TE fuses GELU with the cast that follows,
    so GELU's own result goes into FP8 without being rounded to BF16, and so does its gradient; torch would round both.

    Raises ValueError for other dtypes and for shapes that the recipe cannot take.
    """

    def __init__(self, *args, before_gelu: bool = False, **kwargs):
        super().__init__(*args, **kwargs)
        self.before_gelu = before_gelu
        self.fp8_meta: dict[str, ScalingState] = {}
        self.register_buffer(
            "nan_count", torch.zeros(3, dtype=torch.int64, device=self.weight.device), persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        region = active_region()
        if region is None:
            return super().forward(x)
        recipe, training = region.recipe, torch.is_grad_enabled()
        formats.check_dtype(x)
        check_shapes(x, self.weight, recipe, training)
        if isinstance(recipe, DelayedScaling):
            self._prepare_state(recipe, x.device)
            _regions[0].to_update[self.fp8_meta["scaling_fwd"]] = recipe
        quantizer = Quantizer(
            self, recipe, region.generator, result_dtype(x), training, region.hopper_sums, region.amax_reduction_group
        )
        y = QuantizedLinear.apply(x.reshape(-1, self.in_features), self.weight, self.bias, quantizer)
        return y.view(*x.shape[:-1], self.out_features)

    def amax(self, x: Tensor, role: str) -> Tensor:
        """Largest magnitude of `x`, float32 scalar. NaN is passed over, as by the GPU's fmaxf, but counted."""
        low, high = torch.aminmax(x)
        amax = torch.maximum(-low, high).float()
        if amax.isnan():
            self.nan_count[list(ROLES).index(role)] += x.isnan().sum()
            amax = x.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax().float()
        return amax

    def _prepare_state(self, recipe: DelayedScaling, device: torch.device) -> None:
        if not self.fp8_meta:
            self.fp8_meta = {key: ScalingState(n, recipe.amax_history_len, device) for key, n in COLUMNS.items()}
        for state in self.fp8_meta.values():
            if len(state.amax_history) != recipe.amax_history_len:
                state.fit_history(recipe.amax_history_len)

    def _apply(self, fn, recurse=True):
        """Takes the state along in .to(device), but not to another dtype."""
        for state in self.fp8_meta.values():
            state.scale = state.scale.to(fn(state.scale).device)
            state.amax_history = state.amax_history.to(fn(state.amax_history).device)
        return super()._apply(fn, recurse)


class EmulatedLayerNorm(nn.LayerNorm):
    """An nn.LayerNorm that inside `autocast` gives float32 and uses gamma and beta rounded to the result's dtype.

    So does TE's LayerNorm inside LayerNormLinear and LayerNormMLP: it quantizes the float32 result directly.
    """

    def forward(self, x: Tensor) -> Tensor:
        if active_region() is None:
            return super().forward(x)
        weight, bias = (p if p is None else p.to(result_dtype(x)).float() for p in (self.weight, self.bias))
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps)


def check_shapes(x: Tensor, weight: Tensor, recipe: Recipe, training: bool) -> None:
    """Raises ValueError if the recipe cannot take an input (..., in_features) with this weight (out_features, in_features).

    Training sums over every dimension once, in tiles of 16 or in whole blocks; inference does not sum over tokens.
    Source: TE's pytorch/utils.py, assert_dim_for_fp8_exec.
    """
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"the input has {x.shape[-1]} features (shape {tuple(x.shape)}), the layer takes {weight.shape[-1]}"
        )
    n = recipe.multiple_of
    for what, tensor, leading in (("input", x, n if training else recipe.tokens_multiple_of), ("weight", weight, n)):
        rows = math.prod(tensor.shape[:-1])
        if rows == 0 or rows % leading or tensor.shape[-1] % n:
            raise ValueError(
                f"{type(recipe).__name__} needs the product of all dimensions except the last to be a multiple of {leading} "
                f"and the last one a multiple of {n}; the {what} has shape {tuple(tensor.shape)} (product {rows}, last "
                f"{tensor.shape[-1]}). Pad it with zeros"
            )


def emulate(model: nn.Module, skip: tuple[str, ...] = ("head",), before_gelu: tuple[str, ...] = ("fc1",)) -> nn.Module:
    """A copy of `model` whose nn.Linear layers, and the LayerNorms beside them, are emulated ones with the same weights.

    Names are a module's own, such as "fc1". Layers named in `skip` stay as they are: TE's models keep their head in BF16,
    and so do ours. `before_gelu` names the layers that feed a GELU (see EmulatedLinear). The parameters keep their names.
    Raises ValueError if there is nothing to emulate.
    """
    twin = copy.deepcopy(model)
    found = False
    for parent in list(twin.modules()):
        linears = {
            name: child for name, child in parent.named_children() if type(child) is nn.Linear and name not in skip
        }
        found = found or bool(linears)
        for name, linear in linears.items():
            emulated = EmulatedLinear(
                linear.in_features, linear.out_features, device="meta", before_gelu=name in before_gelu
            )
            emulated.weight, emulated.bias = linear.weight, linear.bias
            emulated.nan_count = torch.zeros(3, dtype=torch.int64, device=linear.weight.device)
            emulated.train(linear.training)
            setattr(parent, name, emulated)
        for name, norm in list(parent.named_children()):
            if linears and type(norm) is nn.LayerNorm:
                emulated = EmulatedLayerNorm(norm.normalized_shape, norm.eps, norm.elementwise_affine, device="meta")
                emulated.weight, emulated.bias = norm.weight, norm.bias
                emulated.train(norm.training)
                setattr(parent, name, emulated)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no nn.Linear outside of skip={skip}: emulate() takes a plain PyTorch model"
        )
    return twin
