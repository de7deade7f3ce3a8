"""Tests of system files: sources, published and assumed numbers, calibrated systems, and errors in one line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from repro.config import ConfigError
from repro.config.enums import OperatorSet
from repro.config.links import ASSUMED_ANY, ASSUMED_LINKS, KEYS, LINKS
from repro.config.system import Quantity, System
from repro.config.systems import load_system_file, system_names
from repro.config.timing import ASSUMED
from repro.measure.local_system import load_system
from repro.simulate.record import simulation_facts
from tests.config.system_texts import NODES, PRODUCTS, PROVENANCE

VALID = f"""{NODES}
[device]
name = "X"
memory_bytes = {{ value = 16e9, source = "here" }}
memory_bandwidth = {{ value = "unknown", source = "nobody says" }}
[device.peak_flops]
fp16 = {{ value = 100e12, source = "here" }}
[links.inter-node]
per = "node"
bandwidth = {{ value = 10e9, source = "here" }}
[links.pcie]
per = "device"
bandwidth = {{ value = 20e9, source = "here" }}
"""
MEASURED_LINK = """
[links.memory]
per = "node"
bandwidth = { value = 10e9, source = "measured" }
overlap_cost = { value = 0.3, source = "measured" }
[links.memory.collectives.all_reduce]
points = [[1024, 1e-4], [1048576, 1e-3]]
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return path

    return write


def quantities(system: System) -> list[Quantity]:
    device = system.device
    links = [link.bandwidth for link in system.links.values()]
    links += [link.used(name, key) for name, link in system.links.items() for key in KEYS]
    links += [device.time.used(field.name) for field in dataclasses.fields(device.time)]
    numbers = [device.memory_bytes, device.memory_bandwidth, system.devices_per_node, system.nodes]
    numbers += [system.context_bytes, system.host_memory_bytes, device.power_w, device.price_per_hour]
    return [*numbers, *device.peak_flops.values(), *links]


@pytest.mark.parametrize("name", system_names())
def test_every_system_has_sources_time_model_numbers_and_allocatable_memory(name: str) -> None:
    system = load_system(name)
    assert system.name == name
    assert all(quantity.source for quantity in quantities(system))
    assert 0 < system.timing.matmul_efficiency <= 1
    assert system.links.keys() <= set(LINKS)
    assert all(link.used(key, "latency_s").value for key, link in system.links.items())
    memory, context = system.device.memory_bytes.value, system.context_used
    assert context.value == system.context()
    assert ("assumed" in context.source) == (system.context_bytes.value is None)
    if memory is None:
        message = "memory_bytes = 'unknown': this command needs a known value; source: not pub"
        with pytest.raises(ConfigError, match=message):
            system.allocatable_bytes()
    else:
        assert system.allocatable_bytes() == int(memory) - system.context()


def test_packaged_systems_have_the_published_numbers() -> None:
    dgx = {"dgx1-v100-16gb", "dgx1-v100-32gb", "dgx2", "dgx2h", "dgx-a100-40gb", "dgx-h100", "dgx-h200"}
    recent = {"llama3-h100", "grand-teton", "a100-pcie", "dgx-b200", "gb200-nvl72", "mi300x"}
    clusters = {"lowbw-v100", "jean-zay", "oneflow-v100", "selene", "vtrain-a100", "yuan"}
    assert dgx | recent | clusters | {"local"} == set(system_names())
    systems = {name: load_system_file(name) for name in dgx | recent | clusters}
    dgx2 = systems["dgx2"]
    assert (dgx2.devices_per_node.value, dgx2.nodes.value, dgx2.peak("fp16")) == (16, 25, 125e12)
    ports = {"dgx2": 6.25e9, "lowbw-v100": 1.25e9, "selene": 25e9}
    ports |= dict.fromkeys(("dgx-b200", "gb200-nvl72", "mi300x"), 50e9)  # 400 Gb/s per device
    assert {name: systems[name].link_per_device("inter-node") for name in ports} == ports
    pcie = {name for name, system in systems.items() if system.link_inside() == "pcie"}
    assert pcie == {"lowbw-v100", "a100-pcie"}
    assert {system.link_inside() for name, system in systems.items() if name not in pcie} == {"nvlink"}
    assert systems["yuan"].device.memory_bytes.value is None
    assert "(assumed)" in systems["yuan"].links["nvlink"].bandwidth.source
    with pytest.raises(ConfigError, match=r"precision = 'bf16': must be a precision that NVIDIA V100"):
        dgx2.peak("bf16")


def test_nodes_have_the_published_power_and_price() -> None:
    """Maximum power of a node in kW by the manufacturer, and hourly on-demand price of a node of 8 devices."""
    kilowatts = {"selene": 6.5, "dgx-a100-40gb": 6.5, "dgx-h100": 10.2, "dgx-h200": 10.2, "dgx-b200": 14.3}
    kilowatts |= {"dgx1-v100-16gb": 3.5, "dgx1-v100-32gb": 3.5, "dgx2": 10, "dgx2h": 12, "gb200-nvl72": 120}
    dollars = {"selene": 27.447, "dgx-a100-40gb": 21.958, "dgx-h100": 55.04, "dgx-h200": 63.296}
    dollars |= {"dgx-b200": 113.933}
    dollars |= {"llama3-h100": 55.04, "vtrain-a100": 27.447}  # equal devices in nodes of unknown power
    for key, scale, printed in (("power_w", 1e-3, kilowatts), ("price_per_hour", 1, dollars)):
        found = {}
        for system in map(load_system, system_names()):
            if (value := getattr(system.device, key).value) is not None:
                found[system.name] = value * system.devices_per_node.value * scale
        assert found == pytest.approx(printed, rel=1e-3)


