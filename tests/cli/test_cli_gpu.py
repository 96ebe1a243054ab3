"""``torchmem fits`` and ``torchmem reserved``: what they print and what they end with."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pytest_torchmem.cli.main import Exit, main
from pytest_torchmem.values.units import MiB
from tests.builders import TraceBuilder


@pytest.fixture
def trace(tmp_path):
    """30 MiB and 20 MiB that live together, on the CPU."""
    b = TraceBuilder()
    b.alloc(30 * MiB)
    b.alloc(20 * MiB)
    path = tmp_path / "step.npz"
    b.build().save(path)
    return str(path)


def test_a_trace_that_fits_is_a_success_and_a_sentence(trace, capsys):
    assert main(["fits", trace, "--capacity", "64MiB"]) == Exit.OK
    told = capsys.readouterr().out
    assert told == "fits in 64.0 MiB with 14.0 MiB to spare; fragmentation 0% (estimated)\n"


def test_a_trace_that_does_not_fit_ends_with_one(trace, capsys):
    assert main(["fits", trace, "--capacity", "48MiB"]) == Exit.DOES_NOT_FIT == 1  # type: ignore[comparison-overlap]
    assert capsys.readouterr().out.startswith("does not fit in 48.0 MiB (estimated): ")


def test_one_trace_that_does_not_fit_decides(trace, tmp_path, capsys):
    b = TraceBuilder()
    b.alloc(MiB)
    b.build().save(tmp_path / "small.npz")
    small = str(tmp_path / "small.npz")
    assert main(["fits", small, small, "--capacity", "48MiB"]) == Exit.OK
    assert main(["fits", small, trace, small, "--capacity", "48MiB"]) == Exit.DOES_NOT_FIT
    assert f"{trace}: does not fit" in capsys.readouterr().out


def test_settings_change_the_answer(trace, capsys):
    arguments = ["fits", trace, "--capacity", "100MiB", "--settings"]
    assert main([*arguments, "per_process_memory_fraction:0.9"]) == Exit.OK
    assert main([*arguments, "per_process_memory_fraction:0.4"]) == Exit.DOES_NOT_FIT


def test_both_answers_as_json_say_that_they_are_estimated(trace, capsys):
    main(["fits", trace, "--capacity", "64MiB", "--format=json"])
    (fit,) = json.loads(capsys.readouterr().out)
    assert (fit["fits"], fit["estimated"], fit["reserved_bytes"]) == (True, True, 50 * MiB)
    main(["reserved", trace, "--format=json"])
    counters = json.loads(capsys.readouterr().out)
    assert (counters["estimated"], counters["requested_bytes"]) == (True, 50 * MiB)


def test_reserved_prints_each_counter_with_the_word_estimated(trace, capsys):
    assert main(["reserved", trace, "--settings=expandable_segments:True"]) == Exit.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "60.0 MiB  reserved (estimated)"
    assert all(line.endswith("(estimated)") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "slug"),
    [
        (["fits", "{trace}", "--capacity=24"], "bad-size"),
        (["fits", "{trace}", "--capacity=1GiB", "--settings=nonsense:1"], "bad-allocator-settings"),
        (["fits", "{trace}", "--capacity=1GiB", "--device=cuda:3"], "no-device"),
        (["reserved", "nowhere.npz"], "bad-trace"),
        (["reserved", "{trace}", "--settings=per_process_memory_fraction:0.5"], "bad-alloc"),
    ],
)
def test_bad_input_ends_with_two_and_a_sentence(arguments, slug, trace, capsys):
    assert main([text.format(trace=trace) for text in arguments]) == Exit.BAD_INPUT
    told = capsys.readouterr().err
    assert told.startswith("torchmem: ")
    assert f"[{slug}" in told


def test_the_command_needs_no_torch(trace):
    code = "import sys; sys.modules['torch'] = None; from pytest_torchmem.cli.main import main; "
    code += f"sys.exit(main(['fits', {trace!r}, '--capacity=1GiB']))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
