"""SIGTERM while Ray starts, and after it: the command line's, not Ray's."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def own_signals() -> Iterator[None]:
    """Around `ray.init`, which makes SIGTERM exit at once; here it unwinds like Ctrl-C.

    Afterwards SIGTERM does what it did before.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGTERM, before)
