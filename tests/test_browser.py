"""Every notebook in JupyterLab and a headless Chromium, driven as a person drives it.

Slow, and skipped where there is no Chromium. Screenshots go to artifacts/screenshots/<notebook>/: look at them after a
change to a figure.
"""

import shutil

import nbformat
import pytest

from tests import browser
from tools import run_notebooks

SHOTS = run_notebooks.ROOT / "artifacts" / "screenshots"
PATHS = run_notebooks.find_notebooks(deeper=True)
NAMES = [run_notebooks.name_of(path) for path in PATHS]
EXPLORERS = {
    "01_hardware_detection": ["explorer", "explore-quantization", "explore-break-even"],
    "02_fused_module_tour": ["history-figure"],
    "03_model_building": ["explore-memory"],
    "05_generation_and_metadata": ["heat-map"],
}
WRONG_BYTE = """
def decode_byte(code):
    return float(code)
"""
RIGHT_BYTE = """
def decode_byte(code):
    sign = -1 if code & 128 else 1
    e, m = code // 8 % 16, code % 8
    return sign * (2.0**-6 * m / 8 if e == 0 else 2.0 ** (e - 7) * (1 + m / 8))
"""


@pytest.fixture(scope="module")
def chromium():
    """One browser for the module; closed at its end, since playwright's event loop would disturb other tests'."""
    if not browser.CHROMIUM:
        pytest.skip("there is no chromium on PATH (Debian: apt install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (requirements-dev.txt)")
    with playwright.sync_playwright() as running:
        options = {"executable_path": browser.CHROMIUM, "args": list(browser.CHROMIUM_OPTIONS)}
        opened = running.chromium.launch(headless=True, **options)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def lab(chromium, tree, tmp_path_factory):
    shutil.rmtree(tree / "artifacts", ignore_errors=True)
    server = browser.Lab(tree, tmp_path_factory.mktemp("jupyter"))
    yield server
    server.stop()


@pytest.fixture
def open_notebook(chromium, lab):
    """Opens a notebook by name; its kernel ends with the test, however that goes."""
    opened = []

    def open_one(name: str) -> browser.Notebook:
        opened.append(browser.Notebook(chromium, lab, f"notebooks/{name}.ipynb"))
        return opened[-1]

    yield open_one
    for notebook in opened:
        notebook.close()


def errors(cells: list[dict]) -> list[str]:
    outputs = [(cell["id"], output) for cell in cells for output in cell.get("outputs", [])]
    return [f"{id}: {o['ename']}: {o['evalue']}" for id, o in outputs if o["output_type"] == "error"]


def pictures(cells: list[dict]) -> dict[str, str | None]:
    """Cell -> the alt text of its (last) picture."""
    return {
        cell["id"]: output["metadata"].get("image/png", {}).get("alt")
        for cell in cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    }


def shoot(notebook, name: str, ids, theme: str) -> None:
    notebook.use_theme(f"JupyterLab {theme}")
    folder = SHOTS / name
    folder.mkdir(parents=True, exist_ok=True)
    for id in ids:
        notebook.cell(id).screenshot(path=folder / f"{id}-{theme.lower()}.png")


