"""devstream/_registry.py: who serves what, and whom a broken plug-in hurts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

import devstream
from devstream import _registry
from devstream.abc import Backend
from devstream.backends.cpu import CpuBackend
from devstream.exceptions import (
    BackendConflictError,
    BackendLoadError,
    BackendNotFoundError,
    BackendUnavailableError,
    DeviceMismatchError,
    StreamTypeError,
)

ROOT = Path(devstream.__file__).resolve().parents[1]

GOOD = """
from devstream.backends.cpu import CpuBackend

class QuuxBackend(CpuBackend):
    name = "{name}"
"""


class Site:
    """A folder of installed plug-ins, and a Python that sees it."""

    def __init__(self, folder):
        self.folder = folder

    def install(self, distribution, entry_points, **modules):
        """Install *distribution* with *entry_points* (name -> value) and *modules* (name -> source)."""
        info = self.folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        lines = [f"{name} = {value}" for name, value in entry_points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[devstream.backends]", *lines, ""]))
        for name, source in modules.items():
            (self.folder / f"{name}.py").write_text(textwrap.dedent(source))

    def run(self, program, **environment):
        """Run *program* in a fresh Python; return what it gave to `answer`."""
        head = "import json, sys, devstream\ndef answer(x): print('ANSWER' + json.dumps(x))\n"
        head += textwrap.dedent(
            """
            def error(call):
                try:
                    call()
                except Exception as raised:
                    return [type(raised).__name__, str(raised)]
            """
        )
        path = os.pathsep.join([str(ROOT), str(self.folder), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-c", head + textwrap.dedent(program)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": path, **environment},
        )
        assert done.returncode == 0, done.stderr
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("ANSWER")]
        return json.loads(line.removeprefix("ANSWER"))


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path)


@pytest.fixture
def registered():
    """Return `register`, and take back what the test registered."""
    names = []

    def register(name, factory):
        _registry.register(name, factory)
        names.append(name)

    yield register
    for name in names:
        _registry.unregister(name)


# -- selection -------------------------------------------------------------------------------------------


def test_a_name_wins_over_the_variable(site):
    site.install("quux-pack", {"quux": "quux_pack:QuuxBackend"}, quux_pack=GOOD.format(name="quux"))
    program = "answer([devstream.backend(name='cpu').name, devstream.backend().name])"
    assert site.run(program, DEVSTREAM_BACKEND="quux") == ["cpu", "quux"]


def test_the_variable_decides_for_the_device_type_that_its_backend_serves(site):
    site.install("quux-pack", {"quux": "quux_pack:QuuxBackend"}, quux_pack=GOOD.format(name="quux"))
    program = (
        "answer([devstream.backend('cpu').name, devstream.backend().name, devstream.Stream('cpu').__module__])"
    )
    assert site.run(program, DEVSTREAM_BACKEND="quux")[:2] == ["quux", "quux"]


def test_without_the_variable_the_device_type_decides(site):
    site.install("quux-pack", {"quux": "quux_pack:QuuxBackend"}, quux_pack=GOOD.format(name="quux"))
    assert site.run("answer(devstream.backend('cpu').name)", DEVSTREAM_BACKEND="") == "cpu"


def test_a_device_object_and_its_string_have_one_backend():
    assert devstream.backend(torch.device("cpu", 1)) is devstream.backend("cpu")


def test_a_name_and_a_device_at_once_are_refused():
    with pytest.raises(ValueError, match="a device or a name, not both"):
        devstream.backend("cpu", name="cpu")


def test_an_unknown_name_is_told_with_the_nearest_known_one_and_who_asked():
    with pytest.raises(BackendNotFoundError, match=r"'cpuu' \(asked for by name=\).*Did you mean 'cpu'\?"):
        devstream.backend(name="cpuu")


def test_an_unknown_name_in_the_variable_is_told_with_the_variable(site):
    kind, text = site.run("answer(error(lambda: devstream.Stream()))", DEVSTREAM_BACKEND="cpuu")
    assert kind == "BackendNotFoundError"
    assert "DEVSTREAM_BACKEND" in text
    assert "Did you mean 'cpu'?" in text


@pytest.mark.parametrize("device", ["cdua", "cpu:x", "cpu:-1", "", "npu:0"])
def test_a_device_string_that_torch_does_not_know_is_told_with_the_known_types(device):
    with pytest.raises(BackendNotFoundError, match=r"the device argument\); known backends: cpu, cuda"):
        devstream.Stream(device)


def test_a_device_type_that_nobody_serves_is_not_found():
    with pytest.raises(BackendNotFoundError, match="device type 'meta'"):
        devstream.Stream("meta")


@pytest.mark.parametrize("device", [True, False, 1.0, b"cpu", [0], object()])
def test_what_is_no_device_is_a_type_error(device):
    with pytest.raises(StreamTypeError, match=r"takes a torch.device, a str or an int, not"):
        devstream.current_stream(device)


# -- plug-ins --------------------------------------------------------------------------------------------


def test_a_plug_in_is_imported_only_when_it_is_asked_for(site):
    site.install("quux-pack", {"quux": "quux_pack:QuuxBackend"}, quux_pack=GOOD.format(name="quux"))
    program = """
        import torch
        seen = []
        look = lambda: seen.append("quux_pack" in sys.modules)
        devstream.Stream("cpu"); devstream.current_stream(); devstream.devices(); look()
        from devstream import _registry
        names = _registry.names(); look()
        devstream.backend(name="quux"); look()
        answer([seen, names])
    """
    seen, names = site.run(program)
    assert seen == [False, False, True]
    assert names[:4] == ["cpu", "cuda", "rocm", "accelerator"]
    assert "quux" in names[4:]


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("raise OSError('libquux.so: cannot open')", "OSError: libquux.so: cannot open"),
        ("this is no Python", "SyntaxError"),
        ("import a_module_that_nobody_has", "ModuleNotFoundError"),
        ("", "has no attribute 'QuuxBackend'"),
        ("class QuuxBackend:\n    def __init__(self): raise KeyError('quux')", "KeyError: 'quux'"),
        ("from devstream.abc import Backend\nclass QuuxBackend(Backend): name = 'quux'", "abstract"),
        ("class QuuxBackend: pass", "makes no devstream.abc.Backend but an object of QuuxBackend"),
        (
            """
            from devstream import UnsupportedError

            def QuuxBackend():
                raise UnsupportedError(operation="x", backend="quux", capability="y", alternative="z")
            """,
            "UnsupportedError",
        ),
    ],
)
def test_a_broken_plug_in_hurts_only_who_asks_and_names_its_distribution(site, source, cause):
    site.install("quux-pack", {"quux": "quux_pack:QuuxBackend"}, quux_pack=source)
    program = """
        first = error(lambda: devstream.backend(name="quux"))
        devstream.Stream("cpu").synchronize()
        answer([first, error(lambda: devstream.backend(name="quux"))])
    """
    first, again = site.run(program)
    assert first[0] == "BackendLoadError"
    assert cause in first[1]
    assert "quux-pack" in first[1]
    assert again[0] == "BackendLoadError"


def test_a_name_that_two_plug_ins_claim_is_an_error_that_names_both(site):
    site.install("quux-pack", {"quux": "quux_pack:QuuxBackend"}, quux_pack=GOOD.format(name="quux"))
    site.install("other-pack", {"quux": "other_pack:QuuxBackend"}, other_pack=GOOD.format(name="quux"))
    program = """
        raised = error(lambda: devstream.backend(name="quux"))
        devstream.Stream("cpu")
        answer([raised, "quux_pack" in sys.modules or "other_pack" in sys.modules])
    """
    (kind, text), imported = site.run(program)
    assert kind == "BackendConflictError"
    assert "quux-pack" in text
    assert "other-pack" in text
    assert not imported


def test_a_plug_in_under_the_name_of_a_built_in_is_an_error_that_names_both(site):
    site.install("quux-pack", {"cpu": "quux_pack:QuuxBackend"}, quux_pack=GOOD.format(name="cpu"))
    kind, text = site.run("answer(error(lambda: devstream.Stream('cpu')))")
    assert kind == "BackendConflictError"
    assert "devstream.backends.cpu:CpuBackend" in text
    assert "quux-pack" in text


def test_one_distribution_that_is_found_twice_is_no_conflict(site, tmp_path):
    site.install("quux-pack", {"quux": "quux_pack:QuuxBackend"}, quux_pack=GOOD.format(name="quux"))
    copy = Site(tmp_path / "copy")
    copy.folder.mkdir()
    copy.install("quux-pack", {"quux": "quux_pack:QuuxBackend"})
    program = f"sys.path.append({str(copy.folder)!r}); answer(devstream.backend(name='quux').name)"
    assert site.run(program) == "quux"


def test_an_unavailable_backend_gives_its_reason(site):
    source = GOOD.format(name="quux") + "    def unavailable_reason(self): return 'no quux is plugged in'\n"
    site.install("quux-pack", {"quux": "quux_pack:QuuxBackend"}, quux_pack=source)
    kind, text = site.run("answer(error(lambda: devstream.backend(name='quux')))")
    assert kind == "BackendUnavailableError"
    assert "no quux is plugged in" in text


def test_a_device_type_that_only_a_plug_in_teaches_torch_is_reached_through_its_entry_point(site):
    source = """
        import torch
        torch.utils.rename_privateuse1_backend("quux")
        from devstream.backends.cpu import CpuBackend

        class QuuxBackend(CpuBackend):
            name = device_type = "quux"
    """
    site.install("quux-pack", {"quux": "quux_pack:QuuxBackend"}, quux_pack=source)
    assert site.run("answer([devstream.backend('quux:1').name, devstream.backend('cpu').name])") == ["quux", "cpu"]


def test_a_plug_in_whose_device_type_torch_never_learns_is_unavailable(site):
    site.install("quux-pack", {"quux": "quux_pack:QuuxBackend"}, quux_pack=GOOD.format(name="quux"))
    kind, text = site.run("answer(error(lambda: devstream.Stream('quux')))")
    assert kind == "BackendUnavailableError"
    assert "torch doesn't take 'quux' for a device" in text


# -- register --------------------------------------------------------------------------------------------


class RegisteredBackend(CpuBackend):
    name = "registered"


def test_a_registered_backend_is_found_until_it_is_taken_back():
    _registry.register("registered", RegisteredBackend)
    try:
        assert devstream.backend(name="registered") is devstream.backend(name="registered")
        assert "registered" in _registry.names()
    finally:
        _registry.unregister("registered")
    with pytest.raises(BackendNotFoundError):
        devstream.backend(name="registered")


@pytest.mark.parametrize("name", ["cpu", "registered"])
def test_registering_a_taken_name_is_an_error_that_names_both(registered, name):
    registered("registered", RegisteredBackend)
    with pytest.raises(BackendConflictError) as caught:
        _registry.register(name, partial(RegisteredBackend))
    assert caught.value.first
    assert "partial" in caught.value.second


def test_taking_back_what_was_never_registered_is_an_error_and_leaves_the_built_in_alone():
    cpu = devstream.backend("cpu")
    for name in ("cpu", "registered"):
        with pytest.raises(BackendNotFoundError, match="unregister"):
            _registry.unregister(name)
    assert devstream.backend("cpu") is cpu
    assert devstream.backend(name="cpu") is cpu


def test_a_registered_factory_goes_the_same_way_as_a_plug_in(registered):
    registered("odd", dict)
    with pytest.raises(BackendLoadError, match=r"makes no devstream\.abc\.Backend but an object of dict"):
        devstream.backend(name="odd")

    def broken():
        raise OSError("no libquux")

    registered("broken", broken)
    with pytest.raises(BackendLoadError, match="OSError: no libquux"):
        devstream.backend(name="broken")


def test_a_chosen_backend_serves_its_device_type_inside_the_block_only(registered):
    registered("registered", RegisteredBackend)
    cpu = devstream.backend("cpu")
    with _registry.chosen("registered") as backend:
        assert devstream.backend("cpu") is backend
        assert isinstance(devstream.Stream("cpu"), type(backend.default_stream(0)))
    assert devstream.backend("cpu") is cpu


def test_a_choice_is_taken_back_after_an_exception(registered):
    registered("registered", RegisteredBackend)
    cpu = devstream.backend("cpu")
    with pytest.raises(KeyError), _registry.chosen("registered"):
        raise KeyError("work")
    assert devstream.backend("cpu") is cpu


def test_choosing_an_unknown_backend_changes_nothing():
    cpu = devstream.backend("cpu")
    with pytest.raises(BackendNotFoundError), _registry.chosen("nobody"):
        pass
    assert devstream.backend("cpu") is cpu


def test_choosing_an_unavailable_backend_changes_nothing(registered):
    class Unavailable(CpuBackend):
        name = "unavailable"

        def unavailable_reason(self):
            return "it is switched off"

    registered("unavailable", Unavailable)
    cpu = devstream.backend("cpu")
    with pytest.raises(BackendUnavailableError, match="it is switched off"), _registry.chosen("unavailable"):
        pass
    assert devstream.backend("cpu") is cpu


def test_threads_that_ask_at_once_get_one_backend(registered):
    made = []

    class Counted(CpuBackend):
        name = "counted"

        def __init__(self):
            made.append(self)
            super().__init__()

    registered("counted", Counted)
    start = threading.Barrier(8)
    found = []

    def ask():
        start.wait()
        found.append(devstream.backend(name="counted"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert found == made * 8


def test_a_built_in_is_a_backend_of_its_own_name():
    backend = devstream.backend(name="cpu")
    assert isinstance(backend, Backend)
    assert backend.name == "cpu"


# -- others' code and our locks ---------------------------------------------------------------------------

SLOW = """
import __main__, devstream
__main__.importing.set()
assert __main__.loading.wait(30)
# All of these would wait for the thread that waits for this very import, if that one held a lock of ours.
__main__.found += [
    devstream.Stream("cpu").query(),
    devstream.backend(name="cpu").name,
    devstream.backend(name="other").name,
    devstream.current_stream() is not None,
    devstream.named_stream("purpose", "cpu").query(),
]
"""
AT_IMPORT = """
import __main__
__main__.loading.set()
import quux_slow
from devstream.backends.cpu import CpuBackend

