"""JupyterLab driven in a headless Chromium, as a person drives it: for tests/test_browser.py.

Needs Debian's `chromium` and pip's `playwright` (requirements-dev.txt); no `playwright install`.
"""

import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

from tornado.netutil import bind_sockets

CHROMIUM = shutil.which("chromium")
START_S, RUN_S, MOVE_S = 120, 900, 60  # limits, for a machine with much else to do
# Chromium resolves no name but this machine's, so a request that slips past the check below fails, too.
CHROMIUM_OPTIONS = ("--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
# The picture of a notebook's Colab badge: all that a page asks the network for. It is answered here, so nothing is sent.
BADGE = "https://colab.research.google.com/assets/colab-badge.svg"
SETTINGS = {
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/docmanager-extension/plugin": {"autosave": False},
}


class Lab:
    """A JupyterLab server on `folder`, with its settings and runtime files in `home`. Without a token: 127.0.0.1 only."""

    def __init__(self, folder: Path, home: Path):
        for name, content in SETTINGS.items():
            path = home / "settings" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content))
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER", "MPL"))}
        environment |= {f"JUPYTER_{part}_DIR": str(home / part.lower()) for part in ("CONFIG", "DATA", "RUNTIME")}
        environment |= {f"JUPYTERLAB_{part}_DIR": str(home / part.lower()) for part in ("SETTINGS", "WORKSPACES")}
        environment["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # else the debugger warns on start
        (self.socket,) = bind_sockets(0, "127.0.0.1")
        port = self.socket.getsockname()[1]
        self.socket.close()
        self.url, self.log = f"http://127.0.0.1:{port}", home / "lab.log"
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1"]
        command += [f"--port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token="]
        command += [f"--ServerApp.root_dir={folder}", "--LabApp.expose_app_in_browser=True"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def wait(self, page) -> None:
        """Until the server answers; `page` waits, so that nothing here sleeps."""
        for _ in range(START_S * 4):
            if self.process.poll() is not None:
                raise RuntimeError(f"JupyterLab ended with {self.process.returncode}:\n{self.log.read_text()[-2000:]}")
            try:
                with urllib.request.urlopen(f"{self.url}/api/status", timeout=1):
                    return
            except (urllib.error.URLError, OSError):
                page.wait_for_timeout(250)
        raise RuntimeError(f"JupyterLab did not answer in {START_S} s:\n{self.log.read_text()[-2000:]}")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)


class Notebook:
    """One notebook open in its own page. `complaints`: console errors, failed pages, requests that would leave the machine."""

    def __init__(self, browser, lab: Lab, path: str, width: int = 1280, height: int = 1600):
        self.complaints: list[str] = []
        self.page = browser.new_page(viewport={"width": width, "height": height})
        self.page.set_default_timeout(1000 * MOVE_S)
        self.page.route("**/*", lambda route: self.guard(route, lab.url))
        self.page.on("websocket", lambda socket: self.check_address(socket.url, lab.url.replace("http", "ws")))
        self.page.on("console", lambda message: self.listen(message))
        self.page.on("pageerror", lambda error: self.complaints.append(f"page error: {error}"))
        lab.wait(self.page)
        self.page.goto(f"{lab.url}/lab/workspaces/{Path(path).stem}/tree/{path}")
        self.wait_for(
            "const p = window.jupyterapp?.shell?.currentWidget;"
            "return p?.context?.isReady && p.sessionContext?.isReady && !!p.sessionContext.session?.kernel",
            START_S,
        )
        self.page.evaluate(
            "async () => { await window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.info }"
        )

    def check_address(self, address: str, own: str) -> bool:
        inside = address.startswith((own + "/", "data:", "blob:"))
        if not inside:
            self.complaints.append(f"a request left the machine: {address}")
        return inside

    def guard(self, route, own: str) -> None:
        if route.request.url == BADGE:
            route.fulfill(content_type="image/svg+xml", body='<svg xmlns="http://www.w3.org/2000/svg"/>')
        elif self.check_address(route.request.url, own):
            route.continue_()
        else:
            route.abort()

    def listen(self, message) -> None:
        if message.type == "error":
            self.complaints.append(f"console: {message.text} ({message.location.get('url', '')})")

    def wait_for(self, javascript: str, seconds: float = MOVE_S, argument=None) -> None:
        """Until the function body `javascript` (its argument is `a`) returns something true."""
        function = f"(a) => {{ {javascript} }}"
        self.page.wait_for_function(function, arg=argument, timeout=1000 * seconds, polling=200)

    def command(self, name: str) -> None:
        self.page.evaluate("(name) => { window.jupyterapp.commands.execute(name) }", name)

    def cells(self) -> list[dict]:
        """All cells as saved in a file: id, cell_type, source, outputs, metadata."""
        return self.page.evaluate("() => window.jupyterapp.shell.currentWidget.content.model.toJSON().cells")

    def run_all(self) -> list[dict]:
        """Runs all cells; returns them once every code cell has run and the kernel is idle, or one has failed."""
        self.command("notebook:run-all-cells")
        return self.wait_for_run()

    def wait_for_run(self) -> list[dict]:
        self.wait_for(
            """const panel = window.jupyterapp.shell.currentWidget;
            const code = panel.content.widgets.map(w => w.model).filter(m => m.type == 'code');
            if (code.some(m => [...Array(m.outputs.length).keys()].some(i => m.outputs.get(i).type == 'error')))
                return true;
            return code.every(m => m.executionCount && m.executionState == 'idle')""",
            RUN_S,
        )
        return self.cells()

    def restart_and_run_all(self) -> list[dict]:
        """From the menu, with its question answered; the old outputs and counts are cleared first, to see the new ones."""
        self.command("notebook:clear-all-cell-outputs")
        self.wait_for(
            "return window.jupyterapp.shell.currentWidget.content.widgets.every(w => !w.model.executionCount)"
        )
        self.command("notebook:restart-run-all")
        self.page.locator(".jp-Dialog button.jp-mod-accept").click()
        return self.wait_for_run()

    def use_theme(self, name: str) -> None:
        """ "JupyterLab Light" or "JupyterLab Dark"."""
        self.page.evaluate("(theme) => window.jupyterapp.commands.execute('apputils:change-theme', { theme })", name)
        self.wait_for("return document.body.dataset.jpThemeName == a", argument=name)

    def cell(self, id: str):
        """The cell's place in the page, scrolled to. JupyterLab only builds the cells near the visible ones."""
        self.page.evaluate(
            """async (id) => {
            const content = window.jupyterapp.shell.currentWidget.content;
            const index = content.widgets.findIndex(w => w.model.id == id);
            if (index < 0) throw new Error('no cell ' + id);
            content.activeCellIndex = index;
            await content.scrollToItem(index, 'start');
            }""",
            id,
        )
        place = self.page.locator(".jp-Notebook .jp-mod-active.jp-Cell")
        place.wait_for()
        return place

    def write(self, id: str, source: str) -> None:
        """Replaces a cell's text, typed into its editor, and runs it with Shift+Enter."""
        self.cell(id).locator(".cm-content").click()
        self.page.keyboard.press("Control+a")
        self.page.keyboard.insert_text(source)
        self.run(id)

    def run(self, id: str) -> str:
        """Runs one cell with Shift+Enter and returns its output as the page shows it."""
        before = self.count(id)
        place = self.cell(id)
        place.locator(".cm-content").click()
        self.page.keyboard.press("Shift+Enter")
        self.wait_for(
            """const m = window.jupyterapp.shell.currentWidget.content.widgets.find(w => w.model.id == a[0]).model;
            return m.executionCount && m.executionCount != a[1] && m.executionState == 'idle'""",
            argument=[id, before],
        )
        output = self.cell(id).locator(".jp-Cell-outputArea")
        return output.inner_text() if output.count() else ""

    def count(self, id: str) -> int | None:
        find = "window.jupyterapp.shell.currentWidget.content.widgets.find(w => w.model.id == id)"
        return self.page.evaluate(f"(id) => {find}.model.executionCount", id)

    def close(self) -> None:
        """Ends the kernel, too."""
        self.page.evaluate("async () => { await window.jupyterapp.shell.currentWidget.sessionContext.shutdown() }")
        self.page.close()
