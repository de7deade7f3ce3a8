"""Tests of CUDA launches without a GPU: refused operands, the cache of programs, dispatch, and the driver's calls."""

from __future__ import annotations

import ctypes
import multiprocessing
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from repro.kernels import families, gelu
from repro.kernels.cuda import compile as compiler
from repro.kernels.cuda import device
from repro.kernels.cuda.compile import CompiledProgram, CompileTarget
from repro.kernels.cuda.program import Program, Unavailable
from tests.kernels.on_cpu import BINDINGS

PROGRAM = families.example_programs()[0]
TARGET = CompileTarget("sm_80")


@pytest.fixture
def compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Install a fake compiler and an empty cache; return the list of compiled architectures."""
    calls: list[str] = []

    def compile(program: Program, target: CompileTarget) -> CompiledProgram:
        calls.append(target.architecture)
        return CompiledProgram(b"code\nof " + target.architecture.encode(), "log")

    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "compile_cuda_program", compile)
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: (12, 9))
    return calls


def test_a_program_is_compiled_once(compilations: list[str]) -> None:
    first = compiler.compile_cached(PROGRAM, TARGET)
    assert compiler.compile_cached(PROGRAM, TARGET) == first == CompiledProgram(b"code\nof sm_80", "log")
    assert compilations == ["sm_80"]
    compiler.compile_cached(PROGRAM, CompileTarget("sm_90"))
    assert compilations == ["sm_80", "sm_90"]


def test_cache_key_depends_on_compiler_and_source(
    compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {compiler.cache_key(program, TARGET) for program in (PROGRAM, replace(PROGRAM, threads=128))}
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: (12, 6))
    keys.add(compiler.cache_key(PROGRAM, TARGET))
    monkeypatch.setattr(compiler, "headers", lambda: {"number.cuh": "changed"})
    keys.add(compiler.cache_key(PROGRAM, TARGET))
    assert len(keys) == 4


def test_damaged_cache_files_are_compiled_again(compilations: list[str]) -> None:
    compiler.compile_cached(PROGRAM, TARGET)
    (file,) = compiler.cache_folder().iterdir()
    intact = file.read_bytes()
    for damaged in (intact[:-1], b"", b"\xff", b"[]\n", intact[: intact.index(b"\n")]):
        file.write_bytes(damaged)
        assert compiler.compile_cached(PROGRAM, TARGET).code == b"code\nof sm_80"
        assert file.read_bytes() == intact


def test_an_unwritable_cache_folder_is_reported(
    compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(compiler.CACHE_VARIABLE, f"{__file__}/below")
    with pytest.warns(RuntimeWarning, match=f"cannot be written.*set {compiler.CACHE_VARIABLE}"):
        assert compiler.compile_cached(PROGRAM, TARGET).log == "log"


def _write(folder: Path, content: int) -> None:
    for _ in range(50):
        compiler._write_cached(folder / "program", CompiledProgram(bytes([content]) * 20000, "log"))


def test_concurrent_writers_leave_one_complete_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(tmp_path, i)) for i in range(3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert not (tmp_path / "program").exists() or compiler._read_cached(tmp_path / "program") is not None
    assert [path.name for path in tmp_path.iterdir()] == ["program"]


@pytest.fixture
def fresh_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_ran", Counter())
    monkeypatch.setattr(device, "_reported_reasons", set())
    monkeypatch.setattr(device, "cuda_launcher", lambda index: f"gpu {index}")


@pytest.mark.usefixtures("fresh_dispatch")
def test_available_kernels_are_dispatched() -> None:
    call = device.cuda_dispatcher("twice", lambda on, x: (on, x), lambda x: "torch")
    for x in (torch.ones(1), [torch.ones(1)]):
        assert call(x) == ("gpu -1", x)
    assert device.ran() == {("twice", "cuda"): 2}


def dispatcher(name: str, error: Exception) -> Callable[..., Any]:
    """Return a dispatched operator whose binding raises an error."""
    return device.cuda_dispatcher(name, mock.Mock(side_effect=error), lambda x: "torch")


@pytest.mark.usefixtures("fresh_dispatch")
def test_a_fallback_warns_once_per_reason() -> None:
    calls = [dispatcher(name, Unavailable("no NVRTC; pip install")) for name in ("twice", "thrice")]
    with pytest.warns(RuntimeWarning, match="repro::twice runs torch's operators.*no NVRTC; pip install"):
        assert calls[0](torch.ones(1)) == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in calls:
            assert call(torch.ones(1)) == "torch"
    why = "torch: no NVRTC; pip install"
    assert device.ran() == {("twice", why): 2, ("thrice", why): 1}


@pytest.mark.usefixtures("fresh_dispatch")
def test_launch_errors_cause_no_fallback() -> None:
    with pytest.raises(RuntimeError, match="not launched"):
        dispatcher("twice", RuntimeError("was not launched"))(torch.ones(1))


def install_device(monkeypatch: pytest.MonkeyPatch, major: int) -> mock.Mock:
    """Install a device of which NVRTC 13 supports 7.5 and 8.0 only; return the function that gives its properties."""
    properties = mock.Mock(return_value=SimpleNamespace(major=major, minor=0, multi_processor_count=108))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(compiler, "supported_architectures", lambda: (75, 80))
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(device, "_devices", {})
    return properties


@pytest.mark.usefixtures("compilations")
def test_a_failed_compilation_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    install_device(monkeypatch, 8)
    compile = mock.Mock(side_effect=Unavailable("line 3: nonsense"))
    monkeypatch.setattr(compiler, "compile_cuda_program", compile)
    for _ in range(3):
        with pytest.raises(Unavailable, match="line 3: nonsense"):
            device.cuda_launcher(0).load(PROGRAM)
    assert compile.call_count == 1


def test_an_unsupported_device_is_queried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = install_device(monkeypatch, 7)
    for _ in range(2):
        with pytest.raises(Unavailable, match="does not compile for sm_70"):
            device.cuda_launcher(0)
    properties.assert_called_once_with(0)


ONE, TWO = torch.ones(4), torch.ones(2, 8)
HALF, DOUBLE = TWO.half(), TWO.double()
STEP = (torch.tensor(1.0), torch.tensor(0.1), 0.9, 0.95, 1e-3, 0.1, None, None)


NEEDS_GRADIENT = " needs a gradient of the dtype of x"
IN_FP32 = "maxima, sums and gradients of the loss in fp32"
LONG_ROWS = torch.ones(1, 20_000)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("layer_norm", (DOUBLE, DOUBLE[0], DOUBLE[0], 1e-5), "float64"),
        ("layer_norm", (TWO, TWO[0], HALF[0], 1e-5), "weight and bias of one dtype"),
        ("layer_norm_backward", (HALF, TWO, ONE, ONE, TWO[0]), "layer_norm_backward" + NEEDS_GRADIENT),
        ("rms_norm_backward", (HALF, TWO, ONE, TWO[0]), "rms_norm_backward" + NEEDS_GRADIENT),
        ("bias_gelu_backward", (HALF, TWO, TWO[0]), NEEDS_GRADIENT),
        ("swiglu_backward", (HALF, TWO), NEEDS_GRADIENT),
        ("bias_dropout_residual", (TWO, None, HALF, 0.1, 1, 0, 5, 0), "residual of the dtype of x"),
        ("causal_softmax_backward", (TWO, HALF, 1.0), "the dtype of the attention weights"),
        ("causal_softmax_backward", (LONG_ROWS, LONG_ROWS, 1.0), "up to 16384 scores, not 20000"),
        ("cross_entropy_sums", (TWO, ONE, ONE.int(), 0), "targets in int64"),
        ("cross_entropy_sums", (TWO, ONE.half(), ONE.long(), 0), IN_FP32),
        (
            "cross_entropy_backward_",
            (TWO.t(), ONE, TWO, ONE.long(), 0, ONE),
            "contiguous logits, which it over",
        ),
        ("adamw_", ([ONE.double()], [ONE], [ONE], [ONE], [], *STEP), "scalars in fp32"),
        ("adamw_", ([TWO[:, 0]], [ONE], [ONE], [ONE], [], *STEP), "contiguous shards"),
        ("adamw_", ([ONE], [ONE.double()], [ONE], [ONE], [], *STEP), "float64"),
        ("norm_squared", ([DOUBLE],), "float64"),
    ],
)
def test_bindings_refuse_unsupported_operands_before_a_launch(
    name: str, arguments: tuple[Any, ...], message: str
) -> None:
    launcher = SimpleNamespace(processors=2, load=lambda program: pytest.fail("a program was loaded"))
    with pytest.raises(Unavailable, match=message):
        BINDINGS[name](launcher, *arguments)


INVALID_CONTEXT, REFUSED = 201, 1


class Driver:
    """Fake of NVIDIA's driver module that records the launches."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0, CUDA_ERROR_INVALID_CONTEXT=INVALID_CONTEXT)

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.statuses: list[int] = []
        """Status codes of the next launches; all later launches succeed."""
        self.contexts = 0
        self.keep = True
        self.argument_bytes = 0
        """Bytes of the kernel's arguments to copy to `arguments`, which are valid only during the launch."""
        self.arguments = b""

    def cuLaunchKernel(self, *arguments: Any) -> tuple[int]:
        if self.statuses and (status := self.statuses.pop(0)):
            return (status,)
        if self.keep:
            self.launches.append(arguments)
            (first,) = (ctypes.c_void_p * 1).from_address(arguments[9])
            self.arguments = ctypes.string_at(first, self.argument_bytes)
        return (0,)

    def cuModuleGetFunction(self, module: Any, name: bytes) -> tuple[int, str]:
        return 0, name.decode()

    def cuCtxSetCurrent(self, context: Any) -> tuple[int]:
        self.contexts += 1
        return (0,)

    def cuGetErrorString(self, status: int) -> tuple[int, bytes]:
        return 0, f"error {status}".encode()

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: (0, name)


