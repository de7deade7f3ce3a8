"""The last record of a run, where the store cannot take it."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest

from repro.launch.recorder import DiskFull, Recorder
from tests.records import made_up


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES])
def test_a_full_disk_says_what_did_not_fit_and_any_other_fault_is_itself(number: int) -> None:
    def fails(record: object) -> None:
        raise OSError(number, "x")

    recorder: Any = SimpleNamespace(store=SimpleNamespace(append=fails, folder="/store"))
    record = made_up("a", outcome="oom", reason="out of memory")
    full = number != errno.EACCES
    said = "^out of memory, and the outcome of a did not fit$" if full else "x"
    with pytest.raises(DiskFull if full else OSError, match=said):
        Recorder._last_word(recorder, record)
    with pytest.raises(DiskFull if full else OSError, match="^disk full: /store$" if full else "x"):
        Recorder._append(recorder, record)
