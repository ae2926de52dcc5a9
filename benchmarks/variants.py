"""One training step of the same model, in every way that is compared. A variant is a function: (case, device) -> Step.

Every variant trains the same function with the same precision of the weights: FP32 masters and FP32 optimizer states,
held as FP32 parameters or by FusedAdam beside BF16 ones. The exception, `te-bf16-no-masters`, is there as a trap.
"""

import functools
import importlib
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from helpers.data import arithmetic_batch
from helpers.models import GPTConfig, MiniGPT, initial_state, plain_parameters

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (inputs, targets) -> loss; forward, backward, optimizer


@dataclass(frozen=True)
class Case:
    config: GPTConfig
    batch: int

    @property
    def tokens(self) -> int:
        return self.batch * self.config.seq_len

    @property
    def lr(self) -> float:
        return 0.1 / self.config.d_model

    def batches(self, device: str, seed: int = 1):
        """An endless stream of (inputs, targets); the same for every variant."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield arithmetic_batch(self.batch, self.config.seq_len, generator, device)


CASES = {
    "tiny": Case(GPTConfig(d_model=64, n_layers=2, n_heads=2, seq_len=32), 4),  # for a try on a CPU
    "compact": Case(GPTConfig(d_model=768, n_layers=4, n_heads=12, seq_len=256), 32),
    "scale_up_256": Case(GPTConfig(d_model=2048, n_layers=12, n_heads=16, seq_len=256), 32),
    "scale_up_1024": Case(GPTConfig(d_model=2048, n_layers=12, n_heads=16, seq_len=1024), 16),
    "wide_2048": Case(GPTConfig(d_model=4096, n_layers=8, n_heads=32, seq_len=2048), 4),
}

# Before a capture PyTorch wants a few steps. Every variant takes them, on the same batch, so that losses stay comparable.
WARMUP_STEPS, WARMUP_SEED = 3, 2

# --- Parts ---


def make_model(case: Case, backend: str, device: str) -> MiniGPT:
    return MiniGPT(case.config, backend, device, torch.Generator(device).manual_seed(0))


def adamw(model: MiniGPT, case: Case, capturable: bool = False) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=case.lr, weight_decay=0.01, fused=True, capturable=capturable)


def bf16_with_masters(model: MiniGPT, case: Case):
    """Makes the blocks' parameters BF16; returns the optimizer that keeps FP32 masters, started from the unrounded weights.

    Embeddings, last LayerNorm and head stay FP32: they are few.
    """
    optimizers = importlib.import_module("transformer_engine.pytorch.optimizers")
    model.blocks.to(torch.bfloat16)
    optimizer = optimizers.FusedAdam(
        model.parameters(), lr=case.lr, weight_decay=0.01, master_weights=True, capturable=True
    )
    device = next(model.parameters()).device
    exact = initial_state(case.config, torch.Generator(device).manual_seed(0))
    for name, parameter in plain_parameters(model).items():
        optimizer.initialize_state(parameter, store_param_remainders=False)
        optimizer.state[parameter]["master_param"].copy_(exact[name])
    return optimizer


def autocast(device: str, recipe=None):
    """A function that opens the context of the forward pass: BF16, and FP8 where a recipe is given.

    Without autocast's cache of cast weights: it is emptied at the end of the region anyway, and a CUDA graph must not see it.
    """

    def enter():
        stack = ExitStack()
        stack.enter_context(torch.autocast(device, torch.bfloat16, cache_enabled=False))
        if recipe is not None:
            te = importlib.import_module("transformer_engine.pytorch")
            stack.enter_context(te.autocast(enabled=True, recipe=recipe))
        return stack

    return enter


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def training_step(model, optimizer, context=nullcontext, loss_of=cross_entropy) -> Step:
    def step(inputs, targets):
        with context():
            logits = model(inputs)
        loss = loss_of(logits, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def graphed(step: Step, case: Case, device: str = "cuda") -> Step:
    """The whole step as one CUDA graph: it is captured once, with all its kernels and addresses, and replayed from then on.

    The warm-up on a side stream trains, so it is done on one batch and counts as steps. A batch is copied to where the
    graph reads it.
    """
    inputs, targets = (t.clone() for t in next(case.batches(device, WARMUP_SEED)))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUP_STEPS):
            step(inputs, targets)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(inputs, targets)

    def replay(new_inputs, new_targets):
        inputs.copy_(new_inputs)
        targets.copy_(new_targets)
        graph.replay()
        return loss

    return replay


def warmed_up(step: Step, case: Case, device: str) -> Step:
    inputs, targets = next(case.batches(device, WARMUP_SEED))
    for _ in range(WARMUP_STEPS):
        step(inputs, targets)
    return step


def recipe_of(name: str, **fields):
    recipes = importlib.import_module("transformer_engine.common.recipe")
    if name == "delayed":
        fields = {"fp8_format": recipes.Format.HYBRID, "amax_history_len": 16, "amax_compute_algo": "max"} | fields
    return {
        "delayed": recipes.DelayedScaling,
        "current": recipes.Float8CurrentScaling,
        "block": recipes.Float8BlockScaling,
    }[name](**fields)


def compile_ends(model: MiniGPT) -> None:
    """Compiles what is not in the blocks: embedding, last LayerNorm, head. Few FLOPs, many small kernels."""
    model.embed = torch.compile(model.embed)
    model.logits = torch.compile(model.logits)


# --- Variants: PyTorch ---


def torch_eager_bf16(case: Case, device: str) -> Step:
    model = make_model(case, "torch", device)
    return warmed_up(training_step(model, adamw(model, case), autocast(device)), case, device)


def torch_compile_bf16(case: Case, device: str) -> Step:
    model = make_model(case, "torch", device)
    step = training_step(torch.compile(model), adamw(model, case), autocast(device), torch.compile(cross_entropy))
    return warmed_up(step, case, device)


def torch_compile_graphs_bf16(case: Case, device: str) -> Step:
    model = make_model(case, "torch", device)
    optimizer = adamw(model, case, capturable=True)
    return graphed(training_step(torch.compile(model), optimizer, autocast(device), torch.compile(cross_entropy)), case)


def torch_best_bf16(case: Case, device: str) -> Step:
    """The rival with what `best` has: BF16 parameters, FP32 masters in FusedAdam, compiled, one graph."""
    model = make_model(case, "torch", device)
    optimizer = bf16_with_masters(model, case)
    return graphed(training_step(torch.compile(model), optimizer, autocast(device), torch.compile(cross_entropy)), case)


def torchao_fp8(case: Case, device: str, graph: bool = False) -> Step:
    """torchao's dynamic per-tensor scaling on the blocks' linear layers, compiled, as its documentation recommends."""
    float8 = importlib.import_module("torchao.float8")
    model = make_model(case, "torch", device)
    float8.convert_to_float8_training(model, module_filter_fn=lambda _, name: name.startswith("blocks"))
    optimizer = adamw(model, case, capturable=graph)
    step = training_step(torch.compile(model), optimizer, autocast(device), torch.compile(cross_entropy))
    return graphed(step, case) if graph else warmed_up(step, case, device)


# --- Variants: Transformer Engine ---


def walkthrough(case: Case, device: str, recipe=None) -> Step:
    """As published, with the layout mended: eager, AdamW's defaults, the loss read at every step."""
    model = make_model(case, "te", device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.lr, weight_decay=0.01)
    step = training_step(model, optimizer, autocast(device, recipe and recipe_of(recipe)))

    def read_every_step(inputs, targets):
        loss = step(inputs, targets)
        loss.item()
        return loss

    return warmed_up(read_every_step, case, device)


