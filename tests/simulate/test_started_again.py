"""A pytest that starts itself again for a simulated GPU is the pytest that was started.

Run with ``torchmem simulate --gpu H100x2 -- pytest``; most programs here do not load torch.
"""

import signal
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("gpu")]

PLAIN = ("-p", "no:asyncio", "-p", "no:cacheprovider")
OPTION = "--torchmem-simulate=L4"
SEES_L4 = "import os\n\ndef test_it(): assert os.environ['TORCHMEM_SIMULATED'] == 'L4'"


@pytest.fixture(autouse=True)
def _interruptible():
    """A job that a shell started in the background ignores SIGINT, and so would what it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_debugger_reads_from_the_same_terminal(pytester):
    pytester.makepyfile("def test_it():\n    found = 41\n    assert found == 42")
    run = pytester.run(
        *(sys.executable, "-m", "pytest", OPTION, *PLAIN, "--pdb"), stdin=b"p found + 1\nq\n"
    )
    run.stdout.fnmatch_lines(["*(Pdb) 42*"])
    assert run.ret == pytest.ExitCode.INTERRUPTED


@pytest.mark.parametrize(
    ("body", "arguments", "code"),
    [
        ("def test_it(): pass", (), pytest.ExitCode.OK),
        ("def test_it(): assert 0", (), pytest.ExitCode.TESTS_FAILED),
        ("", (), pytest.ExitCode.NO_TESTS_COLLECTED),
        ("", ("--no-such-option",), pytest.ExitCode.USAGE_ERROR),
        (
            "import os, signal\ndef test_it(): os.kill(os.getpid(), signal.SIGINT)",
            (),
            pytest.ExitCode.INTERRUPTED,
        ),
        ("import os\ndef test_it(): os._exit(77)", (), 77),
    ],
    ids=["passes", "fails", "none", "usage", "interrupted", "left"],
)
def test_exit_codes_are_those_of_pytest(pytester, body, arguments, code):
    pytester.makepyfile(body)
    assert pytester.runpytest_subprocess(OPTION, *PLAIN, *arguments).ret == code


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("import sys; sys.exit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
    ],
)
def test_a_command_ends_as_it_would_alone(program, code):
    started = [sys.executable, "-m", "pytest_torchmem", "simulate", "--", sys.executable, "-c"]
    done = subprocess.run([*started, program], capture_output=True, check=False)
    assert done.returncode == code


def test_output_comes_once_and_in_order(pytester):
    pytester.makepyfile("def test_it(): print('first'); print('second')")
    run = pytester.runpytest_subprocess(OPTION, *PLAIN, "-s")
    lines = run.outlines
    assert [sum(word in line for line in lines) for word in ("first", "second")] == [1, 1]
    run.stdout.fnmatch_lines(["*test session starts*", "*first*", "second*", "*1 passed*"])


def test_an_ini_file_and_a_variable_name_the_gpu(pytester, monkeypatch):
    pytester.makepyfile(SEES_L4)
    monkeypatch.setenv("TORCHMEM_SIMULATE", "L4")
    assert pytester.runpytest_subprocess(*PLAIN).ret == pytest.ExitCode.OK
    monkeypatch.delenv("TORCHMEM_SIMULATE")
    pytester.makeini("[pytest]\ntorchmem_simulate = L4")
    assert pytester.runpytest_subprocess(*PLAIN).ret == pytest.ExitCode.OK


def test_without_the_plugin_nothing_starts_again(pytester, monkeypatch):
    monkeypatch.setenv("TORCHMEM_SIMULATE", "L4")
    pytester.makepyfile(SEES_L4.replace("==", "!="))
    # Inner runs load the plugin by the name of its module, too.
    without = ("-p", "no:torchmem", "-p", "no:pytest_torchmem.plugin.hooks")
    assert pytester.runpytest_subprocess(*PLAIN, *without).ret == pytest.ExitCode.OK


def test_simulated_and_measured_baselines_meet_only_when_asked(pytester):
    pytester.makepyfile(
        """
        import pytest, torch

        @pytest.mark.memory_baseline
        def test_it():
            torch.empty(4 << 20, dtype=torch.uint8, device="cuda")
        """
    )
    on_cuda = (OPTION, *PLAIN, "-otorchmem_device=cuda")
    update = pytester.runpytest_subprocess(*on_cuda, "--torchmem-update-baseline")
    assert update.ret == pytest.ExitCode.OK
    (written,) = pytester.path.rglob("*.json")
    environment = written.parent
    assert environment.name.startswith("simulated-l4")
    measured = environment.name.replace("simulated", "nvidia")
    environment.rename(environment.with_name(measured))
    strict = (*on_cuda, "-otorchmem_require_baseline=true")
    assert pytester.runpytest_subprocess(*strict).ret == pytest.ExitCode.TESTS_FAILED
    asked = pytester.runpytest_subprocess(*strict, f"--torchmem-baseline-from={measured}")
    assert asked.ret == pytest.ExitCode.OK
    asked.stdout.fnmatch_lines([f"*{measured}*"])
