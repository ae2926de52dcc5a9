"""Ends a rank that hangs, saying where it stands. torchrun then ends the others, which would wait for it forever."""

import os
import sys
import threading
import time
import traceback

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

GRACE_S = 2.0


class Watchdog:
    """Watches the thread that makes it: whatever it `expect`s is to be followed by the next within `limit_s` seconds.

    Otherwise it prints the rank, what was expected and the thread's stack, hands the same to torchrun as this rank's error
    and ends the process with status 1. Whoever waits for a hanging rank hangs as well, so what `waits` for other ranks may
    take GRACE_S longer: the culprit ends first. Where that cannot be told, both have GRACE_S to print.
    """

    def __init__(self, limit_s: float):
        self.rank, self.watched = os.environ.get("RANK", "0"), threading.get_ident()
        self.given_s, self.fed = limit_s, threading.Event()
        self.expected, self.limit_s = "starting", limit_s
        threading.Thread(target=self._watch, daemon=True).start()

    def expect(self, what: str, waits: bool = False) -> None:
        self.expected, self.limit_s = what, self.given_s + GRACE_S * waits
        self.fed.set()

    def _watch(self) -> None:
        while self.fed.wait(self.limit_s):
            self.fed.clear()
        stack = "".join(traceback.format_stack(sys._current_frames()[self.watched]))
        message = f"rank {self.rank} hangs: {self.expected} took more than {self.limit_s:g} s. It stands here:\n{stack}"
        try:
            print(message, file=sys.stderr, flush=True)  # fails if nobody reads any more
            raise TimeoutError(message)
        except (TimeoutError, OSError) as error:
            get_error_handler().record_exception(error)
            time.sleep(GRACE_S)
        finally:
            os._exit(1)
