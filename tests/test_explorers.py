"""Each explorer's figure over its controls' range, and its controls moved as a reader moves them."""

import itertools
import os
import random
import subprocess
import sys
from functools import partial

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from helpers import explorers, formats, plots, results
from helpers.explorers.frame import Choice, Explorer, Field, Number

pytest.importorskip("ipywidgets")


def made_up_run(layers=("0.qkv", "0.fc1", "1.qkv"), steps=40):
    """Scales and amaxes as notebook 05 records them: delayed scaling over made-up amaxes; the last layer's first gradient is 0."""
    from helpers.emulation import DelayedScaling, ScalingState

    columns = pd.MultiIndex.from_product([("input", "weight", "grad_output"), layers], names=["role", "layer"])
    size = torch.tensor([4.0, 0.2, 1e-5]).repeat_interleave(len(layers))
    noise = torch.randn(steps, len(columns), generator=torch.Generator().manual_seed(0))
    amaxes = size * torch.exp2(0.3 * noise)
    amaxes[0, -1] = 0
    state, scales = ScalingState(len(columns), 16, torch.device("cpu")), []
    for row in amaxes:
        state.amax_history[0] = row
        state.update(DelayedScaling(amax_history_len=16), 448.0)
        scales.append(state.scale.clone())
    return pd.DataFrame(torch.stack(scales).numpy(), columns=columns), pd.DataFrame(amaxes.numpy(), columns=columns)


EXPLORERS = {name: getattr(explorers, name) for name in explorers.__all__}
EXPLORERS["explore_state"] = lambda: explorers.explore_state(*made_up_run(), gradients="E4M3")
each = pytest.mark.parametrize("explore", EXPLORERS.values(), ids=EXPLORERS)


@pytest.fixture(autouse=True)
def _style():
    plots.use_style()
    yield
    plt.close("all")


def settings(explorer: Explorer):
    """Each control alone over its range, all at their least, middle and largest, and a few random combinations."""
    samples = {name: control.samples() for name, control in explorer.controls.items()}
    alone = [{name: value} for name, values in samples.items() for value in values]
    together = [{name: values[int(at * (len(values) - 1))] for name, values in samples.items()} for at in (0, 0.5, 1)]
    draw = random.Random(0)
    mixed = [{name: draw.choice(values) for name, values in samples.items()} for _ in range(8)]
    for changes in itertools.chain(alone, together, mixed):
        explorer.values = {name: control.start for name, control in explorer.controls.items()}
        for name, value in changes.items():
            explorer.values = explorer.after(name, value)
        yield explorer.values


@each
def test_the_figure_is_drawn_over_the_whole_range(explore):
    """With a title, axes that are named with their unit, and a sentence without an empty number."""
    sentences = set()
    for values in settings(explore()):
        figure, sentence = explore().draw(**values)
        assert sentence.endswith("."), values
        assert "nan" not in sentence.replace("NaN", "").lower(), (values, sentence)
        sentences.add(sentence)
        titles = [figure.get_suptitle(), *(axes.get_title(loc="left") for axes in figure.axes)]
        assert any(titles), values
        assert sentence in plots.alt_text(figure, sentence)
        plots.png(figure)
    assert len(sentences) > len(explore().controls)


def displayed(explorer: Explorer, monkeypatch) -> list[dict]:
    """What the explorer displays, as messages to a front end."""
    sent = []
    shell = InteractiveShell.instance()
    monkeypatch.setattr(
        shell.display_pub, "publish", lambda data, metadata=None, **more: sent.append((data, metadata, more))
    )
    explorer._ipython_display_()
    return sent


@each
def test_moving_a_control_redraws(explore, monkeypatch):
    explorer = explore()
    sent = displayed(explorer, monkeypatch)
    assert len(sent) == 3  # controls, picture, sentence
    assert sent[1][1]["image/png"]["alt"].endswith(sent[2][0]["text/plain"])
    for name, control in explorer.controls.items():
        for sample in control.samples():
            if explorer.after(name, sample) == explorer.values:
                continue
            before = explorer.picture.value
            widget = explorer.inputs[name][0]
            widget.value = min(sample, widget.max) if isinstance(control, Number) and not control.log else sample
            assert explorer.picture.value.startswith("<img alt="), explorer.picture.value[:300]
            assert explorer.picture.value != before, (name, sample)
            for other, inputs in explorer.inputs.items():  # slider and number field agree
                for one in inputs:
                    assert one.value == pytest.approx(explorer.values[other]), other
    assert sent[3][2]["update"], "the starting picture makes room at the first move"
    assert plt.get_fignums() == [], "figures are left open"


