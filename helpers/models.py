"""MiniGPT: one small causal language model, built from plain PyTorch or from Transformer Engine's layers.

Both backends compute the same function from the same weights: pre-norm blocks, causal attention, tanh GELU, no dropout.
Weights have one set of names, the plain ones (`blocks.0.qkv.weight`), whatever the backend: `plain_state` and
`load_plain_state` translate, so that a checkpoint of one loads into the other.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from helpers.hardware import import_te


@dataclass(frozen=True)
class GPTConfig:
    d_model: int
    n_layers: int
    n_heads: int
    seq_len: int
    vocab: int = 96

    def __post_init__(self):
        for name, value in vars(self).items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} given; a whole number of at least 1 is needed")
        if self.d_model % self.n_heads:
            raise ValueError(
                f"d_model={self.d_model} does not divide by n_heads={self.n_heads}; choose a multiple, such as {self.n_heads * max(1, self.d_model // self.n_heads)}"
            )

    def n_params(self) -> int:
        """Parameters by formula: 12 d^2 + 13 d a block, two embeddings, the last LayerNorm and the head."""
        d, v = self.d_model, self.vocab
        return self.n_layers * (12 * d * d + 13 * d) + (v + self.seq_len) * d + 2 * d + v * d

    def flops_per_step(self, batch: int) -> int:
        """FLOPs of a training step: 2 a weight and token forward, twice that backward; causal attention counts its half."""
        d, t = self.d_model, self.seq_len
        weights = self.n_layers * 12 * d * d + self.vocab * d
        attention = self.n_layers * 2 * t * d  # QK^T and AV: 2 x 2 x t x d, and half of that under the causal mask
        return 3 * batch * t * (2 * weights + attention)

    def check_fp8(self) -> None:
        """FP8 tensor cores take dimensions that are multiples of 16. Raises ValueError naming those that are not."""
        bad = {k: v for k, v in {"d_model": self.d_model, "seq_len": self.seq_len}.items() if v % 16}
        if bad:
            raise ValueError(
                f"FP8 needs multiples of 16; given {', '.join(f'{k}={v}' for k, v in bad.items())}. Pad them up, for example to {', '.join(str(-(-v // 16) * 16) for v in bad.values())}"
            )


@dataclass(frozen=True)
class Preset:
    config: GPTConfig
    batch: int
    benchmark_batch: int
    steps: int  # after which the arithmetic sequences are solved
    lr: float  # AdamW's learning rate


PRESETS = {
    "laptop": Preset(
        GPTConfig(d_model=128, n_layers=2, n_heads=4, seq_len=64), batch=16, benchmark_batch=16, steps=150, lr=1e-3
    ),
    "compact": Preset(
        GPTConfig(d_model=768, n_layers=4, n_heads=12, seq_len=256), batch=16, benchmark_batch=32, steps=150, lr=6e-4
    ),
    "scale_up": Preset(
        GPTConfig(d_model=2048, n_layers=12, n_heads=16, seq_len=256), batch=16, benchmark_batch=32, steps=150, lr=3e-4
    ),
}


def preset(name: str) -> Preset:
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} is not known; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def causal_attention(q, k, v):
    """Each (batch, heads, seq, head_dim), in and out: every position sees itself and what is before it."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    """One pre-norm transformer block in plain PyTorch: (batch, seq, d_model) in and out."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        d = config.d_model
        self.n_heads = config.n_heads
        self.ln1 = nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d)
        self.proj = nn.Linear(d, d)
        self.ln2 = nn.LayerNorm(d)
        self.fc1 = nn.Linear(d, 4 * d)
        self.fc2 = nn.Linear(4 * d, d)

    def forward(self, x, attend=causal_attention):
        """`attend` can be one that also looks at earlier tokens: see helpers/kv_cache.py."""
        batch, seq, d = x.shape
        qkv = self.qkv(self.ln1(x)).view(batch, seq, 3, self.n_heads, d // self.n_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, seq, head_dim)
        attended = attend(q, k, v)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, seq, d))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x)), approximate="tanh"))


def te_block(config: GPTConfig, layer_number: int, device: str):
    """The same block as one `te.TransformerLayer`. All but the mask differ from the defaults, and matter."""
    te, why = import_te()
    if te is None:
        raise ValueError(f"backend 'te' is not available here: {why}. Use backend='torch'")
    return te.TransformerLayer(
        config.d_model,
        4 * config.d_model,
        config.n_heads,
        layer_number=layer_number,
        attn_input_format="bshd",  # the default, "sbhd", would attend across the batch
        self_attn_mask_type="causal",
        hidden_dropout=0.0,  # both dropouts default to 0.1
        attention_dropout=0.0,
        fuse_qkv_params=True,  # one weight for q, k and v, as FP8 parameters need
        qkv_weight_interleaved=False,  # its rows: all q, then all k, then all v
        device=device,
    )


