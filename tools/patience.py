"""Keeps nbclient from sleeping through a reply when a cell shows a widget (jupyter/nbclient#312, open since 2024).

nbclient mimics the front end's Output widgets: while it waits for the cell's reply on the shell channel it sends widget
state over the same socket. A zmq socket announces new messages once only, and that send can swallow the announcement;
the cell then counts as running until its time limit, ten minutes here, and passes. About one run in ten of a notebook
with a widget did so on a busy machine. Looking again every quarter of a second costs nothing and ends it.

tools/run_notebooks.py calls `install`; for nbmake name this file as a plugin: pytest -p tools.patience --nbmake ...
"""

import time
from queue import Empty

from jupyter_client.channels import AsyncZMQSocketChannel

LOOK_AGAIN_S = 0.25
_get_msg = AsyncZMQSocketChannel.get_msg


async def get_msg(self, timeout: float | None = None):
    """As AsyncZMQSocketChannel.get_msg, but waits in slices: each new one asks the socket what has come."""
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        left = LOOK_AGAIN_S if end is None else min(LOOK_AGAIN_S, max(0.0, end - time.monotonic()))
        try:
            return await _get_msg(self, timeout=left)
        except Empty:
            if end is not None and time.monotonic() >= end:
                raise


def install() -> None:
    AsyncZMQSocketChannel.get_msg = get_msg


def pytest_configure() -> None:
    install()
