"""Continues prompts, greedily or by sampling, in three ways that give the same tokens and take very different times.

    growing   the context gets longer by a token a step: the obvious way, and a new shape every time
    fixed     the context is padded on the right to the full length: one shape for all steps
    cached    keys and values of earlier tokens are kept (helpers/kv_cache.py): a step computes one token a row

Causal attention never looks right, so padding there changes nothing: the prediction is read at the last *real* position.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pandas as pd
import torch

from helpers import emulation, fp8_state
from helpers.kv_cache import KVCache, TECache
from helpers.models import GPTConfig, MiniGPT
from helpers.precision import Precision

STRATEGIES = ("growing", "fixed", "cached")
AT_LIMIT = ("error", "stop", "slide")


@dataclass(frozen=True)
class Sampling:
    """Draws tokens with the probabilities softmax(logits / temperature), only among the `top_k` likeliest if that is given.

    The generator may live on any device; one on the CPU gives every device and every strategy the same draws.
    """

    generator: torch.Generator
    temperature: float = 1.0
    top_k: int | None = None

    def __post_init__(self):
        if not isinstance(self.generator, torch.Generator):
            raise ValueError(f"generator={self.generator!r} given; use torch.Generator().manual_seed(0), say")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature} given; a number above 0 is needed (greedy: no sampling)")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} given; a whole number of at least 1 is needed")

    def noise(self, rows: int, vocab: int) -> torch.Tensor:
        return torch.empty(rows, vocab, device=self.generator.device).exponential_(generator=self.generator)

    def choose(self, logits: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Logits and exponential noise (rows, vocab) -> tokens (rows,).

        The smallest noise_i / p_i falls on i with probability p_i: a draw that a CUDA graph can hold, since the noise comes
        from outside.
        """
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[:, -1:], -math.inf)
        return (logits / self.temperature - noise.log()).argmax(-1)


def generate(
    model: MiniGPT,
    prompts: torch.Tensor | Sequence[torch.Tensor],
    n_tokens: int,
    precision: Precision,
    strategy: str = "fixed",
    at_limit: str = "error",
    sampling: Sampling | None = None,
    graph: bool = False,
) -> torch.Tensor | list[torch.Tensor]:
    """Continues prompts by `n_tokens`; returns prompts and continuations on the CPU.

    Prompts are (n, length) int64, which gives (n, length + n_tokens), or a list of 1-D tensors of any lengths, which gives
    a list. `at_limit` says what happens at the model's seq_len: "error" refuses, "stop" ends that row there, "slide" goes
    on from the last seq_len tokens. Greedy without `sampling`. `graph` runs each step as one CUDA graph. Raises ValueError
    for bad input.
    """
    config = model.config
    rows = check_prompts(prompts, config)
    check_choice("strategy", strategy, STRATEGIES)
    check_choice("at_limit", at_limit, AT_LIMIT)
    if n_tokens < 0:
        raise ValueError(f"{n_tokens} tokens asked for; 0 or more are possible")
    longest, shortest = max(map(len, rows)), min(map(len, rows))
    if at_limit == "error" and longest + n_tokens > config.seq_len:
        raise ValueError(
            f"{longest} + {n_tokens} tokens asked for; this model's limit is {config.seq_len} together. Ask for fewer, or "
            "say at_limit='stop' or at_limit='slide'"
        )
    room = math.inf if at_limit == "slide" else config.seq_len
    steps = min(n_tokens, room - shortest)
    with decoding(model, rows, precision, strategy, sampling, at_limit == "slide", graph) as step:
        new = [step().clone() for _ in range(steps)]
    new = torch.stack(new, 1).cpu() if new else torch.empty(len(rows), 0, dtype=torch.int64)
    continued = [torch.cat([row, added[: min(steps, room - len(row))]]) for row, added in zip(rows, new, strict=True)]
    return torch.stack(continued) if isinstance(prompts, torch.Tensor) else continued


