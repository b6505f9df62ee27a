"""The text is dealt by file, and a batch depends on its arguments alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from devstream.demo.data import batch, read_library


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for number in range(40):
        (tmp_path / f"module_{number:02}.py").write_bytes(bytes([number]) * 4000)
    return tmp_path


def test_no_file_is_in_both_texts(library: Path) -> None:
    text = read_library(library)
    training, evaluation = set(text.training.tolist()), set(text.evaluation.tolist())
    assert training.isdisjoint(evaluation)
    assert training | evaluation == set(range(40))
    assert text.files == 40


def test_what_is_not_the_library_is_left_out(library: Path) -> None:
    before = read_library(library)
    for folder in ("site-packages", "test", "__pycache__"):
        (library / folder).mkdir()
        (library / folder / "other.py").write_bytes(b"\xff" * 9000)
    assert read_library(library).files == before.files


def test_a_library_without_source_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "only.py").write_text("pass")
    with pytest.raises(FileNotFoundError, match="too little source"):
        read_library(tmp_path)


def test_a_batch_is_a_function_of_its_number_and_seed() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    first = batch(text, number=3, size=4, context=16, seed=1)
    assert torch.equal(first, batch(text, number=3, size=4, context=16, seed=1))
    assert not torch.equal(first, batch(text, number=4, size=4, context=16, seed=1))
    assert not torch.equal(first, batch(text, number=3, size=4, context=16, seed=2))
    assert first.shape == (4, 17)
    assert torch.equal(first[:, 1:], first[:, :-1] + 1)
