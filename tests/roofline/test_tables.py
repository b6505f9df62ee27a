"""Numbers and ceilings as text."""

from __future__ import annotations

import pytest

from devstream.roofline.devices import DATASHEETS
from devstream.roofline.tables import ceiling_rows, duration, quantity, size
from devstream.testing.ceilings import ceilings


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7.61e14, "761 TFLOP/s"),
        (1.234e9, "1.23 GFLOP/s"),
        (999.7e9, "1 TFLOP/s"),
        (12.0, "12 FLOP/s"),
        (0.0, "0 FLOP/s"),
    ],
)
def test_a_quantity_has_three_digits_and_a_prefix(value, text):
    assert quantity(value, "FLOP/s") == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.5e-6, "2.5 µs"), (0.0123, "12.3 ms"), (61, "61 s"), (3e-10, "0.3 ns"), (0, "0 ns")],
)
def test_a_duration_is_in_the_unit_that_fits(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(1536 * 1024, "1.5 MiB"), (12, "12 B"), (80 * 2**30, "80 GiB")])
def test_a_size_is_in_powers_of_1024(count, text):
    assert size(count) == text


def test_each_ceiling_stands_beside_what_the_datasheet_promises():
    rows = {row[0]: row for row in ceiling_rows(ceilings(), DATASHEETS["H200"])}
    assert rows["matmul bfloat16"][1:] == ("100 TFLOP/s", "5%", "989 TFLOP/s")
    assert rows["memory, copy, 4-byte elements"][3] == "4.8 TB/s"
    assert rows["link, device to host, pinned"][3] == "64 GB/s"
    assert rows["all_reduce, 2 ranks"][1] == "80 GB/s, 5 µs a message"


def test_an_unknown_device_has_no_datasheet_and_all_its_ceilings():
    rows = ceiling_rows(ceilings(), None)
    assert len(rows) == len(ceiling_rows(ceilings(), DATASHEETS["H200"]))
    assert {row[3] for row in rows} == {""}