def install(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Install the fake driver: CPU tensors are treated as tensors of one H100, and nothing is compiled."""
    driver = Driver()
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(compiler, "supported_architectures", lambda: (90,))
    monkeypatch.setattr(compiler, "compile_cached", lambda program, target: CompiledProgram(b"", ""))
    monkeypatch.setattr(device, "driver", lambda: driver)
    monkeypatch.setattr(device, "_devices", {})
    monkeypatch.setattr(device, "_current_device", lambda: -1)
    monkeypatch.setattr(device, "_current_stream", lambda index: 77)
    return driver


KIND = gelu.program("float", "float", 4)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return install(monkeypatch)


def test_launch_passes_grid_stream_and_arguments(driver: Driver) -> None:
    driver.argument_bytes = KIND.arguments.size
    x, bias = torch.ones(3, 8), torch.ones(8)
    y = gelu.launch_bias_gelu(device.cuda_launcher(-1), x, bias)
    ((function, *shape),) = driver.launches
    assert function == "forward"
    assert shape[:8] == [1, 1, 1, KIND.threads, 1, 1, 0, 77]
    assert KIND.arguments.unpack(driver.arguments)[:4] == (x.data_ptr(), bias.data_ptr(), 0, y.data_ptr())


def test_launch_sets_a_missing_context_and_makes_its_device_current(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = device.cuda_launcher(-1).load(KIND)
    driver.statuses = [INVALID_CONTEXT]
    devices = [0, -1]
    monkeypatch.setattr(device, "_current_device", lambda: devices.pop(0))
    loaded.launch("forward", 1, bytes(KIND.arguments.size))
    assert driver.contexts == len(driver.launches) == 1
    assert not devices


def test_a_refused_launch_is_an_error(driver: Driver) -> None:
    loaded = device.cuda_launcher(-1).load(KIND)
    driver.statuses = [REFUSED]
    with pytest.raises(RuntimeError, match="CUDA kernel forward was not launched on cuda:-1: error 1"):
        loaded.launch("forward", 1, bytes(KIND.arguments.size))
