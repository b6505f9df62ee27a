"""devstream/races/extents.py: which bytes a tensor covers, against sets of bytes counted one by one."""

from __future__ import annotations

from itertools import product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from devstream.races.extents import Extent, extent

layouts = st.integers(0, 4).flatmap(
    lambda rank: st.tuples(
        st.integers(0, 12),
        st.tuples(*[st.integers(0, 4)] * rank),
        st.tuples(*[st.integers(0, 9)] * rank),
        st.sampled_from([1, 2, 4]),
    )
)


def bytes_of(layout):
    offset, shape, strides, itemsize = layout
    found = set()
    for index in product(*map(range, shape)):
        first = (offset + sum(i * s for i, s in zip(index, strides, strict=True))) * itemsize
        found.update(range(first, first + itemsize))
    return found


def bytes_in(where):
    found = set()
    for index in product(*(range(count) for count, _ in where.dims)):
        first = where.start + sum(i * step for i, (_, step) in zip(index, where.dims, strict=True))
        found.update(range(first, first + where.run))
    return found


@given(layouts)
def test_an_extent_covers_exactly_the_bytes_of_its_tensor(layout):
    where = extent(*layout)
    assert (set() if where is None else bytes_in(where)) == bytes_of(layout)
    if where is not None:
        assert (min(bytes_of(layout)), max(bytes_of(layout)) + 1) == (where.start, where.stop)


@settings(max_examples=400)
@given(layouts, layouts)
def test_two_extents_meet_exactly_where_they_share_a_byte(one, two):
    a, b = extent(*one), extent(*two)
    if a is not None and b is not None:
        shared = bool(bytes_of(one) & bytes_of(two))
        assert a.meets(b) == shared
        assert b.meets(a) == shared


@given(layouts, layouts)
def test_what_an_extent_holds_is_inside_it(one, two):
    a, b = extent(*one), extent(*two)
    if a is not None and b is not None and a.holds(b):
        assert bytes_of(two) <= bytes_of(one)


def test_a_tensor_without_elements_covers_nothing():
    assert extent(3, (0, 4), (4, 1), 4) is None


def test_a_scalar_covers_its_bytes():
    assert extent(3, (), (), 8) == Extent(24, 32, 8)


def test_a_transposed_matrix_is_one_run():
    matrix = torch.zeros(5, 7)
    assert extent(0, matrix.t().shape, matrix.t().stride(), 4) == Extent(0, 140, 140)


def test_columns_interleave_and_don_t_meet():
    matrix = torch.zeros(64, 2)
    left, right = (extent(c.storage_offset(), c.shape, c.stride(), 4) for c in (matrix[:, 0], matrix[:, 1]))
    assert left.start < right.stop
    assert right.start < left.stop
    assert not left.meets(right)
    assert left.meets(left)


def test_large_layouts_are_told_apart_fast():
    # By counting bytes these would take gigabytes.
    big = torch.empty(1 << 14, 1 << 14, 4, dtype=torch.uint8, device="meta")
    even, odd = big[::2, :, 1], big[1::2, ::3, 1]
    a, b = (extent(t.storage_offset(), t.shape, t.stride(), 1) for t in (even, odd))
    assert not a.meets(b)
    assert a.meets(extent(0, big.shape, big.stride(), 1))