class MiniGPT(nn.Module):
    """Tokens (batch, seq) int64 -> logits (batch, seq, vocab) float.

    Initial weights come from `generator`: one on the CPU (the default) makes both backends and all devices start
    alike; one on the GPU draws a large model's weights in no time.
    """

    def __init__(
        self, config: GPTConfig, backend: str = "torch", device: str = "cpu", generator: torch.Generator | None = None
    ):
        super().__init__()
        if backend not in ("torch", "te"):
            raise ValueError(f"backend {backend!r} is not known; choose 'torch' or 'te'")
        self.config, self.backend = config, backend
        self.emb = nn.Embedding(config.vocab, config.d_model, device=device)
        self.pos = nn.Embedding(config.seq_len, config.d_model, device=device)
        if backend == "te":
            blocks = [te_block(config, i + 1, device) for i in range(config.n_layers)]
        else:
            blocks = [Block(config).to(device) for _ in range(config.n_layers)]
        self.blocks = nn.ModuleList(blocks)
        self.ln_f = nn.LayerNorm(config.d_model, device=device)
        self.head = nn.Linear(config.d_model, config.vocab, bias=False, device=device)
        load_plain_state(self, initial_state(config, generator or torch.Generator().manual_seed(0)))

    def forward(self, tokens):
        return self.logits(self.hidden(tokens))

    def hidden(self, tokens):
        """(batch, seq) int64 -> (batch, seq, d_model), what the last block gives."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x

    def embed(self, tokens, positions=None):
        """(batch, seq) int64 -> (batch, seq, d_model). Raises ValueError if there are more tokens than positions.

        `positions` (batch, seq): where the tokens stand, if not at 0, 1, 2, ...
        """
        seq = tokens.shape[1]
        if seq > self.config.seq_len:
            raise ValueError(f"{seq} tokens given; this model takes at most {self.config.seq_len}")
        x = self.emb(tokens) + self.pos(torch.arange(seq, device=tokens.device) if positions is None else positions)
        if torch.is_autocast_enabled(x.device.type):
            # TransformerLayer does this itself: the residual stream is BF16. Both backends do, to stay the same function.
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return x

    def logits(self, x):
        """(..., d_model) -> (..., vocab) float32."""
        return self.head(self.ln_f(x)).float()


def initial_state(config: GPTConfig, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """GPT-2's initialization under the plain names: N(0, 0.02), the two layers that write to the residual stream
    scaled by 1/sqrt(2 n_layers), biases 0, LayerNorm 1. FP32, on the generator's device."""
    d = config.d_model
    shapes = {"emb.weight": (config.vocab, d), "pos.weight": (config.seq_len, d), "head.weight": (config.vocab, d)}
    for i in range(config.n_layers):
        shapes |= {
            f"blocks.{i}.qkv.weight": (3 * d, d),
            f"blocks.{i}.proj.weight": (d, d),
            f"blocks.{i}.fc1.weight": (4 * d, d),
            f"blocks.{i}.fc2.weight": (d, 4 * d),
        }
    state = {}
    for name, shape in shapes.items():
        residual = name.endswith(("proj.weight", "fc2.weight"))
        std = 0.02 / (2 * config.n_layers) ** 0.5 if residual else 0.02
        state[name] = torch.randn(shape, generator=generator, device=generator.device) * std
        if name.startswith("blocks"):
            state[name.replace("weight", "bias")] = torch.zeros(shape[0])
    for norm in ["ln_f", *(f"blocks.{i}.{ln}" for i in range(config.n_layers) for ln in ("ln1", "ln2"))]:
        state |= {f"{norm}.weight": torch.ones(d), f"{norm}.bias": torch.zeros(d)}
    return state


# A block's parameters: plain name -> the name inside te.TransformerLayer.
TE_NAMES = {
    f"{plain}.{kind}": te_prefix + kind
    for plain, te_prefix in {
        "ln1": "self_attention.layernorm_qkv.layer_norm_",
        "qkv": "self_attention.layernorm_qkv.",
        "proj": "self_attention.proj.",
        "ln2": "layernorm_mlp.layer_norm_",
        "fc1": "layernorm_mlp.fc1_",
        "fc2": "layernorm_mlp.fc2_",
    }.items()
    for kind in ("weight", "bias")
}


def plain_parameters(model: MiniGPT) -> dict[str, nn.Parameter]:
    """The model's own parameters (not copies) under their plain names."""
    parameters = dict(model.named_parameters())
    if model.backend == "torch":
        return parameters
    plain = {}
    for name, parameter in parameters.items():
        if name.startswith("blocks."):
            _, i, inner = name.split(".", 2)
            back = {te_name: plain_name for plain_name, te_name in TE_NAMES.items()}
            name = f"blocks.{i}.{back[inner]}"
        plain[name] = parameter
    return plain


def plain_state(model: MiniGPT) -> dict[str, torch.Tensor]:
    """A copy of the weights under their plain names, on the CPU."""
    return {name: p.detach().to("cpu", copy=True) for name, p in plain_parameters(model).items()}


def load_plain_state(model: MiniGPT, state: dict[str, torch.Tensor]) -> None:
    """Copies weights in. Raises ValueError, before anything is changed, if a name or a shape does not fit."""
    parameters = plain_parameters(model)
    missing, unknown = parameters.keys() - state.keys(), state.keys() - parameters.keys()
    if missing or unknown:
        raise ValueError(
            f"these weights are of another model: missing {sorted(missing) or 'none'}, unknown {sorted(unknown) or 'none'}"
        )
    for name, p in parameters.items():
        if p.shape != state[name].shape:
            raise ValueError(f"{name} has shape {tuple(state[name].shape)}, this model needs {tuple(p.shape)}")
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(state[name])


def transplant(source: MiniGPT, target: MiniGPT) -> None:
    """Copies the weights of one model into another, whatever the backends."""
    load_plain_state(target, plain_state(source))