def te_eager(case: Case, device: str, recipe=None) -> Step:
    model = make_model(case, "te", device)
    step = training_step(model, adamw(model, case), autocast(device, recipe and recipe_of(recipe)))
    return warmed_up(step, case, device)


def te_graph(case: Case, device: str, recipe=None) -> Step:
    model = make_model(case, "te", device)
    optimizer = adamw(model, case, capturable=True)
    return graphed(training_step(model, optimizer, autocast(device, recipe and recipe_of(recipe))), case)


def te_tuned(case: Case, device: str, recipe=None, ends: bool = True, masters: bool = True, **fields) -> Step:
    """One graph, and: BF16 parameters with FP32 masters in FusedAdam, compiled ends and loss. `fields` go to the recipe."""
    model = make_model(case, "te", device)
    optimizer = bf16_with_masters(model, case) if masters else adamw(model, case, capturable=True)
    if ends:
        compile_ends(model)
    context = autocast(device, recipe and recipe_of(recipe, **fields))
    return graphed(
        training_step(model, optimizer, context, torch.compile(cross_entropy) if ends else cross_entropy), case
    )


def te_bf16_no_masters(case: Case, device: str) -> Step:
    """A trap: BF16 parameters and BF16 states. Faster, and updates below half a unit of a weight are lost."""
    model = make_model(case, "te", device).to(torch.bfloat16)
    return graphed(training_step(model, adamw(model, case, capturable=True), autocast(device)), case)


variant = functools.partial
VARIANTS: dict[str, Callable[[Case, str], Step]] = {
    "walkthrough-bf16": walkthrough,
    "walkthrough-fp8": variant(walkthrough, recipe="delayed"),
    "torch-eager-bf16": torch_eager_bf16,
    "torch-compile-bf16": torch_compile_bf16,
    "torch-compile-graphs-bf16": torch_compile_graphs_bf16,
    "torch-best-bf16": torch_best_bf16,
    "torchao-fp8": torchao_fp8,
    "torchao-fp8-graphs": variant(torchao_fp8, graph=True),
    "te-bf16": te_eager,
    "te-bf16-graph": te_graph,
    "te-bf16-tuned": te_tuned,
    "te-bf16-no-masters": te_bf16_no_masters,
    "te-fp8-delayed": variant(te_eager, recipe="delayed"),
    "te-fp8-delayed-graph": variant(te_graph, recipe="delayed"),
    "te-fp8-current-graph": variant(te_graph, recipe="current"),
    "te-fp8-block-graph": variant(te_graph, recipe="block"),
    "te-fp8-delayed-masters": variant(te_tuned, recipe="delayed", ends=False),
    "te-fp8-delayed-ends": variant(te_tuned, recipe="delayed", masters=False),
    "te-fp8-delayed-tuned": variant(te_tuned, recipe="delayed"),
    "te-fp8-delayed-tuned-dpa": variant(te_tuned, recipe="delayed", fp8_dpa=True),
    "te-fp8-delayed-tuned-mha": variant(te_tuned, recipe="delayed", fp8_dpa=True, fp8_mha=True),
    "te-fp8-current-tuned": variant(te_tuned, recipe="current"),
}


def build(name: str, case: str, device: str) -> Step:
    """The step of one variant. Raises ValueError for names that do not exist."""
    for kind, given, known in (("variant", name, VARIANTS), ("case", case, CASES)):
        if given not in known:
            raise ValueError(f"{kind} {given!r} is not known; choose one of {', '.join(known)}")
    return VARIANTS[name](CASES[case], device)
