"""Greedy generation at a fixed, padded length, and the stride report that says whether it is right."""

import pandas as pd
import torch

from helpers.models import MiniGPT
from helpers.precision import Precision


def check_prompts(prompts: torch.Tensor, config) -> None:
    """Raises ValueError for prompts the model cannot take: (n, length) of token ids, length 1 to seq_len."""
    if prompts.dtype != torch.int64:
        raise ValueError(f"prompts of dtype {prompts.dtype} given; token ids are torch.int64")
    if prompts.ndim != 2 or prompts.shape[1] == 0 or prompts.shape[0] == 0:
        raise ValueError(
            f"prompts of shape {tuple(prompts.shape)} given; (number, length) with at least one of each is needed"
        )
    if prompts.shape[1] > config.seq_len:
        raise ValueError(f"a prompt of {prompts.shape[1]} tokens given; this model takes at most {config.seq_len}")
    outside = prompts[(prompts < 0) | (prompts >= config.vocab)]
    if len(outside):
        raise ValueError(f"token {outside[0].item()} given; tokens lie in 0 to {config.vocab - 1}")


@torch.no_grad()
def generate(model: MiniGPT, prompts: torch.Tensor, n_tokens: int, precision: Precision) -> torch.Tensor:
    """Continues (n, length) prompts greedily by `n_tokens`; returns (n, length + n_tokens) on the CPU.

    The context is padded on the right to the full seq_len: causal attention never looks right, so the padding changes
    nothing, every step has one shape, and FP8's rule (rows in multiples of 8) holds at every length. The next token is
    read at the last *real* position.
    """
    config = model.config
    check_prompts(prompts, config)
    n, length = prompts.shape
    if n_tokens < 0 or length + n_tokens > config.seq_len:
        raise ValueError(f"{length} + {n_tokens} tokens asked for; this model's limit is {config.seq_len} together")
    tokens = torch.zeros(n, config.seq_len, dtype=torch.int64, device=precision.device)
    tokens[:, :length] = prompts
    was_training = model.training
    model.eval()
    for end in range(length, length + n_tokens):
        with precision.autocast():
            logits = model(tokens)
        tokens[:, end] = logits[:, end - 1].argmax(-1)
    model.train(was_training)
    return tokens[:, : length + n_tokens].cpu()


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
