"""Key-value caches: what attention needs of the tokens so far, so that a decoding step computes one token a row.

`KVCache` is plain PyTorch, `TECache` is Transformer Engine's `InferenceParams`; both are used alike:

    cache.prefill(window, lengths)    # takes in the prompts
    x = cache(tokens, positions)      # takes in one more token a row, gives what the last block makes of it
"""

import warnings
from collections import OrderedDict
from functools import partial

import torch
import torch.nn.functional as F

from helpers.hardware import import_te
from helpers.models import MiniGPT


class KVCache:
    """Keys and values (rows, seq_len, heads, head_dim) of every block.

    They are allocated once and written in place, since a CUDA graph needs fixed addresses. The whole cache takes part in
    every step, under a mask: one shape for all.
    """

    def __init__(self, model: MiniGPT, rows: int, dtype: torch.dtype):
        config, device = model.config, model.pos.weight.device
        shape = (2, rows, config.seq_len, config.n_heads, config.d_model // config.n_heads)
        self.model = model
        self.layers = [torch.zeros(shape, dtype=dtype, device=device).unbind() for _ in model.blocks]
        self.rows = torch.arange(rows, device=device)[:, None]
        self.positions = torch.arange(config.seq_len, device=device)

    def prefill(self, window: torch.Tensor, lengths: list[int]) -> None:
        """Takes in `window` (rows, seq_len). What is right of a row's length is written over before it is ever seen."""
        self(window, self.positions.expand_as(window))

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Tokens and their positions, (rows, new) -> (rows, new, d_model)."""
        visible = (self.positions <= positions[:, :, None])[:, None]  # (rows, 1, new, seq_len)
        x = self.model.embed(tokens, positions)
        for block, layer in zip(self.model.blocks, self.layers, strict=True):
            x = block(x, partial(self.attend, layer, positions, visible))
        return x

    def attend(self, layer, positions, visible, q, k, v):
        """q, k, v: (rows, heads, new, head_dim). Writes k and v down, attends to all up to each position."""
        keys, values = layer
        keys[self.rows, positions] = k.transpose(1, 2)
        values[self.rows, positions] = v.transpose(1, 2)
        return F.scaled_dot_product_attention(q, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=visible)


class TECache:
    """The same by TE: its layers write to the cache that `InferenceParams` holds and attend to it.

    Under FP8 the weights are cast in `prefill` and kept for the steps after it.
    """

    def __init__(self, model: MiniGPT, rows: int, dtype: torch.dtype):
        te, _ = import_te()
        config = model.config
        self.model, self.rows = model, rows
        with warnings.catch_warnings():  # it calls torch.range, which is deprecated
            warnings.simplefilter("ignore")
            self.params = te.InferenceParams(
                max_batch_size=rows,
                max_sequence_length=-(-config.seq_len // 64) * 64,  # cuDNN's attention takes multiples of 64
                num_heads_kv=config.n_heads,
                head_dim_k=config.d_model // config.n_heads,
                dtype=dtype,
            )

    def prefill(self, window: torch.Tensor, lengths: list[int]) -> None:
        """Takes in the first lengths[i] tokens of row i of `window` (rows, seq_len)."""
        self.params.reset()
        self.params.pre_step(OrderedDict(enumerate(lengths)))
        self.blocks(self.model.embed(window), first=True)
        self.params.pre_step(OrderedDict.fromkeys(range(self.rows), 1))  # from now on one token a row

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Tokens and their positions, (rows, 1) -> (rows, 1, d_model)."""
        # How many tokens each row has by now, summed up. pre_step() would write it from the CPU; done here, on the GPU, it
        # can be part of a CUDA graph.
        self.params.cu_seqlens_kv[1:] = (positions[:, 0] + 1).cumsum(0)
        return self.blocks(self.model.embed(tokens, positions), first=False)

    def blocks(self, x: torch.Tensor, first: bool) -> torch.Tensor:
        for block in self.model.blocks:
            x = block(
                x,
                self_attn_mask_type="padding_causal",  # the cache asks for it: rows have lengths of their own
                inference_params=self.params,
                is_first_microbatch=first,  # False: the FP8 weights of the call before still hold
            )
        return x