@each
def test_sliders_wait_for_release_and_have_a_typed_equivalent(explore, monkeypatch):
    explorer = explore()
    displayed(explorer, monkeypatch)
    for name, control in explorer.controls.items():
        kinds = [type(widget).__name__ for widget in explorer.inputs[name]]
        if isinstance(control, Number):
            slider, typed = explorer.inputs[name]
            assert not slider.continuous_update
            assert "Slider" in kinds[0]
            assert kinds[1] in ("BoundedIntText", "BoundedFloatText")
            typed.value = control.high
            assert slider.value == pytest.approx(control.high)
        else:
            assert kinds == ["Dropdown" if isinstance(control, Choice) else "FloatText"], control
            assert isinstance(control, (Choice, Field))


def test_what_a_callback_raises_is_shown(monkeypatch):
    """A front end drops it otherwise."""

    def draw(x):
        if x == 3:
            raise ValueError("x must not be <3>")
        return plt.figure(), f"x is {x}."

    explorer = Explorer(draw, x=Number("x", 1, 1, 5))
    displayed(explorer, monkeypatch)
    explorer.inputs["x"][0].value = 3
    assert explorer.picture.value == "<pre>ValueError: x must not be &lt;3&gt;</pre>"
    explorer.inputs["x"][0].value = 4
    assert "x is 4." in explorer.picture.value


@pytest.mark.parametrize(
    ("control", "typed", "becomes"),
    [
        (Number("n", 16, 16, 4096, step=16, log=2), 1003, 1008),
        (Number("n", 16, 16, 4096, step=16, log=2), 9000, 4096),
        (Number("x", 1, 0.5, 2, step=0.1), 0.7400001, 0.7),
        (Number("x", 1, 0.001, 1000, step=0.5, log=10), 3.14159, 3.14),
        (Field("x", 1), 3.14159, 3.14159),
    ],
)
def test_a_typed_number_snaps(control, typed, becomes):
    assert control.snap(typed) == pytest.approx(becomes)


def test_without_ipywidgets_the_picture_is_there():
    code = """
import sys
sys.modules["ipywidgets"] = None
from IPython.core.interactiveshell import InteractiveShell
sent = []
InteractiveShell.instance().display_pub.publish = lambda data, metadata=None, **more: sent.append(data)
from helpers import explorers
explorers.explore_format()._ipython_display_()
print([sorted(data) for data in sent], sent[0]["text/plain"])
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("[['text/plain'], ['image/png', 'text/plain'], ['text/plain']]")
    assert "ipywidgets" in ran.stdout


@pytest.mark.slow
def test_with_ipywidgets_7(tmp_path):
    """Colab's version: the tests of this file that move controls, in a process that finds it first."""
    old = ["ipywidgets==7.7.1", "ipython_genutils==0.2.0"]
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path), *old]
    installed = subprocess.run(install, capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"ipywidgets 7 cannot be installed here: {installed.stderr.strip().splitlines()[-1]}")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    run = partial(subprocess.run, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    found = run([sys.executable, "-c", "import ipywidgets; print(ipywidgets.__version__)"])
    assert found.stdout.strip() == "7.7.1", found.stderr
    chosen = ["-k", "moving or typed_equivalent or raises", __file__]
    ran = run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen])
    assert ran.returncode == 0, ran.stdout[-3000:]


# ------------------------------------------------------------------------------------------------ number formats


@pytest.mark.parametrize("name", formats.FORMATS)
def test_format_names_its_code_and_value(name):
    explorer = explorers.explore_format(name, 0)
    last = 2 ** formats.FORMATS[name].bits - 1
    for code in (0, last // 2, last):
        figure, sentence = explorer.draw(name, code, 0.0)
        assert f"{name} code 0x{code:02X}" in sentence
        plt.close(figure)


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [("E3M4", 0, "'E3M4' is not known; choose one of E4M3"), ("E4M3", 256, "256"), ("E2M1", 16, "16")],
)
def test_bad_format_or_code_is_refused(name, code, message):
    with pytest.raises(ValueError, match=message):
        explorers.explore_format().draw(name, code, 0.0)


def test_format_keeps_a_typed_value_from_format_to_format():
    explorer = explorers.explore_format()
    explorer.values = explorer.after("value", 0.3)
    assert explorer.values == {"format": "E4M3", "code": 0x2A, "value": 0.3}
    explorer.values = explorer.after("format", "E5M2")
    assert formats.decode(formats.encode(0.3, formats.E5M2), formats.E5M2) == formats.quantize(0.3, formats.E5M2)
    assert explorer.values == {"format": "E5M2", "code": int(formats.encode(0.3, formats.E5M2)), "value": 0.3}
    assert explorer.after("code", 0)["value"] == 0
    assert explorer.after("code", 0x7F)["value"] == 0.3, "a code that is no number leaves the value"


