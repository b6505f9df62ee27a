"""What the options, the markers and the fixtures of the pytest plugin do."""

from __future__ import annotations

import pytest

SUITE = """
    import pytest

    def test_neutral(backend, device, stream):
        print("ran on", backend.name)
        assert stream.device.type == device.type

    @pytest.mark.cuda
    def test_cuda():
        pass

    @pytest.mark.stress
    def test_stress():
        pass

    def test_plain():
        pass
"""


@pytest.fixture
def suite(pytester, monkeypatch):
    monkeypatch.delenv("DEVSTREAM_BACKEND", raising=False)
    pytester.makepyfile(SUITE)

    def run(*options):
        # A process of its own: the registry reads DEVSTREAM_BACKEND once in a process.
        return pytester.runpytest_subprocess(
            "-p", "devstream.testing.plugin", "--strict-markers", "-rs", "-s", *options
        )

    return run


@pytest.fixture
def without_nvidia(monkeypatch):
    # Read by the driver when it starts, which the subprocess does afresh.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")


@pytest.mark.usefixtures("without_nvidia")
def test_missing_hardware_skips_with_the_reason(suite):
    result = suite()
    result.assert_outcomes(passed=2, skipped=3, deselected=1)
    result.stdout.fnmatch_lines(["*SKIPPED*backend 'cuda' can't run here*"])


@pytest.mark.usefixtures("without_nvidia")
def test_missing_hardware_that_is_required_stops_the_run(suite):
    result = suite("--require", "cuda")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--require cuda: *can't run here*"])
    result.stdout.no_fnmatch_line("*passed*")


@pytest.mark.usefixtures("without_nvidia")
@pytest.mark.parametrize("name", ["rocm", "accelerator", "multi_gpu", "no-such-thing"])
def test_every_name_can_be_required(suite, name):
    result = suite("--require", "distributed", "--require", name)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*--require {name}: *"])


def test_what_is_there_may_be_required(suite):
    suite("--require", "cpu", "--require", "distributed", "-k", "plain").assert_outcomes(passed=1)


def test_backend_restricts_the_fixture(suite):
    result = suite("--backend", "cpu", "-k", "neutral")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*ran on cpu*"])


@pytest.mark.parametrize("name", ["no-such-backend", "cdua"])
def test_a_backend_that_does_not_exist_stops_the_run(suite, name):
    result = suite("--backend", name)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{name}*known backends*"])


@pytest.mark.usefixtures("without_nvidia")
def test_a_backend_that_was_asked_for_and_cannot_run_stops_the_run(suite):
    result = suite("--backend", "cpu", "--backend", "cuda")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*'cuda' was asked for*can't run here*"])


def test_the_environment_restricts_the_fixture(suite, monkeypatch):
    monkeypatch.setenv("DEVSTREAM_BACKEND", "cpu")
    suite("-k", "neutral").assert_outcomes(passed=1)


@pytest.mark.usefixtures("without_nvidia")
def test_the_environment_is_held_to_its_word(suite, monkeypatch):
    monkeypatch.setenv("DEVSTREAM_BACKEND", "rocm")
    result = suite()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*'rocm' was asked for*"])


def test_zero_selected_backends_is_an_error(suite, monkeypatch):
    monkeypatch.setenv("DEVSTREAM_BACKEND", "rocm")
    result = suite("--backend", "cpu")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*no backend is selected*--backend cpu*DEVSTREAM_BACKEND=rocm*"])


def test_stress_tests_run_only_when_the_expression_names_them(suite):
    suite("-m", "stress").assert_outcomes(passed=1)


def test_a_class_with_a_backend_of_its_own_is_not_multiplied(suite, pytester):
    pytester.makepyfile(
        test_own="""
        import pytest

        class TestMine:
            @pytest.fixture
            def backend(self):
                return "mine"

            def test_mine(self, backend):
                assert backend == "mine"
        """
    )
    suite("-k", "mine").assert_outcomes(passed=1)


def test_the_backend_is_chosen_for_the_process(suite, pytester):
    pytester.makepyfile(
        test_own="""
        import devstream

        def test_chosen(backend, recorder, latch):
            assert devstream.backend() is backend
            side = devstream.Stream()
            with latch(side) as held:
                event = side.record_event()
                assert not event.query()
                held.release()
                assert event.query()
            assert [type(notice).__name__ for notice in recorder.log] == ["Record", "Happened"]
        """
    )
    suite("--backend", "cpu", "-k", "test_chosen").assert_outcomes(passed=1)


def test_the_plugin_is_loaded_only_on_request(pytester):
    pytester.makepyfile(
        """
        def test_plain(pytestconfig):
            assert not pytestconfig.pluginmanager.has_plugin("devstream.testing.plugin")
        """
    )
    pytester.runpytest_subprocess().assert_outcomes(passed=1)


def test_the_race_checker_runs_by_option_and_by_marker(suite, pytester):
    pytester.makepyfile(
        test_races="""
        import pytest, torch, devstream

        def racy():
            x = torch.ones(4)
            side = devstream.Stream("cpu")
            with devstream.stream(side):
                y = x * 2
            return x, y

        def test_plain():
            racy()

        @pytest.mark.racecheck
        def test_marked():
            racy()

        @pytest.mark.racecheck(False)
        def test_left_out():
            racy()

        @pytest.mark.racecheck(on_race="collect")
        def test_with_options():
            racy()
        """
    )
    suite("-k", "test_races.py").assert_outcomes(passed=3, failed=1)
    result = suite("-k", "test_races.py", "--racecheck")
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(["*RaceError: 1 race found*", "*read before write*"])
