"""Ten questions at the end of notebook 05: known rules in situations that no notebook has shown."""

from dataclasses import dataclass
from html import escape

from IPython.display import Markdown, display


@dataclass(frozen=True)
class Question:
    text: str
    choices: tuple[str, ...]  # a, b, c, …
    right: str  # a letter
    why: str
    shown_in: str  # notebook and section


QUESTIONS = (
    Question(
        "A language model rebuilt from `te.TransformerLayer` trains without an error, but its loss stops where a model would that sees "
        "one token at a time. What do you look at first?",
        ("the learning rate", "the FP8 scales", "the layout of the input", "the dropout"),
        "c",
        "TE takes (sequence, batch, width) unless told otherwise. Batch-first data makes attention run across the batch, and no token "
        "sees its past.",
        "03, 4",
    ),
    Question(
        "An FP8 server pads nothing. With 64 requests at a time it never fails, with one it fails at seven lengths of eight. Why?",
        (
            "one request gives a poor amax",
            "batch times length has to be a multiple of 8",
            "the length has to be a multiple of 8",
            "one request leaves the GPU idle",
        ),
        "b",
        "A layer sees rows = batch x length. 64 times anything is a multiple of 8.",
        "05, 3",
    ),
    Question(
        "A colleague multiplies the loss by 1024 to make FP8 gradients more exact. Each is scaled from its amax anyway. "
        "What changes, once training is under way?",
        (
            "gradients become more exact",
            "large gradients are cut off",
            "next to nothing",
            "fewer gradients become zero",
        ),
        "c",
        "Amaxes grow by 1024, scales shrink by 1024, and the same bits are stored. A scale buys range, not precision.",
        "01, 5",
    ),
    Question(
        "Your FP8 step takes longer than the BF16 one, and the GPU works a third of the time. What helps?",
        (
            "a shorter amax history",
            "E4M3 for gradients, too",
            "weights stored in FP8",
            "more work a launch, or fewer launches",
        ),
        "d",
        "A faster GEMM only lengthens the wait. Larger matrices, or CUDA graphs, shorten it.",
        "04, 6 and 7",
    ),
    Question(
        "A report: BF16, then FP8, five steps each, from the first step on; FP8 is 1.9 times as fast. What do you conclude?",
        (
            "FP8 is 1.9 times as fast",
            "nothing: BF16 paid for the start",
            "FP8 is faster, by some factor",
            "BF16 is faster",
        ),
        "b",
        "What runs first pays for memory and kernels that both use. Even who is faster is open.",
        "04, 5",
    ),
    Question(
        "You go from 1,000 to 1,000,000 tokens a batch; the loss is still their mean. What happens in the first step under HYBRID?",
        (
            "more gradients round to zero than before",
            "the same: the scale takes care of it",
            "gradients overflow",
            "nothing: E5M2 reaches low enough",
        ),
        "a",
        "Each gradient is ten powers of two smaller, and the scales are still 1. E5M2 reaches down to 2⁻¹⁶ and no further.",
        "05, 7",
    ),
    Question(
        "FP8, a history of 16: after each validation run the training loss is worse for some 16 steps. What is the likely cause?",
        (
            "validation changes the weights",
            "dropout stays switched off",
            "the validation data's amax is in the history",
            "the optimizer forgets its moments",
        ),
        "c",
        "TE collects amaxes without gradients, too; the next training step takes them for its own, and the history remembers an outlier.",
        "05, 5",
    ),
    Question(
        "Seven billion parameters with AdamW in FP32 keep 112 GB between two BF16 steps. And between two FP8 steps?",
        ("28 GB", "56 GB", "98 GB", "112 GB"),
        "d",
        "Weight, gradient and two moments stay FP32, 16 bytes a parameter. Only activations kept for backward can shrink.",
        "03, 5",
    ),
    Question(
        "Decoding: 16 tokens at a time meet a weight of 8192 x 8192, which is cast to FP8 in every call. Does FP8 pay?",
        (
            "yes: the matrix is large",
            "no: only 16 rows share the cast of the weight",
            "yes: the sums are long",
            "no: 8192 is not a multiple of 16",
        ),
        "b",
        "Casts an operation are (1/m + 1/n) / 2, and m is 16. The length of the sums cancels. Keep the weight in FP8.",
        "01, 6",
    ),
    Question(
        "Numbers spread evenly between -1 and 1, each format with its best scale: which has the smaller error?",
        ("INT8", "E4M3", "both the same", "it depends on the scale"),
        "a",
        "INT8 spends 127 steps on each side evenly, E4M3 has 8 in each octave. Its strength is range.",
        "01, 5",
    ),
)


@dataclass(frozen=True)
class Explained:
    """Whether an answer is right, and why."""

    question: Question
    letter: str

    def __repr__(self) -> str:
        q = self.question
        chosen = (
            f"{self.letter}) is right." if self.letter == q.right else f"Not {self.letter}) but {q.right}) {self.text}."
        )
        return f"{'✔' if self.letter == q.right else '✘'} {chosen} {q.why} (Shown in {q.shown_in}.)"

    @property
    def text(self) -> str:
        return self.question.choices["abcd".index(self.question.right)]


def answer(number: int, letter: str) -> Explained:
    """The explanation, as in answer(3, "b"). Raises ValueError for a question or a letter that does not exist."""
    if number not in range(1, len(QUESTIONS) + 1):
        raise ValueError(f"there is no question {number!r}; there are 1 to {len(QUESTIONS)}")
    question = QUESTIONS[number - 1]
    letters = "abcd"[: len(question.choices)]
    if letter not in tuple(letters):
        raise ValueError(f"question {number} has no choice {letter!r}; choose one of {', '.join(letters)}")
    return Explained(question, letter)


def ask() -> None:
    """Shows the questions, each with its choices and, where ipywidgets runs, buttons that explain the answer."""
    try:
        import ipywidgets as w
    except ImportError:
        w = None
    for number, question in enumerate(QUESTIONS, 1):
        choices = "\n".join(f"- {letter}) {choice}" for letter, choice in zip("abcd", question.choices, strict=False))
        display(Markdown(f"**{number}.** {question.text}\n\n{choices}"))
        if w:
            display(buttons(w, number))
    display(Markdown('<small>In a cell of your own: `answer(3, "b")` explains one answer.</small>'))


def buttons(w, number: int):
    """A row of letters, and the explanation once one is pressed."""
    letters = w.ToggleButtons(options=list("abcd"[: len(QUESTIONS[number - 1].choices)]), value=None)
    letters.style.button_width = "3em"
    explained = w.HTML()

    def pressed(change):
        explained.value = (
            f"<div style='max-width:52em;line-height:1.4'>{escape(repr(answer(number, change['new'])))}</div>"
        )

    letters.observe(pressed, "value")
    return w.VBox([letters, explained])