# ------------------------------------------------------------------------------------------------ quantization error


def test_quantization_one_scale_fails_int8_and_blocks_confine_the_damage():
    """What notebook 01 says about an outlier, read off the explorer's own sentence."""
    _, far = explorers.explore_quantization().draw(outlier=1000, spread=0.0, octaves=0)
    one, blocks = far.split("; with a scale")
    assert "INT8 100 %" in one
    assert "E4M3 2.6 %" in one
    assert "INT8 18 %" in blocks  # the outlier's own block of 32 is lost: sqrt(1/32) of the norm
    _, none = explorers.explore_quantization().draw(outlier=1, spread=0.0, octaves=0)
    assert "E4M3 2.6 %" in none
    assert "INT8 0." in none  # without an outlier INT8 is the more accurate


def test_quantization_has_a_plateau_and_walls():
    from helpers.explorers.quantization import curve, sample

    at = dict(zip(range(-24, 9), curve(0.0, 1.0, "E4M3", False), strict=True))
    assert at[-3] == pytest.approx(at[0], abs=0.02)  # decades
    assert at[-24] == pytest.approx(0, abs=1e-3)  # all is lost
    assert at[8] > at[0] + 1
    x = sample(0.0, 1.0)
    rounded = formats.quantize(x * 448 / x.abs().max(), formats.E4M3) * x.abs().max() / 448
    off, others = rounded - x, x.clone()
    off[0, 0] = others[0, 0] = 0
    assert 10 ** at[0] == pytest.approx((off.norm() / others.norm()).item(), rel=1e-5)


# ------------------------------------------------------------------------------------------------ delayed scaling


@pytest.mark.parametrize(("length", "algorithm", "remembers"), [(4, "max", 4), (16, "max", 16), (16, "most_recent", 1)])
def test_delayed_scaling_remembers_a_spike_for_the_length_of_its_history(length, algorithm, remembers):
    from helpers.explorers.delayed import scales_for, signal

    amax = signal(spike=20, every=64, drift=0, noise=0)
    scale = scales_for(amax, length, algorithm, 0, formats.E4M3)
    assert scale[0] == 1
    assert scale[1] == scale[12] == pytest.approx(448 / 3)
    assert [i for i in range(64) if scale[i] < 448 / 50 and i > 0] == list(range(13, 13 + remembers))


def test_delayed_scaling_counts_the_steps_cut_off():
    draw = explorers.explore_delayed_scaling().draw
    calm = {"every": 64, "noise": 0, "length": 16, "algorithm": "max", "format": "E4M3"}
    _, one = draw(spike=20, drift=0, margin=0, **calm)
    assert "1 of 64 steps are cut off, the worst at 20 times" in one
    _, growing = draw(spike=1, drift=0.5, margin=0, **calm)
    assert "63 of 64 steps are cut off, the worst at 1.41 times" in growing
    _, room = draw(spike=1, drift=0.5, margin=1, **calm)
    assert " 0 of 64 steps are cut off" in room


# ------------------------------------------------------------------------------------------------ break-even


def made_up_points(launch=0.03, ceilings=(500e9, 1000e9), bandwidth=2e9):
    """Times in ms of a machine that obeys the model exactly."""
    rows = []
    for m, k, n in [(256, 256, 256), (4096, 4096, 4096), (8192, 8192, 8192)]:
        work, casts = 2 * m * k * n, 7 * (m + n) * k
        bf16, fp8 = (max(launch, work / ceiling) for ceiling in ceilings)
        cast = fp8 + max(0.05, casts / bandwidth)
        times = {"bf16": bf16, "fp8": fp8, "fp8_with_cast": cast}
        rows += [{"m": m, "k": k, "n": n, "precision": p, "median_ms": ms} for p, ms in times.items()]
    return pd.DataFrame(rows)


def test_break_even_finds_the_constants_of_a_machine_that_obeys_the_model():
    from helpers.explorers import break_even as be

    model = be.fit(made_up_points())
    assert model.ceiling == pytest.approx({"bf16": 500e9, "fp8": 1000e9})
    assert model.launch == pytest.approx({"bf16": 0.03, "fp8": 0.03, "cast": 0.05})
    assert model.cast_bandwidth == pytest.approx(2e9)
    assert be.gain_error(model, made_up_points()) == pytest.approx(0, abs=1e-9)
    # BF16 takes 4 ns a row and column, FP8 2; casts 7 bytes a row and as many a column: faster once M is large enough.
    k, n = 4096, 16384
    start = be.break_even(model, be.TWO_KERNELS, k, n)
    times = {m: model.times(be.TWO_KERNELS, m, k, n) for m in (start - 16, start, 4 * start)}
    assert times[start]["fp8_with_cast"] < times[start]["bf16"]
    assert times[4 * start]["fp8_with_cast"] < times[4 * start]["bf16"]
    assert be.break_even(model, be.ONE_KERNEL, k, n) < start, "a cheaper cast pays sooner"
    assert be.break_even(model, be.TWO_KERNELS, k, 64) is None, "a thin result has too many casts for its operations"