def test_price_and_power_do_not_change_records_of_simulations() -> None:
    system = load_system_file("dgx-h100")
    other = Quantity(value=1.0, source="mine")
    device = dataclasses.replace(system.device, price_per_hour=other, power_w=other)
    priced = dataclasses.replace(system, device=device)
    assert priced != system
    numbers = [simulation_facts(each, OperatorSet.FUSED).numbers for each in (system, priced)]
    assert numbers[0] == numbers[1]


def test_like_copies_another_system_except_for_given_keys(write: Callable[[str], Path]) -> None:
    other = load_system_file("dgx2h")
    numbers = '[device.time]\nmatmul_efficiency = { value = 0.7, source = "here" }\n[links.nvlink]\nper = "device"\n'
    derived = load_system_file(write(f'like = "dgx2h"\nnodes = {{ value = 3, source = "here" }}\n{numbers}'))
    assert (derived.name, derived.nodes.value, other.nodes.value) == ("mine", 3, 32)
    efficiency = derived.device.time.matmul_efficiency
    assert (efficiency.value, efficiency.low, efficiency.source) == (0.7, None, "here")
    time = dataclasses.replace(derived.device.time, matmul_efficiency=other.device.time.matmul_efficiency)
    assert dataclasses.replace(derived.device, time=time) == other.device
    assert (derived.links, derived.context_bytes) == (other.links, other.context_bytes)


def test_missing_numbers_are_assumed_with_their_source(write: Callable[[str], Path]) -> None:
    plain = load_system_file(write(VALID))
    assert (plain.name, plain.link_per_device("inter-node"), plain.provenance) == ("mine", 2.5e9, None)
    assert load_system_file(str(write(VALID))) == plain
    for key, assumed in ASSUMED.items():
        used = plain.device.time.used(key)
        assert used.value == assumed.value == getattr(plain.timing, key)
        assert used.ends == assumed.ends
        assert used.source.startswith(f"assumed, {assumed.source}")
    assert plain.timing.unaligned_flops is None
    link = plain.links["pcie"]
    for key, assumed in (ASSUMED_LINKS["pcie"] | ASSUMED_ANY).items():
        used = link.used("pcie", key)
        source = f"assumed, {assumed.source}: {link.latency_s.source}"
        assert (used.value, used.source) == (assumed.value, source)


def test_numbers_of_the_file_replace_assumed_numbers(write: Callable[[str], Path]) -> None:
    text = VALID + 'efficiency = { value = 0.5, source = "there" }\n'
    text += '[device.time]\nkernel_s = { value = 1e-6, source = "there" }\n'
    text += 'launch_s = { value = "unknown", source = "nobody says" }\n'
    printed = load_system_file(write(text))
    assert printed.links["pcie"].used("pcie", "efficiency").source == "there"
    assert (printed.timing.kernel_s, printed.timing.launch_s) == (1e-6, ASSUMED["launch_s"].value)
    assert printed.device.time.used("launch_s").source.endswith("nobody says")


def test_calibrated_system_file_is_read(write: Callable[[str], Path]) -> None:
    found = load_system_file(write(VALID + PRODUCTS + MEASURED_LINK + PROVENANCE))
    assert found.provenance is not None
    assert (found.provenance.ranks, found.provenance.facts["cores"]) == (4, 4)
    assert found.links["memory"].collectives["all_reduce"].points == ((1024, 1e-4), (1048576, 1e-3))
    assert found.device.operators["aten.mm"].seconds(flops=1e9, nbytes=123) == pytest.approx(12e-6)


