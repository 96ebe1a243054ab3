"""A program chooses its names freely: no output takes one for markup, a command or a colour."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from pytest_torchmem.report.history import history_page, history_plots, history_table
from pytest_torchmem.report.page.html import run_page
from pytest_torchmem.report.page.svg import marks_of, timeline_svg
from pytest_torchmem.report.text.github import error_commands, line_commands, shrunk_commands
from pytest_torchmem.report.text.markdown import run_markdown, step_summary
from pytest_torchmem.report.text.terminal import Detail, failure_text, summary_lines
from pytest_torchmem.store.acceptances import Acceptance
from pytest_torchmem.store.run_reports import RunReport
from pytest_torchmem.values.baseline import Change
from pytest_torchmem.values.contributors import Source
from pytest_torchmem.values.findings import Finding, FindingKind
from pytest_torchmem.values.measured import Window
from pytest_torchmem.values.results import Fate, Holder
from pytest_torchmem.values.trace import Trace
from pytest_torchmem.values.units import MiB
from tests.report.sample_run import report_of, window

NAMES = st.text(
    st.one_of(
        st.sampled_from(["\n", "\r", "\x1b", "\x07", "\0", ":", " ", "|", "<", "\u202e", "\u2028"]),
        st.characters(codec="utf-8"),
    ),
    min_size=1,
    max_size=12,
).map(lambda name: f"\n::warning::{name}")
_ORDERS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_COMMAND = re.compile(r"^\s*::", re.MULTILINE)


def named(name: str) -> RunReport:
    """A failed run whose test, region, operator, module, line, holder and remarks have a name."""
    failed = window("test_a", Change.GROWN, f"memory peaked in {name}", name=name)
    live = tuple(
        replace(c, operator=name, module=name, source=Source(name, 3, name), labels=(name,))
        for c in failed.result.peak.live
    )
    result = replace(
        failed.result,
        peak=replace(failed.result.peak, live=live),
        retained=replace(
            failed.result.retained, live=live, holders=(Holder(MiB, 1, Fate.HELD, name),)
        ),
        notes=(name,),
        blind_spots=(name,),
        failed_passes=(name,),
    )
    (finding,) = failed.findings
    failed = replace(failed, result=result, findings=(replace(finding, causes=live),))
    shrunk = window("test_b", Change.SHRUNK, notes=(name,))
    return RunReport(
        tests=(
            report_of(name, failed, outcome="failed"),
            report_of(f"b{name}", replace(shrunk, notice=name)),
            report_of("unseen", not_measured=name),
            report_of("raised", raised=name, outcome="failed"),
        ),
        versions={"torch": name},
        commit=name,
        problems=(name,),
    )


def is_quiet(text: str) -> bool:
    return not _ORDERS.search(text)


@given(NAMES)
def test_names_of_a_recording_are_printable(name):
    for told in (*Trace(strings=(name,)).strings, str(Holder(1, 1, Fate.HELD, name))):
        assert is_quiet(told)
        assert "\n" not in told


def test_a_printable_name_stays_as_it_is():
    names = ("model.layers.*.norm", "größe|`<b>`", "層", "a b")
    assert Trace(strings=names).strings == names


@given(NAMES, st.sampled_from([40, 80, 10_000]))
def test_a_terminal_is_told_nothing_to_do(name, width):
    run = named(name)
    for detail in Detail:
        for line in summary_lines(run, detail, width, width):
            assert is_quiet(line.text)
            assert not _COMMAND.search(line.text)
            assert "\n" not in line.text
    result = run.tests[0].windows[0].result
    over = Finding(FindingKind.OVER_LIMIT, "retained", f"retained {name}", 1, cause=name)
    text = failure_text([Window(result, (over,))], name, "pytest x", {}, width)
    assert is_quiet(text)
    assert not _COMMAND.search(text)


@given(NAMES)
def test_an_annotation_is_one_command(name):
    run = named(name)
    errors, warnings = error_commands(run), line_commands(run, {name: name})
    assert (len(errors), len(warnings), len(shrunk_commands(run))) == (1, 1, 1)
    for command in (*errors, *warnings, *shrunk_commands(run)):
        assert is_quiet(command)
        assert "\n" not in command
        # A reader of commands splits at the second pair of colons.
        properties = command.split("::")[1]
        assert re.fullmatch(r"(error|warning|notice) [^:]*", properties)


@given(NAMES)
def test_pages_have_no_control_characters(name):
    run = named(name)
    body = run.tests[0].windows[0]
    assert body.picture
    accepted = Acceptance(name, name, Change.UNUSED, None, None, name, name, "2026-03-01", name)
    outputs = [
        run_page(run),
        run_markdown(run),
        step_summary(run),
        timeline_svg(body.picture, name, marks_of(body)),
        history_page([accepted]),
        *history_table([accepted]),
        *history_plots([accepted], plain=True),
    ]
    assert [found for text in outputs for found in _ORDERS.findall(text)] == []


PROGRAM = r"""
import pytest, torch
from torch import nn

Odd = type("Odd\n::error::c\x1b[31m", (nn.Module,), {"forward": lambda self, x: x.tanh()})

class Top(nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module("a|`<b>\n::warning::w\x1b]0;t\x07", Odd())
    def forward(self, x):
        return next(self.children())(x)

@pytest.mark.memory_budget("1KiB", retained="0B")
def test_names():
    global KEEP
    with torch.profiler.record_function("\x1b[2J\n::error file=x::label</script>"):
        KEEP = {"\x1b[31m\n::error::k": Top()(torch.ones(1 << 18, requires_grad=True))}
"""


def test_a_module_with_a_hostile_name_reaches_no_output_raw(pytester, monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(pytester.path / "step.md"))
    pytester.makepyfile(test_names=PROGRAM)
    arguments = ("--torchmem-report=out", "--junitxml=junit.xml")
    result = pytester.runpytest_subprocess(*arguments, "-p", "no:cacheprovider")
    result.assert_outcomes(failed=1)
    files = [p for p in pytester.path.joinpath("out").rglob("*") if p.suffix in (".html", ".md")]
    texts = [p.read_text("utf-8") for p in (*files, pytester.path / "step.md")]
    junit = ElementTree.parse(pytester.path / "junit.xml")
    texts += [text for element in junit.iter() if (text := element.get("message"))]
    assert len(texts) >= 5
    for text in (*texts, *result.outlines):
        assert is_quiet(text), text
    told = [line for line in result.outlines if line.lstrip().startswith("::")]
    assert all(line.startswith("::error file=test_names.py,line=") for line in told)
    assert any(r"in Top.a|`<b>\n::warning::w\x1b]0;t\x07" in line for line in result.outlines)
