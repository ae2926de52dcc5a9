"""What the models learn from: arithmetic sequences, and text that every Python brings along. Both have 96 tokens.

Arithmetic: next token = token + stride (mod 96). The stride, 1 to 6, has to be inferred from the context. A model that
sees only the last token cannot do better than a guess among six: a loss of ln 6 = 1.79. Knowing nothing at all costs
ln 96 = 4.56. Anything below 1.79 proves that attention looks back.

Text: the help texts of Python itself, one token a character.
"""

from functools import lru_cache

import torch

VOCAB = 96
STRIDES = (1, 2, 3, 4, 5, 6)
N_HELD_OUT = 64
PROMPT_LENGTH = 8
CONTINUATION_LENGTH = 24
SPLIT_SEED = 96
CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"  # printable ASCII and newline; a token is an index into it


def split_pairs() -> tuple[torch.Tensor, torch.Tensor]:
    """All 576 (phase, stride) pairs, split for good: (512, 2) to train on and (64, 2) held out, int64.

    No training sequence *starts* with a held-out pair. Its tokens do occur further inside other sequences, so what is
    tested is whether the rule carries over to another start, not whether unseen tokens can be guessed.
    """
    pairs = torch.cartesian_prod(torch.arange(VOCAB), torch.tensor(STRIDES))
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(SPLIT_SEED))
    return pairs[order[N_HELD_OUT:]], pairs[order[:N_HELD_OUT]]


def sequences(pairs: torch.Tensor, length: int) -> torch.Tensor:
    """(n, 2) pairs of (phase, stride) -> (n, length) tokens, int64."""
    phase, stride = pairs[:, :1], pairs[:, 1:]
    return (phase + stride * torch.arange(length)) % VOCAB


def arithmetic_batch(
    batch: int, seq_len: int, generator: torch.Generator, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """A random training batch: (inputs, targets), each (batch, seq_len) int64; targets are the inputs' successors.

    The generator lives on the CPU, so that every device sees the same data.
    """
    train, _ = split_pairs()
    pick = torch.randint(len(train), (batch,), generator=generator)
    tokens = sequences(train[pick], seq_len + 1).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def held_out_prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """The test: (64, 8) prompts and their true (64, 24) continuations."""
    _, held_out = split_pairs()
    tokens = sequences(held_out, PROMPT_LENGTH + CONTINUATION_LENGTH)
    return tokens[:, :PROMPT_LENGTH], tokens[:, PROMPT_LENGTH:]


@lru_cache(maxsize=1)
def text_tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Python's help topics (`pydoc_data.topics`) in alphabetical order as tokens: (training, validation), 1-D int64.

    Validation is the last tenth. Characters outside `CHARACTERS` (typographic quotes and the like) are dropped.
    The wording differs between Python versions, so a loss on it is quoted with the version.
    """
    from pydoc_data.topics import topics  # half a megabyte of text, wanted by one notebook

    token = {character: i for i, character in enumerate(CHARACTERS)}
    text = "\n".join(topics[name] for name in sorted(topics))
    tokens = torch.tensor([token[character] for character in text if character in token])
    cut = len(tokens) * 9 // 10
    return tokens[:cut], tokens[cut:]


def text_batch(
    tokens: torch.Tensor, batch: int, seq_len: int, generator: torch.Generator, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows of a text: (inputs, targets), each (batch, seq_len) int64; targets are the inputs' successors.

    Raises ValueError if the text is shorter than a window.
    """
    if len(tokens) <= seq_len:
        raise ValueError(f"{len(tokens)} tokens given; a window of {seq_len} and its last target need {seq_len + 1}")
    start = torch.randint(len(tokens) - seq_len, (batch, 1), generator=generator)
    windows = tokens[start + torch.arange(seq_len + 1)].to(device)
    return windows[:, :-1], windows[:, 1:]


def to_text(tokens: torch.Tensor) -> str:
    """The characters of a 1-D tensor of tokens."""
    return "".join(CHARACTERS[i] for i in tokens.tolist())
