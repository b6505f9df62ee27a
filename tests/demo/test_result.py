"""What a run says about itself."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from devstream.demo.result import Column, Result
from devstream.demo.table import as_table

COLUMNS = (
    Column("without side streams", (100.0, 120.0, 110.0), 4.0, 0.0, 0.0),
    Column("with side streams", (130.0, 90.0, 132.0), 5.0, 4.0, 2e-7),
)
RESULT = Result(
    device="cpu:0",
    device_name="a CPU",
    size="tiny",
    steps=10,
    seed=0,
    parameters=1234,
    text_bytes=5_000_000,
    columns=COLUMNS,
    compared_steps=4,
    loss_before=5.5,
    loss_after=2.5,
    snapshots={5: 3.0},
    training_s=1.0,
    total_s=2.0,
    versions={"python": "3.11", "torch": "2.13.0"},
)


def test_a_run_whose_loss_fell_has_not_failed() -> None:
    assert RESULT.failure is None


@pytest.mark.parametrize(
    ("loss", "words"), [(4.5, "fell by 1.00"), (float("nan"), "diverged"), (float("inf"), "diverged")]
)
def test_a_run_that_did_not_train_says_why(loss: float, words: str) -> None:
    failure = replace(RESULT, loss_after=loss).failure
    assert failure is not None
    assert words in failure


def test_the_share_is_the_hidden_part_of_the_copy_time() -> None:
    assert [column.hidden_share for column in COLUMNS] == [0.0, 0.8]
    assert replace(COLUMNS[0], copy_ms=None, hidden_ms=None).hidden_share is None


def test_json_holds_everything_and_no_number_that_it_has_no_word_for() -> None:
    document = replace(RESULT, loss_after=float("nan")).as_json()
    json.dumps(document, allow_nan=False)
    assert document["loss_after"] is None
    assert document["snapshots"] == {"5": 3.0}
    assert document["columns"][1]["hidden_share"] == 0.8
    assert document["columns"][1]["median_tokens_per_s"] == 130.0


def test_the_table_has_a_cell_for_each_column_and_the_run_before() -> None:
    table = as_table(RESULT, previous_tokens_per_s=99.0)
    assert all(len(row) == len(table.heads) for row in table.rows)
    rows = {row[0].strip(): row[1:] for row in table.rows}
    assert rows["tokens/s"] == ("110", "130", "99")
    assert rows["against the first, in turn"] == ("1.00x", "1.20x (0.75 to 1.30)", "")
    assert rows["copy time hidden"] == ("0%", "80%", "")
    assert rows["same losses"] == ("to the bit", "within 2.0e-07", "")


def test_the_table_does_not_make_up_what_was_not_measured() -> None:
    columns = tuple(replace(column, copy_ms=None, hidden_ms=None) for column in COLUMNS)
    rows = {row[0].strip(): row[1:] for row in as_table(replace(RESULT, columns=columns)).rows}
    assert rows["copy time hidden"] == ("not measured", "not measured", "")
    assert rows["tokens/s"][-1] == "none yet"


@pytest.mark.parametrize(
    "other",
    [
        {"device_name": "another CPU"},
        {"size": "small"},
        {"steps": 11},
        {"versions": {"python": "3.11", "torch": "2.14.0"}},
    ],
)
def test_a_run_is_compared_with_one_of_the_same_device_size_steps_and_torch(other: dict[str, Any]) -> None:
    assert replace(RESULT, **other).cache_key != RESULT.cache_key
    assert replace(RESULT, seed=7, versions={**RESULT.versions, "devstream": "9"}).cache_key == RESULT.cache_key


def test_the_table_of_a_cpu_says_why_its_copies_take_longer_beside_the_training() -> None:
    assert any("hand-over" in note for note in as_table(RESULT).notes)
    assert not any("hand-over" in note for note in as_table(replace(RESULT, device="cuda:0")).notes)
    less = (replace(COLUMNS[0], copy_ms=9.0), COLUMNS[1])
    assert not any("hand-over" in note for note in as_table(replace(RESULT, columns=less)).notes)
    unmeasured = tuple(replace(column, copy_ms=None, hidden_ms=None) for column in COLUMNS)
    assert not any("hand-over" in note for note in as_table(replace(RESULT, columns=unmeasured)).notes)
    assert any("first steps (4)" in note for note in as_table(RESULT).notes)
