"""Following and tracing steps without torch's compiler, whose import takes longer than most of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

COMPILER = "torch._dynamo"


class UncompiledMode(TorchDispatchMode):
    """A dispatch mode that is not guarded against the compiler: that imports it, and slows every operator."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def wrapped(types: Iterable[type]) -> bool:
    """Whether an operator has a DTensor or its like before it.

    A mode that answers `NotImplemented` then sees the operators that follow from it, on what the rank holds.
    """
    return any(hasattr(kind, "__tensor_flatten__") for kind in types)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, operators on `meta` do not import the compiler.

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