NAME = 'name = "X"'
NODE_COUNT = '{ value = 2, source = "here" }'
NO_RANGE = "device.price_per_hour = '2 (1 to 2)': must be one number without a range"
MISTAKES = [
    # replaced text, its replacement, part of the error
    (NAME, 'nam = "X"', "device.nam = 'X': unknown key; did you mean name?"),
    (NAME, NAME + '\npower_w = { value = 0, source = "here" }', "device.power_w = 0.0: must be more than 0"),
    (NAME, NAME + '\nprice_per_hour = { value = 2, low = 1, source = "here; low: spot" }', NO_RANGE),
    ("[device.peak_flops]", "[device.peak_flop]", "device.peak_flop = "),
    (f"nodes = {NODE_COUNT}", "", "nodes: is missing"),
    (f"nodes = {NODE_COUNT}", "nodes = 2", "nodes = 2: must be a table { value = ..., source = ... }"),
    (NODE_COUNT, '{ value = 2.5, source = "here" }', "nodes = 2.5: must be an integer"),
    (NODE_COUNT, '{ value = -2, source = "here" }', "nodes.value = -2"),
    (NODE_COUNT, '{ value = 0, source = "here" }', "nodes = 0.0: must be more than 0"),
    (NODE_COUNT, "{ value = 2 }", "nodes.source: is missing"),
    (NODE_COUNT, '{ value = 2, source = " " }', "the publication of the number"),
    ('context_bytes = { value = 1e9, source = "here" }', "", "context_bytes: is missing"),
    ("value = 1e9", "value = 16e9", "context_bytes = 16000000000.0: must be less than device.memory_bytes"),
    ("context_bytes =", "context =", "context = "),
    ("host_memory_bytes =", "host_memory =", "did you mean host_memory_bytes?"),
    ("value = 64e9", "value = 0", "host_memory_bytes = 0.0: must be more than 0"),
    ("value = 10e9", "value = 0", "links.inter-node.bandwidth = 0.0: must be more than 0"),
    ("value = 100e12", "value = 0", "device.peak_flops.fp16 = 0.0: must be more than 0"),
    ("value = 16e9", 'value = "16 GB"', "device.memory_bytes.value = '16 GB'"),
    ("fp16 =", "fp12 =", "peak_flops = 'fp12': must be one of"),
    ('per = "node"', 'per = "rack"', "links.inter-node.per = 'rack': must be one of device, node"),
    ("[links.inter-node]", "[links.ethernet]", "links = 'ethernet': must be one of"),
    ("[links.inter-node]", "links = 3\n[x]", "links = 3"),
    ("devices_per_node", 'name = "x"\ndevices_per_node', "the file names its system"),
]
X = '{{ value = {}, source = "x" }}'
TIME, OPERATOR, SEND = "[device.time]\n", "[device.operators.mm]\n", "[links.pcie.collectives.send]\n"
ADDITIONS = [
    # text after the link pcie, part of the error
    (TIME + f"matmul_eficiency = {X.format(1)}", "device.time.matmul_eficiency = "),
    (TIME + "kernel_s = 3e-6", "device.time.kernel_s = 3e-06: must be a table"),
    (TIME + f"memory_efficiency = {X.format(1.2)}", "device.time.memory_efficiency = 1.2: must be mor"),
    (TIME + f"multiprocessors = {X.format(1.5)}", "device.time.multiprocessors = 1.5: must be an inte"),
    (OPERATOR + "fixed_s = -1", "device.operators.mm.fixed_s = -1.0: must be seconds, 0 or more"),
    (OPERATOR + 'fixed_s = "x"', "device.operators.mm.fixed_s = 'x': must be"),
    (OPERATOR + "fixed_s = 1", "provenance: is missing"),
    (f"rings = {X.format(0)}", "links.pcie.rings = 0.0: must be more than 0"),
    (f"overlap_cost = {X.format(2)}", "links.pcie.overlap_cost = 2.0: must be a fraction"),
    ("[links.pcie.collectives.gather]\npoints = [[1, 1]]", "collectives = 'gather': must be one of"),
    (SEND + "points = []", "collectives.send.points = []: must be at least one pair"),
    (SEND + "points = [[2, 1], [1, 1]]", "rising bytes"),
    (SEND + "points = [[2, 0]]", "points = 0.0: must be more than 0 seconds"),
    (SEND + "points = [[2]]", "collectives.send.points"),
    (SEND + "points = [[2, 1]]", "provenance: is missing"),
    (SEND + "points = [[2, 1]]\nstride = 0", "stride = 0: must be an integer of at least 1"),
    (
        SEND + "points = [[2, 1]]\ngroups = [{ points = [[2, 1]] }]",
        "groups = [0]: must be groups of 2 or more ranks, each without groups of its own",
    ),
    ("[provenance]\ndate = '2026-01-01'", "provenance.torch: is missing"),
]


@pytest.mark.parametrize(("old", "new", "message"), [*MISTAKES, *(("", *row) for row in ADDITIONS)])
def test_error_of_a_mistake_names_file_key_and_remedy(
    write: Callable[[str], Path], old: str, new: str, message: str
) -> None:
    assert old in VALID
    assert_error(write(VALID.replace(old, new, 1) if old else VALID + new), message)


def assert_error(path: Path, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_system_file(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_error_for_an_unknown_system_or_number(write: Callable[[str], Path]) -> None:
    for name in ("dgx3", "local", "mine.toml"):
        assert_error(write(f'like = "{name}"'), f"like = '{name}': must be one of a100-pcie, ")
    path = write('like = "dgx2"\n[links.nvlink]\nbandwidth = 5')
    assert_error(path, "links.nvlink.bandwidth = 5: must be a table { value")
    with pytest.raises(ConfigError, match=r"system = 'dgx_2': did you mean dgx2\?"):
        load_system_file("dgx_2")
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        load_system_file("nowhere.toml")
    path = write(VALID.replace('10e9, source = "here"', '"unknown", source = "not published"'))
    message = "bandwidth = 'unknown': this command needs a known value; source: not published"
    with pytest.raises(ConfigError, match=message):
        load_system_file(path).link_per_device("inter-node")
