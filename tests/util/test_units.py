"""Tests of numbers, quantities and layouts as text."""

from __future__ import annotations

from repro.config import Layout, words
from repro.config.enums import OperatorSet
from repro.util import units

SIZES = {
    None: "–",
    0: "0 B",
    999: "999 B",
    1500: "1.5 kB",
    999.9e6: "1.00 GB",
    31.4e9: "31.4 GB",
    2e12: "2 TB",
}
DURATIONS = {None: "–", 0: "0 s", 2.5e-6: "2.5 us", 0.0123: "12.3 ms", 0.99996: "1.00 s", 1.5: "1.5 s"}
DURATIONS |= {119.7: "2 min 0 s", 125.4: "2 min 5 s"}
NUMBERS = {
    None: "–",
    0: "0",
    float("inf"): "inf",
    12345.6: "12,346",
    87.61: "87.6",
    6.3013: "6.30",
    57.0: "57",
}
NUMBERS |= {0.00379: "0.00379", -15.04: "-15.0"}


def test_quantities_as_text() -> None:
    assert {value: units.size(value) for value in SIZES} == SIZES
    assert {value: units.seconds(value) for value in DURATIONS} == DURATIONS
    assert {value: units.number(value) for value in NUMBERS} == NUMBERS
    counts = (842, 236_928, 39_594_240, 1_557_611_200, 1_008_038_758_400)
    assert [units.parameter_count(n) for n in counts] == ["842", "236.9K", "39.59M", "1.558B", "1.008T"]
    assert units.flop(1.683e14) == "168 TFLOP"
    assert (units.flop_rate(312e12), units.flop_rate(None)) == ("312 TFLOP/s", "–")
    assert (units.percent(37 / 480), units.percent(-0.05, sign=True)) == ("7.7 %", "-5.0 %")
    assert units.interval(None, None) == "no interval"
    assert units.ratio(1.0234, 1.01, 1.0339) == "1.023 times (1.010 to 1.034)"
    message = "out of memory: 134217728 bytes requested of 32317748480; rank 12"
    assert units.readable(message) == "out of memory: 134 MB requested of 32.3 GB; rank 12"


def test_layouts_in_words_omit_defaults_and_can_include_batches() -> None:
    layout = Layout(tp=2, dp=2, sp=True, zero=1, zero1_reduce="all-reduce", global_batch=4)
    assert words.describe_layout(layout) == "tp 2 x dp 2, ZeRO 1 by all-reduce, fp32, sequence parallelism"
    assert words.describe_layout(Layout()) == "one rank, fp32"
    ddp = Layout(dp=2, gradient_as_bucket_view=False)
    assert words.describe_layout(ddp) == "dp 2, ZeRO 0, fp32, separate gradient buckets"
    pipeline = Layout(pp=2, dp=2, micro_batch=2, global_batch=16, schedule="interleaved", chunks=2)
    assert words.describe_layout(pipeline, batches=True) == (
        "pp 2 x dp 2, ZeRO 0, fp32, micro-batch 2, global batch 16, interleaved with 2 chunks, "
        "4 micro-batches per step"
    )
    assert words.describe_layout(pipeline, degrees=False) == "ZeRO 0, fp32"
    # A suite may name any operator set, so a page must be able to print each.
    assert len({words.describe_layout(Layout(kernels=each)) for each in OperatorSet}) == len(OperatorSet)
    counts = [words.count_noun(n, "micro-batch") for n in (1, 2, 0.75)]
    assert counts == ["1 micro-batch", "2 micro-batches", "0.75 micro-batches"]
    assert words.count_noun(1024, "rank") == "1,024 ranks"
