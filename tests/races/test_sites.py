"""devstream/races/sites.py: the user's line, whatever lies between it and torch."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from torch import nn

from devstream.races import sites
from devstream.races.sites import NOWHERE, Site, here


def test_the_line_is_the_caller_s():
    found = here()
    assert found.file == __file__
    assert found.function == "test_the_line_is_the_caller_s"
    assert found.text == "found = here()"


def test_frames_of_torch_are_passed_over():
    found = []

    class Layer(nn.Module):
        def forward(self, x):
            return x

    layer = nn.Sequential(Layer())
    layer.register_forward_hook(lambda *_: found.append(here(2)))
    layer(torch.ones(1))  # the line
    assert found[0].text.endswith("# the line")


def test_a_thread_without_a_line_takes_the_main_thread_s():
    found = []

    def work():
        # What autograd's threads look like: no frame of a user's.
        found.append(sites._first_plain(None))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [NOWHERE]


def test_programs_of_ours_have_lines_too():
    home = Path(sites.__file__).parents[1]
    for name, kind in {
        "demo/train.py": sites._PLAIN,
        "testing/faulty.py": sites._PLAIN,
        "overlap/_copy.py": sites._OURS,
        "backends/cpu.py": sites._BACKENDS,
        "races/watch.py": sites._OURS,
    }.items():
        assert sites._kind(str(home / name)) == kind, name


def test_a_user_s_folder_may_be_called_like_torch():
    assert sites._kind("/home/me/torch/_work/train.py") == sites._PLAIN
    assert sites._kind(torch.nn.__file__) == sites._TORCHES


def test_an_unknown_site_says_so():
    assert str(NOWHERE) == "an unknown line"
    assert NOWHERE.text == ""
    assert str(Site("a.py", 3, "f")) == "a.py:3, in f"
    assert Site("no such file.py", 3, "f").text == ""


def test_a_thread_whose_stack_ends_early_is_no_error():
    """A thread of autograd has fewer frames than the place that asks usually finds above it."""
    found = sites.here(10_000)
    assert found is sites.NOWHERE
    assert sites.inside_backend(10_000) is False
