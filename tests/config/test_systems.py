"""Tests of system files: sources of all numbers, published numbers, unknown numbers, and errors in one line."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from repro.config import ConfigError
from repro.config.enums import OperatorSet
from repro.config.links import KEYS
from repro.config.system import Quantity, System
from repro.config.systems import load_system_file, system_names
from repro.measure.local_system import load_system
from repro.simulate.record import simulation_facts
from tests.config.system_texts import NODES

DEVICE = """
[device]
name = "X"
memory_bytes = { value = 16e9, source = "here" }
memory_bandwidth = { value = "unknown", source = "nobody says" }
[device.peak_flops]
fp16 = { value = 100e12, source = "here" }
[links.inter-node]
per = "node"
bandwidth = { value = 10e9, source = "here" }
"""
VALID = NODES + DEVICE
NAME = 'name = "X"'
NODE_COUNT = '{ value = 2, source = "here" }'


def quantities(system: System) -> list[Quantity]:
    device = system.device
    links = [link.bandwidth for link in system.links.values()]
    links += [link.used(name, key) for name, link in system.links.items() for key in KEYS]
    links += [device.time.used(field.name) for field in dataclasses.fields(device.time)]
    numbers = [device.memory_bytes, device.memory_bandwidth, system.devices_per_node, system.nodes]
    numbers += [system.context_bytes, system.host_memory_bytes, device.power_w, device.price_per_hour]
    return [*numbers, *device.peak_flops.values(), *links]


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("name", system_names())
def test_every_number_of_a_system_has_a_source(name: str) -> None:
    system = load_system(name)
    assert system.name == name
    assert all(quantity.source for quantity in quantities(system))


def test_packaged_systems_have_the_published_numbers() -> None:
    dgx = {"dgx1-v100-16gb", "dgx1-v100-32gb", "dgx2", "dgx2h", "dgx-a100-40gb", "dgx-h100", "dgx-h200"}
    recent = {"llama3-h100", "grand-teton", "a100-pcie", "dgx-b200", "gb200-nvl72", "mi300x"}
    clusters = {"lowbw-v100", "jean-zay", "oneflow-v100", "selene", "vtrain-a100", "yuan"}
    assert dgx | recent | clusters | {"local"} == set(system_names())
    dgx2 = load_system_file("dgx2")
    assert (dgx2.devices_per_node.value, dgx2.nodes.value) == (16, 25)
    assert dgx2.peak("fp16") == 125e12
    assert dgx2.link_per_device("inter-node") == 6.25e9
    assert load_system_file("lowbw-v100").link_per_device("inter-node") == 1.25e9
    assert load_system_file("selene").link_per_device("inter-node") == 25e9
    for name in ("dgx-b200", "gb200-nvl72", "mi300x"):  # 400 Gb/s per device
        assert load_system_file(name).link_per_device("inter-node") == 50e9
    assert load_system_file("yuan").device.memory_bytes.value is None
    with pytest.raises(ConfigError, match=r"precision = 'bf16': must be a precision of NVIDIA V100"):
        dgx2.peak("bf16")
    assert "(assumed)" in load_system_file("yuan").links["nvlink"].bandwidth.source


def test_nodes_have_the_published_power_and_price() -> None:
    """Maximum power of a node in kW by the manufacturer, and hourly on-demand price of a node of 8 devices."""
    kilowatts = {"selene": 6.5, "dgx-a100-40gb": 6.5, "dgx-h100": 10.2, "dgx-h200": 10.2, "dgx-b200": 14.3}
    kilowatts |= {"dgx1-v100-16gb": 3.5, "dgx1-v100-32gb": 3.5, "dgx2": 10, "dgx2h": 12, "gb200-nvl72": 120}
    dollars = {
        "selene": 27.447,
        "dgx-a100-40gb": 21.958,
        "dgx-h100": 55.04,
        "dgx-h200": 63.296,
        "dgx-b200": 113.933,
    }
    dollars |= {"llama3-h100": 55.04, "vtrain-a100": 27.447}  # equal devices in nodes of unknown power
    for name in system_names():
        system = load_system(name)
        per_node, device = system.devices_per_node.value, system.device
        for numbers, quantity in ((kilowatts, device.power_w), (dollars, device.price_per_hour)):
            assert (quantity.value is not None) == (name in numbers), name
            if quantity.value is not None:
                scale = 1000 if numbers is kilowatts else 1
                assert quantity.value * per_node == pytest.approx(numbers[name] * scale, rel=1e-3)


def test_price_and_power_do_not_change_records_of_simulations() -> None:
    system = load_system_file("dgx-h100")
    other = Quantity(value=1.0, source="mine")
    device = dataclasses.replace(system.device, price_per_hour=other, power_w=other)
    priced = dataclasses.replace(system, device=device)
    assert priced != system
    numbers = [simulation_facts(each, OperatorSet.FUSED).numbers for each in (system, priced)]
    assert numbers[0] == numbers[1]


def test_like_copies_another_system_except_for_given_keys(write: Any) -> None:
    other = load_system_file("dgx2h")
    numbers = '[device.time]\nmatmul_efficiency = { value = 0.7, source = "here" }\n[links.nvlink]\nper = "device"\n'
    derived = load_system_file(write(f'like = "dgx2h"\nnodes = {{ value = 3, source = "here" }}\n{numbers}'))
    assert derived.name == "mine"
    assert (derived.nodes.value, other.nodes.value) == (3, 32)
    efficiency = derived.device.time.matmul_efficiency
    assert (efficiency.value, efficiency.low, efficiency.source) == (0.7, None, "here"), (
        "range and source of the file"
    )
    time = dataclasses.replace(derived.device.time, matmul_efficiency=other.device.time.matmul_efficiency)
    assert dataclasses.replace(derived.device, time=time) == other.device
    assert (derived.links, derived.context_bytes) == (other.links, other.context_bytes)


def test_error_for_an_unknown_system_after_like(write: Any) -> None:
    for name in ("dgx3", "local", "mine.toml"):
        with pytest.raises(
            ConfigError, match=rf"mine\.toml: like = '{name}': must be one of a100-pcie, .*, yuan"
        ):
            load_system_file(write(f'like = "{name}"'))
    with pytest.raises(
        ConfigError, match=r"mine\.toml: links\.nvlink\.bandwidth = 5: must be a table \{ value"
    ):
        load_system_file(write('like = "dgx2"\n[links.nvlink]\nbandwidth = 5'))


def test_error_for_an_unknown_bandwidth_has_its_reason(write: Any) -> None:
    path = write(
        VALID.replace('{ value = 10e9, source = "here" }', '{ value = "unknown", source = "not published" }')
    )
    with pytest.raises(
        ConfigError, match=r"bandwidth = 'unknown': this command needs the number; not published"
    ):
        load_system_file(path).link_per_device("inter-node")


@pytest.mark.parametrize("name", system_names())
def test_allocatable_memory_is_device_memory_minus_the_context(name: str) -> None:
    system = load_system(name)
    memory, context = system.device.memory_bytes.value, system.context_used
    assert context.value == system.context()
    assert ("assumed" in context.source) == (system.context_bytes.value is None)
    if memory is None:
        with pytest.raises(
            ConfigError,
            match=r"device\.memory_bytes = 'unknown': this command needs the number; not published",
        ):
            system.allocatable_bytes()
    else:
        assert system.allocatable_bytes() == int(memory) - system.context()


def test_link_inside_a_node_is_pcie_or_nvlink() -> None:
    inside = {name: load_system_file(name).link_inside() for name in system_names() if name != "local"}
    assert {inside.pop("lowbw-v100"), inside.pop("a100-pcie")} == {"pcie"}
    assert set(inside.values()) == {"nvlink"}


def test_system_file_is_read_by_path(write: Any) -> None:
    system = load_system_file(write(VALID))
    assert system.name == "mine"
    assert system.link_per_device("inter-node") == 2.5e9
    assert load_system_file(str(write(VALID))) == system


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("", "", None),
        (NAME, 'nam = "X"', "device.nam = 'X': unknown key; did you mean name?"),
        (
            NAME,
            NAME + '\npower_w = { value = 0, source = "here" }',
            "device.power_w = 0.0: must be more than 0",
        ),
        (
            NAME,
            NAME + '\nprice_per_hour = { value = 2, low = 1, source = "here; low: spot" }',
            "device.price_per_hour = '2 (1 to 2)': must be one number without a range",
        ),
        ("[device.peak_flops]", "[device.peak_flop]", "device.peak_flop = "),
        (f"nodes = {NODE_COUNT}", "", "nodes: is missing"),
        (f"nodes = {NODE_COUNT}", "nodes = 2", "nodes = 2: must be a table { value = ..., source = ... }"),
        (NODE_COUNT, '{ value = 2.5, source = "here" }', "nodes = 2.5: must be an integer"),
        (NODE_COUNT, '{ value = -2, source = "here" }', "nodes.value = -2"),
        (NODE_COUNT, '{ value = 0, source = "here" }', "nodes = 0.0: must be more than 0"),
        (NODE_COUNT, "{ value = 2 }", "nodes.source: is missing"),
        ('context_bytes = { value = 1e9, source = "here" }', "", "context_bytes: is missing"),
        (
            "value = 1e9",
            "value = 16e9",
            "context_bytes = 16000000000.0: must be less than device.memory_bytes",
        ),
        ("context_bytes =", "context =", "context = "),
        ("host_memory_bytes =", "host_memory =", "did you mean host_memory_bytes?"),
        ("value = 64e9", "value = 0", "host_memory_bytes = 0.0: must be more than 0"),
        ("value = 10e9", "value = 0", "links.inter-node.bandwidth = 0.0: must be more than 0"),
        ("value = 100e12", "value = 0", "device.peak_flops.fp16 = 0.0: must be more than 0"),
        (NODE_COUNT, '{ value = 2, source = " " }', "the publication of the number"),
        ("value = 16e9", 'value = "16 GB"', "device.memory_bytes.value = '16 GB'"),
        ("fp16 =", "fp12 =", "peak_flops = 'fp12': must be one of"),
        ('per = "node"', 'per = "rack"', "links.inter-node.per = 'rack': must be one of device, node"),
        ("[links.inter-node]", "[links.ethernet]", "links = 'ethernet': must be one of"),
        ("[links.inter-node]", "links = 3\n[x]", "links = 3"),
        ("devices_per_node", 'name = "x"\ndevices_per_node', "the file names its system"),
    ],
)
def test_error_of_a_mistake_names_file_key_and_remedy(
    write: Any, old: str, new: str, message: str | None
) -> None:
    path = write(VALID.replace(old, new, 1))
    if message is None:
        load_system_file(path)
        return
    with pytest.raises(ConfigError) as caught:
        load_system_file(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_error_for_an_unknown_or_missing_system() -> None:
    with pytest.raises(ConfigError, match=r"system = 'dgx_2': did you mean dgx2\?"):
        load_system_file("dgx_2")
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        load_system_file("nowhere.toml")
