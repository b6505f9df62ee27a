"""ci/scripts/release_notes.py: a release is announced with its own section of the changelog."""

from __future__ import annotations

import pytest

CHANGELOG = """\
# Changelog

## 1.10.0 (2026-03-01)

### Added

- new

## 1.1.0 (2026-02-01)

- old

## 1.0.0

"""


@pytest.fixture(scope="module")
def release_notes(load_script):
    return load_script("release_notes")


def test_the_section_of_the_version_is_taken_and_no_other(release_notes):
    assert release_notes.section(CHANGELOG, version="1.10.0") == "### Added\n\n- new"
    assert release_notes.section(CHANGELOG, version="1.1.0") == "- old"


@pytest.mark.parametrize("version", ["1.1", "2.0.0", "1.0.0"])
def test_a_version_without_text_is_refused(release_notes, version):
    with pytest.raises(LookupError, match="has no text"):
        release_notes.section(CHANGELOG, version=version)


def test_the_command_fails_for_a_version_that_never_was(release_notes, capsys):
    assert release_notes.main(["v0.0.0"]) == 1
    assert "no text for 0.0.0" in capsys.readouterr().err