class Controls:
    """An explorer's controls and picture in the page."""

    def __init__(self, notebook, id: str):
        self.notebook, self.cell = notebook, notebook.cell(id)
        self.sliders, self.choices = self.cell.locator(".widget-slider"), self.cell.locator(".widget-dropdown select")
        self.fields = self.cell.locator(".widget-slider + .widget-text input")  # beside each slider
        self.seen = ""

    def changed(self) -> None:
        """Waits for another picture; its alt text and its sentence have to be there."""
        picture = self.cell.locator(".widget-html img")
        picture.wait_for()
        handle = picture.element_handle()
        self.notebook.page.wait_for_function(
            "([image, seen]) => image.isConnected ? image.src != seen : true", arg=[handle, self.seen]
        )
        new = picture.get_attribute("src")
        assert new != self.seen
        self.seen = new
        assert picture.get_attribute("alt").startswith("Figure")
        assert self.cell.locator(".widget-html p").inner_text().endswith(".")

    def by_keyboard(self, slider: int) -> None:
        field, handle = self.fields.nth(slider), self.sliders.nth(slider).locator(".noUi-handle")
        start = field.input_value()
        at_end = handle.get_attribute("aria-valuenow") == handle.get_attribute("aria-valuemax")
        handle.focus()
        self.notebook.page.keyboard.press("ArrowLeft" if at_end else "ArrowRight")
        self.changed()
        assert field.input_value() != start
        field.fill(start)  # the typed equivalent: back to where it was
        field.press("Enter")
        self.changed()
        assert field.input_value() == start

    def by_mouse(self, slider: int) -> None:
        box = self.sliders.nth(slider).locator(".noUi-handle").bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        track = self.sliders.nth(slider).locator(".noUi-target").bounding_box()
        middle = track["x"] + track["width"] / 2
        mouse = self.notebook.page.mouse
        mouse.move(x, y)
        mouse.down()
        mouse.move(x + (60 if x < middle else -60), y, steps=5)
        mouse.up()
        self.changed()

    def choose(self, choice: int) -> None:
        select = self.choices.nth(choice)
        options = select.locator("option").all_inner_texts()
        now = options.index(select.locator("option:checked").inner_text())
        select.select_option(options[(now + 1) % len(options)])
        self.changed()


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_a_notebook_runs_in_the_browser(path, open_notebook):
    """It opens and runs from top to bottom; pictures carry alt text; explorers answer to keyboard, mouse and typing."""
    name = run_notebooks.name_of(path)
    notebook = open_notebook(name)
    cells = notebook.run_all()
    assert errors(cells) == []
    alts = pictures(cells)
    assert [id for id, alt in alts.items() if not alt] == []
    explorers = EXPLORERS.get(name, [])
    shoot(notebook, name, ["card", *alts], "Light")
    shoot(notebook, name, ["card", *alts], "Dark")
    for id in explorers:
        controls = Controls(notebook, id)
        assert controls.sliders.count() == controls.fields.count()
        assert controls.sliders.count() + controls.choices.count() > 1
        for slider in range(controls.sliders.count()):
            controls.by_keyboard(slider)
        controls.by_mouse(0)
        for choice in range(controls.choices.count()):
            controls.choose(choice)
    shoot(notebook, f"{name}/moved", explorers, "Light")
    shoot(notebook, f"{name}/moved", explorers, "Dark")
    assert notebook.complaints == []


def last_line(cell) -> str:
    return ["", *cell.source.splitlines()][-1]


def test_every_explorer_is_driven():
    """EXPLORERS names each cell that ends in one."""
    found = {}
    for path in PATHS:
        cells = nbformat.read(path, as_version=4).cells
        ids = [cell.id for cell in cells if cell.cell_type == "code" and "explore_" in last_line(cell)]
        if ids:
            found[run_notebooks.name_of(path)] = ids
    assert found == EXPLORERS


@pytest.mark.slow
def test_an_exercise_is_answered_wrong_and_then_right(open_notebook):
    notebook = open_notebook("01_hardware_detection")
    assert errors(notebook.run_all()) == []
    assert "not attempted" in notebook.run("ex-decode-byte-check")
    notebook.write("ex-decode-byte", WRONG_BYTE)
    said = notebook.run("ex-decode-byte-check")
    assert "wrong" in said
    assert "yours" in said
    assert "expected" in said
    shoot(notebook, "exercise", ["ex-decode-byte-check"], "Light")
    notebook.write("ex-decode-byte", RIGHT_BYTE)
    assert "correct" in notebook.run("ex-decode-byte-check")
    shoot(notebook, "exercise", ["ex-decode-byte", "ex-progress"], "Dark")
    assert notebook.complaints == []


@pytest.mark.slow
def test_restart_and_run_all(open_notebook):
    """With explorers moved before: nothing of the old kernel is missed by the new one."""
    notebook = open_notebook("02_fused_module_tour")
    assert errors(notebook.run_all()) == []
    Controls(notebook, "history-figure").by_keyboard(0)
    cells = notebook.restart_and_run_all()
    assert errors(cells) == []
    counts = [cell["execution_count"] for cell in cells if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1)), "a new kernel counts from 1"
    Controls(notebook, "history-figure").by_keyboard(0)
    assert notebook.complaints == []
