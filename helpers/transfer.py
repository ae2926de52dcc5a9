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
        "You rebuild your language model from `te.TransformerLayer`. It trains without an error, but its loss stops where a model "
        "would stop that sees one token at a time. What do you look at first?",
        ("the learning rate", "the FP8 scales", "the layout of the input", "the dropout"),
        "c",
        "By default TE takes (sequence, batch, width). With batch-first data attention runs across the batch, and no token sees its past. "
        "Dropout, scales and learning rate make training worse; they do not hide the context.",
        "03, 4",
    ),
    Question(
        "An FP8 server pads nothing. With 64 requests at a time it never fails, with a single one it fails at seven lengths of eight. Why?",
        (
            "a single request has too few numbers for a good amax",
            "batch times length has to be a multiple of 8",
            "the length has to be a multiple of 8",
            "one request leaves the GPU idle",
        ),
        "b",
        "A layer sees rows = batch x length. 64 times anything is a multiple of 8; 1 times the length is one only at every eighth length.",
        "05, 3",
    ),
    Question(
        "A colleague multiplies the loss by 1024 before backward, to make FP8 gradients more exact. Each gradient tensor is scaled "
        "from its own amax anyway. What changes, once training is under way?",
        (
            "the gradients become more exact",
            "large gradients are cut off",
            "next to nothing",
            "fewer gradients round to zero",
        ),
        "c",
        "The amaxes grow by 1024, so the scales shrink by 1024, and the same bits are stored. A scale buys range, not precision, and the "
        "range was chosen already. Only the first step, when the scales are 1, would notice.",
        "01, 5; 05, 7",
    ),
    Question(
        "Your FP8 step takes longer than the BF16 one, and the profiler says that the GPU works a third of the time. What helps?",
        (
            "a shorter amax history",
            "E4M3 for gradients, too",
            "weights stored in FP8",
            "more work for each launch, or fewer launches",
        ),
        "d",
        "The GPU waits for launches, and a faster GEMM only lengthens the wait. Larger matrices, or CUDA graphs, which launch a whole step "
        "at once, remove it. Then FP8 can pay.",
        "04, 6 and 7",
    ),
    Question(
        "A report: BF16, then FP8, five steps each, from the first step on; FP8 is 1.9 times as fast. What do you conclude?",
        (
            "FP8 is about 1.9 times as fast",
            "nothing: BF16 went first and paid for the start",
            "FP8 is faster, by an unknown factor",
            "BF16 was measured too generously",
        ),
        "b",
        "The first steps request memory, load kernels and create Adam's states, and what runs first also pays for what the second can "
        "use again. Even who is faster is open. Warm up, take turns, give medians with an interval.",
        "04, 5",
    ),
    Question(
        "You go from 1,000 to 1,000,000 tokens a batch. The loss is still the mean over tokens. What happens in the first step under HYBRID?",
        (
            "more gradients round to zero than before",
            "the same as before: the scale takes care of it",
            "gradients overflow, since there are more of them",
            "nothing, E5M2 reaches low enough for any gradient",
        ),
        "a",
        "Each token's gradient is 1000 times, ten powers of two, smaller, and the scales are still 1: nothing takes care of it yet. "
        "E5M2 reaches down to 2⁻¹⁶ and no further. Tensors that leave an amax have a scale from the second step on.",
        "05, 7",
    ),
    Question(
        "In FP8 with a history of 16, the training loss is worse for some 16 steps after each validation run. What is the likely cause?",
        (
            "validation changes the weights",
            "dropout stays switched off",
            "the validation data's amax is in the history",
            "the optimizer forgets its moments",
        ),
        "c",
        "TE's kernels collect the amax without gradients, too. It waits in the staging row, the next training step takes it for its own, and an "
        "outlier lowers the scale until it drops out of the history, 16 steps later. Keep the state and put it back.",
        "05, 5",
    ),
    Question(
        "Seven billion parameters with AdamW in FP32 need 112 GB between two steps. Training moves from BF16 to FP8, weights and states "
        "stay FP32. How much is that now?",
        ("28 GB", "56 GB", "98 GB", "112 GB"),
        "d",
        "16 bytes a parameter: weight, gradient and two moments stay as they are. FP8 copies of the weights come on top during the step; what can "
        "shrink are activations kept for backward, which are not in this sum.",
        "03, 5; 04, 6",
    ),
    Question(
        "Decoding: 16 tokens at a time are multiplied with a weight of 8192 x 8192, which is cast to FP8 in every call. Does FP8 pay?",
        (
            "yes: the matrix is large",
            "no: the cast of the weight is shared by 16 rows only",
            "yes: the sums over 8192 are long",
            "no: 8192 is not a multiple of 16",
        ),
        "b",
        "Casts for each operation are (1/m + 1/n) / 2, and m is 16: the weight's 67 million casts serve few products. The length of the sums cancels. "
        "Keep the weight in FP8, and the cast is gone.",
        "01, 6; 05, 8",
    ),
    Question(
        "Numbers spread evenly between -1 and 1, one scale for all: which format stores them with the smaller error, INT8 or E4M3?",
        ("INT8", "E4M3", "both alike", "E4M3, if the scale is larger"),
        "a",
        "Evenly spread numbers suit evenly spaced ones: INT8 has 127 steps up to its largest number, E4M3 has 8 in an octave. E4M3's strength "
        "is range: outliers, and magnitudes over many octaves, such as activations and gradients.",
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
