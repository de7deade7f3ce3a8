"""torch's shape functions without torch's compiler."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, operators on ``meta`` do not import the compiler.

    torch has most of their shape functions, which are Python, left alone by its compiler, and imports it at the first
    call to say so: seconds, and tensors that live on meanwhile.  Nothing here is compiled, so a stand-in hears it.
    Where the compiler is imported already, it does.
    """
    if COMPILER in sys.modules:
        yield
        return
    stand_in: Any = ModuleType(COMPILER)
    stand_in.disable = lambda function, *_, **__: function
    sys.modules[COMPILER] = stand_in
    try:
        yield
    finally:
        del sys.modules[COMPILER]