def check_prompts(prompts: torch.Tensor | Sequence[torch.Tensor], config: GPTConfig) -> list[torch.Tensor]:
    """The prompts as 1-D tensors on the CPU. Raises ValueError for those the model cannot take."""
    is_tensor = isinstance(prompts, torch.Tensor)
    rows = [] if is_tensor and prompts.ndim != 2 else list(prompts)
    if not rows or not all(isinstance(row, torch.Tensor) and row.ndim == 1 and len(row) for row in rows):
        raise ValueError(
            f"prompts {f'of shape {tuple(prompts.shape)}' if is_tensor else 'in a list'} given; a tensor (number, length) or "
            "a list of 1-D tensors is needed, with at least one prompt and one token in each"
        )
    rows = [row.cpu() for row in rows]
    for row in rows:
        if row.dtype != torch.int64:
            raise ValueError(f"prompts of dtype {row.dtype} given; token ids are torch.int64")
        if len(row) > config.seq_len:
            raise ValueError(f"a prompt of {len(row)} tokens given; this model takes at most {config.seq_len}")
        outside = row[(row < 0) | (row >= config.vocab)]
        if len(outside):
            raise ValueError(f"token {outside[0].item()} given; tokens lie in 0 to {config.vocab - 1}")
    return rows


def check_choice(name: str, given: str, known: tuple[str, ...]) -> None:
    if given not in known:
        raise ValueError(f"{name}={given!r} is not known; choose one of {', '.join(known)}")


# --- One step after the other ---


class Decoder:
    """A batch of rows that get longer by a token a step.

    `window` (rows, seq_len + 1) holds the tokens, `filled` (rows,) how many are real, `newest` (rows,) the last one. They
    stay at their addresses and no step asks the GPU for a value, so that a step can be a CUDA graph. What the CPU has to
    know, the lengths, it counts itself.
    """

    def __init__(
        self,
        model: MiniGPT,
        prompts: list[torch.Tensor],
        precision: Precision,
        strategy: str,
        sampling: Sampling | None,
        slide: bool,
    ):
        self.model, self.strategy, self.sampling, self.slide = model, strategy, sampling, slide
        self.n, self.limit = len(prompts), model.config.seq_len
        # A batch that FP8 cannot take is filled up with copies of its rows, which change no amax.
        rows = padded_rows(len(prompts), 1 if strategy != "fixed" else self.limit, precision)
        prompts = [prompts[i % len(prompts)] for i in range(rows)]
        self.lengths = [len(prompt) for prompt in prompts]
        # One column more than the limit: in a full row the new token comes in before the oldest one goes.
        window = torch.zeros(rows, self.limit + 1, dtype=torch.int64)
        for row, prompt in zip(window, prompts, strict=True):
            row[: len(prompt)] = prompt
        self.window = window.to(precision.device)
        self.filled = torch.tensor(self.lengths, device=precision.device)
        self.newest = torch.zeros_like(self.filled)
        self.every_row = torch.arange(rows, device=precision.device)
        self.noise = torch.ones(rows, model.config.vocab, device=precision.device)
        if strategy == "cached":
            dtype = torch.float32 if precision.name == "fp32" else torch.bfloat16
            self.cache = (TECache if model.backend == "te" else KVCache)(model, rows, dtype)
            self.cache.prefill(self.window[:, : self.limit], self.lengths)

    def logits(self) -> torch.Tensor:
        """What the model predicts after the last real token of each row: (rows, vocab)."""
        last = self.filled - 1
        if self.strategy == "cached":  # its keys and values are written in this step, even if it was in the prompt
            token = self.window[self.every_row, last]
            return self.model.logits(self.cache(token[:, None], last[:, None])[:, 0])
        length = max(self.lengths) if self.strategy == "growing" else self.limit
        return self.model.logits(self.model.hidden(self.window[:, :length])[self.every_row, last])

    def advance(self) -> None:
        """One step: predict, choose, append."""
        logits = self.logits()
        self.newest.copy_(self.sampling.choose(logits, self.noise) if self.sampling else logits.argmax(-1))
        self.window[self.every_row, self.filled] = self.newest
        self.filled.add_(1).clamp_(max=self.limit)

    def before(self) -> None:
        """What the CPU does before a step: it draws the noise. (Copies that fill up the batch need none.)"""
        if self.sampling:
            self.noise[: self.n] = self.sampling.noise(self.n, self.noise.shape[1])

    def after(self) -> None:
        """What the CPU does after a step: it counts, and if rows are to slide, those that were full lose their oldest token."""
        full = [i for i, length in enumerate(self.lengths) if length == self.limit]
        self.lengths = [min(length + 1, self.limit) for length in self.lengths]
        if full and self.slide:
            self.window[full] = self.window[full].roll(-1, 1)
            if self.strategy == "cached":  # every token of such a row has a new position: what was cached is void
                self.cache.prefill(self.window[:, : self.limit], self.lengths)


