"""Stacks of a rank that hangs: it writes those of all its threads to its log when it gets `SIGNAL`.

Python's faulthandler writes them from the signal handler, so that a rank that waits inside a collective does too;
one that is stopped does not.
"""

from __future__ import annotations

import signal
from pathlib import Path

SIGNAL = signal.SIGUSR1
WAIT_S = 5.0
"""How long a rank may take to write them; a busy machine takes longer than a moment."""
_HEAD = b"(most recent call first)"


def count(log: Path) -> int:
    """Number of threads' stacks in a rank's standard error."""
    try:
        return log.read_bytes().count(_HEAD)
    except OSError:
        return 0