class QuuxBackend(CpuBackend):
    name = "quux"
"""
IN_METHOD = """
from devstream.backends.cpu import CpuBackend

class QuuxBackend(CpuBackend):
    name = "quux"
    def {method}(self, *args, **kwargs):
        import __main__
        if not __main__.asked:
            __main__.asked.append(True)
            __main__.loading.set()
            import quux_slow
        return super().{method}(*args, **kwargs)
"""


@pytest.mark.parametrize("variable", ["", "quux"])
@pytest.mark.parametrize(
    "source",
    [AT_IMPORT, *(IN_METHOD.format(method=m) for m in ("__init__", "unavailable_reason", "create_stream"))],
    ids=["import", "constructor", "unavailable_reason", "create_stream"],
)
def test_a_plug_in_that_waits_for_an_import_of_another_thread_holds_no_lock_of_ours(site, source, variable):
    site.install("quux-pack", {"quux": "quux_pack:QuuxBackend"}, quux_pack=source, quux_slow=SLOW)
    site.install("other-pack", {"other": "other_pack:QuuxBackend"}, other_pack=GOOD.format(name="other"))
    program = """
        import os, threading
        from devstream import _registry
        importing, loading, found, asked = threading.Event(), threading.Event(), [], []

        def load():
            assert importing.wait(30)
            with _registry.chosen("quux") as backend:
                devstream.named_stream("purpose", "cpu")
            found.append(backend.name)

        def run(work):
            try:
                work()
            except BaseException as error:
                found.append(repr(error))

        works = (lambda: __import__("quux_slow"), load)
        threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        answer([any(thread.is_alive() for thread in threads), found])
        sys.stdout.flush()
        os._exit(0)  # threads that wait for ever would keep the process
    """
    stuck, found = site.run(program, DEVSTREAM_BACKEND=variable)
    assert not stuck
    if source is AT_IMPORT and variable:
        # The module asks for the backend whose import waits for that very module: Python sees the circle.
        assert "quux" in found
        assert all(one == "quux" or "BackendLoadError" in str(one) for one in found)
    else:
        assert sorted(map(str, found)) == ["True", "True", "True", "cpu", "other", "quux"]


# -- plug-ins that say nonsense ----------------------------------------------------------------------------


class Typed(CpuBackend):
    name = "typed"
    device_type = "meta"  # some type of torch's that nobody else serves


@pytest.mark.parametrize("error", [OSError("no libquux"), SystemExit(3), KeyError("quux")])
@pytest.mark.parametrize("ask", ["device", "carry_streams"])
def test_a_device_count_that_raises_is_an_error_that_names_the_backend(registered, error, ask):
    class Broken(Typed):
        def device_count(self):
            raise error

    registered("meta", Broken)
    call = {"device": lambda: devstream.Stream("meta:0"), "carry_streams": devstream.carry_streams}[ask]
    if ask == "carry_streams":
        devstream.backend("meta")
    with pytest.raises(BackendUnavailableError, match=r"'typed'.*device_count\(\) raised") as caught:
        call() if ask == "device" else call(print)
    assert type(error).__name__ in str(caught.value)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("count", [None, -1, True, 2.0, "two"])
def test_a_device_count_that_is_no_count_is_told(registered, count):
    class Odd(Typed):
        def device_count(self):
            return count

    registered("meta", Odd)
    with pytest.raises(BackendUnavailableError, match=f"'typed'.*says that it has {count!r} devices"):
        devstream.Stream("meta:0")


def test_an_index_of_a_backend_without_devices_gets_an_advice_that_can_be_followed(registered):
    class Empty(Typed):
        def device_count(self):
            return 0

    registered("meta", Empty)
    with pytest.raises(DeviceMismatchError, match=r"has 0 device\(s\); use another device") as caught:
        devstream.Stream("meta:0")
    assert "-1" not in str(caught.value)


@pytest.mark.parametrize("name", [3, "", None, b"quux", ["quux"]])
def test_a_backend_is_registered_by_a_name_only(name):
    with pytest.raises(StreamTypeError, match=r"register\(name\) takes a non-empty str"):
        _registry.register(name, RegisteredBackend)


@pytest.mark.parametrize("factory", [None, 3, "package:Class"])
def test_what_cannot_be_called_is_not_registered(factory):
    with pytest.raises(StreamTypeError, match=r"register\(factory\) takes a callable"):
        _registry.register("x", factory)
    assert "x" not in _registry.names()


@pytest.mark.parametrize("name", [3, b"cpu", ["cpu"], object()])
def test_a_name_that_is_no_text_is_a_type_error_with_a_text(name):
    with pytest.raises(StreamTypeError, match="a backend's name takes a str"):
        devstream.backend(name=name)
    with pytest.raises(StreamTypeError), _registry.chosen(name):
        pass
    with pytest.raises(BackendNotFoundError, match="unregister"):
        _registry.unregister(name)


def test_the_text_of_an_error_about_a_name_never_raises():
    assert "no backend for '3'" in str(BackendNotFoundError(wanted=3, known=["cpu"], decided_by="name="))


def test_a_backend_of_another_device_type_than_it_was_found_under_is_refused_with_both(registered):
    registered("meta", RegisteredBackend)
    with pytest.raises(BackendUnavailableError, match=r"device type 'meta'.*device_type is 'cpu'"):
        devstream.Stream("meta")
    assert devstream.backend(name="meta").device_type == "cpu"  # by its name it may be used


def test_a_plug_in_that_leaves_at_its_import_is_a_broken_one(site):
    site.install("quux-pack", {"quux": "quux_pack:QuuxBackend"}, quux_pack="import sys\nsys.exit('no licence')")
    kind, text = site.run("answer(error(lambda: devstream.backend(name='quux')))")
    assert kind == "BackendLoadError"
    assert "SystemExit: no licence" in text
    assert "quux-pack" in text


@pytest.mark.parametrize("what", ["OSError('no libquux')", "SystemExit(3)"])
def test_a_plug_in_whose_reason_raises_is_unavailable(site, what):
    source = GOOD.format(name="quux") + f"    def unavailable_reason(self): raise {what}\n"
    site.install("quux-pack", {"quux": "quux_pack:QuuxBackend"}, quux_pack=source)
    program = """
        raised = error(lambda: devstream.backend(name="quux"))
        devstream.Stream("cpu")
        answer(raised)
    """
    kind, text = site.run(program)
    assert kind == "BackendUnavailableError"
    assert "'quux'" in text
    assert f"unavailable_reason() raised {what.partition('(')[0]}" in text