@contextmanager
def decoding(
    model: MiniGPT,
    prompts: list[torch.Tensor],
    precision: Precision,
    strategy: str,
    sampling: Sampling | None = None,
    slide: bool = False,
    graph: bool = False,
    compiled: bool = False,
) -> Iterator[Callable[[], torch.Tensor]]:
    """Gives a function that adds a token to every row and returns the new ones (n,), which the next call overwrites.

    `compiled` lets torch.compile fuse the small kernels of a step (plain PyTorch models only), `graph` makes it one CUDA
    graph. Raises ValueError where that cannot be.
    """
    if graph and (precision.device != "cuda" or strategy == "growing"):
        raise ValueError(
            f"graph=True with strategy={strategy!r} on {precision.device!r}: a CUDA graph needs a GPU, and one shape for "
            "all steps, which 'fixed' and 'cached' have"
        )
    if compiled and (model.backend == "te" or precision.kind == "emulated"):
        raise ValueError(f"compiled=True needs a plain PyTorch model; this one is {precision.label}, {model.backend!r}")
    with inference(model, precision):
        decoder = Decoder(model, prompts, precision, strategy, sampling, slide)
        advance = torch.compile(decoder.advance) if compiled else decoder.advance
        if graph:
            advance = captured(advance, keep=(decoder.window, decoder.filled))

        def step():
            decoder.before()
            advance()
            decoder.after()
            return decoder.newest[: decoder.n]

        yield step


@contextmanager
def inference(model: MiniGPT, precision: Precision) -> Iterator[None]:
    """Forward passes that training does not notice: no gradients, no dropout; mode and FP8 state are put back afterwards.

    (TE collects the amax of every forward pass in its histories' staging row, for the next training step to find.) All
    passes share one autocast region, so that PyTorch casts FP32 weights once. TE's layers cast them in each step: for speed
    hold their weights in BF16, model.to(torch.bfloat16).
    """
    was_training = model.training
    before = {name: tensor.clone() for name, tensor in fp8_state.delayed_state(model).items()}
    model.eval()
    try:
        with torch.no_grad(), precision.autocast():
            yield
    finally:
        model.train(was_training)
        for name, tensor in fp8_state.delayed_state(model).items():
            if name in before:
                tensor.copy_(before[name])
            elif name.endswith("amax_history"):  # TE made it in these passes
                tensor.zero_()


def captured(step: Callable[[], None], keep: Sequence[torch.Tensor]) -> Callable[[], None]:
    """`step` as one CUDA graph: all its kernels, with their addresses, are launched at once from then on.

    Before the capture PyTorch wants a few steps on another stream. What they changed in `keep` is put back.
    """
    before = [tensor.clone() for tensor in keep]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for tensor, old in zip(keep, before, strict=True):
        tensor.copy_(old)
    return graph.replay


def padded_rows(rows: int, tokens_a_row: int, precision: Precision) -> int:
    """`rows`, or as many as FP8 needs: rows times tokens a row in multiples of 8 (MXFP8: 32, NVFP4: 16)."""
    if precision.name != "fp8":
        return rows
    recipe = getattr(emulation, type(precision.recipe).__name__)  # TE's recipes have the same names
    multiple = recipe.tokens_multiple_of // math.gcd(recipe.tokens_multiple_of, tokens_a_row)
    return -(-rows // multiple) * multiple


def stride_report(generated: torch.Tensor, prompt_length: int, vocab: int = 96) -> pd.DataFrame:
    """One row a sequence: its stride, the continuation's differences, how many tokens are right, whether all are.

    `generated` is (n, prompt_length + n_tokens); the prompt itself (at least two tokens) says what the stride is.
    """
    differences = (generated[:, 1:] - generated[:, :-1]) % vocab
    stride = differences[:, :1]
    right = differences[:, prompt_length - 1 :] == stride
    return pd.DataFrame(
        {
            "first token": generated[:, 0].tolist(),
            "stride": stride[:, 0].tolist(),
            "differences": [" ".join(map(str, row)) for row in differences[:, prompt_length - 1 :].tolist()],
            "right": right.cumprod(1).sum(1).tolist(),
            "exact": right.all(1).tolist(),
        }
    )
