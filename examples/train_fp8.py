"""Trains a small GPT on text, in BF16 or in FP8 with Transformer Engine. One file to copy from.

python train_fp8.py                                             # BF16, on any machine
python train_fp8.py --precision delayed --width 768 --layers 4  # FP8 (compute capability 8.9 and up); or: current, block
torchrun --nproc-per-node 2 train_fp8.py --precision delayed    # data parallel
python train_fp8.py --steps 400 --checkpoint run.safetensors    # saves there, and goes on from there if it exists
"""

import argparse
import os
from contextlib import nullcontext
from pydoc_data.topics import topics  # half a megabyte of text that every Python brings along

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--precision", default="bf16", choices=("bf16", "delayed", "current", "block"))
sizes = {"width": 128, "layers": 2, "heads": 4, "length": 64, "batch": 16, "accumulate": 2, "steps": 200, "lr": 1e-3}
for name, default in (sizes | {"checkpoint": ""}).items():
    parser.add_argument(f"--{name}", type=type(default), default=default)
args = parser.parse_args()

rank, ranks, local_rank = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
cuda = torch.cuda.is_available()
device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
if ranks > 1:
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
if cuda:
    torch.cuda.set_device(device)
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    classes = {"delayed": "DelayedScaling", "current": "Float8CurrentScaling", "block": "Float8BlockScaling"}
    recipe = getattr(recipes, classes[args.precision])() if args.precision != "bf16" else None
elif args.precision != "bf16":
    raise SystemExit(f"--precision {args.precision} needs a GPU of compute capability 8.9 or higher; use bf16")


def make_block():
    if not cuda:  # the same function in plain PyTorch
        options = {"activation": lambda x: F.gelu(x, approximate="tanh"), "batch_first": True, "norm_first": True}
        return nn.TransformerEncoderLayer(args.width, args.heads, 4 * args.width, dropout=0.0, **options)
    # The default layout, sbhd, would attend across the batch; dropouts are 0.1 by default.
    options = {"attn_input_format": "bshd", "self_attn_mask_type": "causal", "fuse_qkv_params": True}
    options |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return te.TransformerLayer(args.width, 4 * args.width, args.heads, **options)


class GPT(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, args.width), nn.Embedding(args.length, args.width)
        self.blocks = nn.ModuleList(make_block() for _ in range(args.layers))
        self.norm, self.head = nn.LayerNorm(args.width), nn.Linear(args.width, vocabulary, bias=False)  # stay in BF16
        for weight in (p for p in self.parameters() if p.ndim == 2):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens, first=None):  # first: make FP8 copies of the weights, which the next forwards use again
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x, mask = self.tokens(tokens) + self.places(places), places[None, :] > places[:, None]
        for block in self.blocks:
            x = block(x, **({"is_first_microbatch": first} if cuda else {"src_mask": mask, "is_causal": True}))
        return self.head(self.norm(x)).float()


def forward(module, tokens, first=None):
    """The forward pass in low precision. Loss, backward and optimizer stay outside of these contexts."""
    group = dist.group.WORLD if ranks > 1 else None  # one amax, and so one scale, on all ranks
    fp8 = te.autocast(recipe=recipe, amax_reduction_group=group) if args.precision != "bf16" else nullcontext()
    with torch.autocast(device.type, torch.bfloat16), fp8:
        return module(tokens, first=first)


characters = "\n" + "".join(map(chr, range(32, 127)))  # 96 of them: FP8 wants multiples of 16
text = torch.tensor([characters.index(c) for k in sorted(topics) for c in topics[k] if c in characters])
torch.manual_seed(0)  # the same weights on all ranks
model = GPT(len(characters)).to(device)  # FP32 parameters: they are the master weights
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
wrapped = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
generator = torch.Generator().manual_seed(1)  # the same on all ranks: each takes its share of what it draws


def train_step():
    optimizer.zero_grad(set_to_none=True)
    starts = torch.randint(len(text) - args.length, (args.accumulate, ranks * args.batch), generator=generator)
    total = 0.0
    for i, start in enumerate(starts[:, rank::ranks]):
        windows = text[start[:, None] + torch.arange(args.length + 1)].to(device)
        with wrapped.no_sync() if ranks > 1 and i < args.accumulate - 1 else nullcontext():  # gradients travel once
            logits = forward(wrapped, windows[:, :-1], first=i == 0)
            loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()) / args.accumulate
            loss.backward()
        total += loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if ranks > 1:
        dist.all_reduce(total)
    return total / ranks


def live_tensors():
    """Everything that training changes, by name: weights, Adam's states, delayed scaling's scales and histories."""
    found = {f"model.{name}": p.data for name, p in model.named_parameters()}
    found |= {f"adam.{n}.{k}": t for n, p in model.named_parameters() for k, t in optimizer.state[p].items()}
    for name, module in model.named_modules():
        for way, state in getattr(module, "fp8_meta", {}).items():
            if getattr(state, "amax_history", None) is not None:
                found |= {f"fp8.{name}.{way}.scale": state.scale, f"fp8.{name}.{way}.history": state.amax_history}
    return found


step, settings = 0, str({k: v for k, v in vars(args).items() if k not in ("steps", "checkpoint")})
if os.path.exists(args.checkpoint):
    train_step()  # makes all tensors, which are then overwritten
    with safe_open(args.checkpoint, "pt") as file:
        if file.metadata()["settings"] != settings or {*file.keys()} != {*live_tensors(), "generator"}:
            raise SystemExit(f"{args.checkpoint} was made with {file.metadata()['settings']}; this run has {settings}")
        for name, tensor in live_tensors().items():
            tensor.copy_(file.get_tensor(name))
        generator.set_state(file.get_tensor("generator"))
        step = int(file.metadata()["step"])
while step < args.steps:
    loss, step = train_step(), step + 1
    if step % 20 and step < args.steps:
        continue  # to read the loss is to wait for the GPU
    if not torch.isfinite(loss):
        raise SystemExit(f"step {step}: the loss is {loss.item()}; does it happen with --precision bf16, too?")
    if rank == 0:
        print(f"step {step:5}  loss {loss.item():.4f}", flush=True)
    if rank == 0 and args.checkpoint:  # no pickle; and the old file or the new one, never half of one
        tensors = {k: t.to("cpu", copy=True).contiguous() for k, t in live_tensors().items()}
        tensors["generator"] = generator.get_state()
        save_file(tensors, f"{args.checkpoint}.tmp", {"step": str(step), "settings": settings})
        os.replace(f"{args.checkpoint}.tmp", args.checkpoint)

with (
    torch.no_grad()
):  # at a fixed, padded length: FP8 wants multiples of 16, and causal attention looks to the left only
    tokens = F.pad(text[:16], (0, args.length - 16))[None].to(device)
    for end in range(16, args.length):
        tokens[:, end] = forward(model, tokens)[:, end - 1].argmax(-1)  # the last real position, not the padding's
if rank == 0:
    print("".join(characters[i] for i in tokens[0].tolist()))
if ranks > 1:
    dist.destroy_process_group()