def test_break_even_says_which_numbers_are_recorded_and_which_modelled():
    explorer = explorers.explore_break_even()
    figure, sentence = explorer.draw(**explorer.values)  # a shape that the H200 measured
    plt.close(figure)
    modelled, recorded = sentence.split(" RECORDED: ")
    assert modelled.startswith("MODELLED for M = 8,192, K = 4,096, N = 16,384: BF16 1.66 ms")
    assert recorded.startswith("BF16 1.66 ms, FP8 0.942 ms")
    figure, other = explorer.draw(**explorer.values | {"m": 4000})
    plt.close(figure)
    assert "RECORDED" not in other
    figure, _ = explorers.explore_break_even(made_up_points(), "REAL: measured just now").draw(**explorer.values)
    assert "Open symbols: REAL" in " ".join(text.get_text() for text in figure.texts)


def test_break_even_model_is_near_what_was_recorded():
    from helpers.explorers import break_even as be

    points, _ = results.recorded("01_gemm")
    assert be.gain_error(be.fit(points), points) < 0.1


# ------------------------------------------------------------------------------------------------ memory


def test_memory_formula_is_near_every_recorded_peak():
    from helpers.explorers import memory
    from helpers.models import PRESETS

    rows, _ = results.recorded("04_benchmark")
    compared = 0
    for preset, case in memory.CASES.items():
        peaks = rows[rows["case"] == case].set_index("variant")["allocated_gb"]
        for precision, variant in memory.RECORDED_AS.items():
            parts = memory.components(PRESETS[preset].config, 32, precision)
            assert sum(parts.values()) == pytest.approx(peaks[variant], rel=0.015), (case, variant)
            compared += 1
    assert compared == 6


def test_memory_says_what_is_recorded_only_where_it_was():
    draw = explorers.explore_memory().draw
    _, there = draw("scale_up", 32, 256, "FP8 in TE")
    assert "RECORDED on an H200: BF16 in PyTorch 18.4 GB, BF16 in TE 17.5 GB, FP8 in TE 16.7 GB" in there
    _, elsewhere = draw("scale_up", 64, 256, "FP8 in TE")
    assert elsewhere.startswith("MODELLED")
    assert "RECORDED" not in elsewhere


# ------------------------------------------------------------------------------------------------ FP8 state


def test_state_shows_the_scale_that_a_step_used_and_what_was_lost():
    from helpers.explorers.state import ROOM, SCALE, USED

    scale, amax = made_up_run()
    draw = explorers.explore_state(scale, amax, gradients="E4M3").draw
    said = draw(SCALE, "grad_output", "0.qkv", 0)[1]
    assert "scale in use 1," in said, "the first step has no history"
    said = draw(SCALE, "grad_output", "0.qkv", 5)[1]
    assert f"scale in use {scale['grad_output', '0.qkv'][4]:.3g}," in said, "the scale that the step before left"
    # Gradients of 1e-5 are below half of E4M3's smallest number (2^-10) while the scale is 1, and fit afterwards.
    assert "3 of 3 tensors of this role were zero or rounded to zero" in draw(ROOM, "grad_output", "0.qkv", 0)[1]
    assert "1 of 3 tensors of this role were zero or rounded to zero" in draw(ROOM, "grad_output", "0.qkv", 1)[1], (
        "amax 0 gave no scale"
    )
    assert "0 of 3 tensors of this role were zero or rounded to zero" in draw(ROOM, "grad_output", "0.qkv", 2)[1]
    wide = explorers.explore_state(scale, amax, gradients="E5M2").draw
    lost = (amax["grad_output"].iloc[0] <= 2**-17).sum()
    assert lost < 3, "E5M2 reaches down to half of 2^-16"
    assert f"{lost} of 3 tensors of this role were zero or rounded to zero" in wide(ROOM, "grad_output", "0.qkv", 0)[1]
    used = amax["input", "0.fc1"][7] * scale["input", "0.fc1"][6] / 448
    assert f"{100 * used:.3g} % of the range was used" in draw(USED, "input", "0.fc1", 7)[1]
