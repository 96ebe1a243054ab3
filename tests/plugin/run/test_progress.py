"""Progress of long work."""

from types import SimpleNamespace

import pytest

from pytest_torchmem.plugin.run.updates import progress


class Reporter:
    def __init__(self, isatty=True, verbosity=0):
        self.isatty, self.verbosity, self.lines = isatty, verbosity, []

    def rewrite(self, text, erase=False):
        assert erase or not text
        self.lines.append(text)


def watched(reporter, count, step_s):
    ticks = iter(i * step_s for i in range(10_000))
    plugins = SimpleNamespace(get_plugin=lambda name: reporter)
    config = SimpleNamespace(pluginmanager=plugins)
    return list(progress(range(count), "baselines", config, clock=lambda: next(ticks)))  # type: ignore[arg-type]


def test_long_work_is_told_and_the_line_is_empty_again():
    reporter = Reporter()
    assert watched(reporter, 30, 0.1) == list(range(30))
    assert reporter.lines[0] == "baselines: 9 of 30"
    assert reporter.lines[-1] == ""


def test_it_is_not_told_more_often_than_can_be_read():
    reporter = Reporter()
    watched(reporter, 3000, 0.001)
    assert 15 <= len(reporter.lines) <= 23


@pytest.mark.parametrize(
    "reporter", [Reporter(isatty=False), Reporter(verbosity=-1), None], ids=["log", "-q", "none"]
)
def test_elsewhere_nothing_is_written(reporter):
    assert watched(reporter, 30, 1) == list(range(30))
    assert reporter is None or reporter.lines == []


def test_short_work_is_not_told():
    reporter = Reporter()
    watched(reporter, 9, 0.1)
    assert reporter.lines == []


def test_what_goes_wrong_still_leaves_an_empty_line():
    reporter = Reporter()
    ticks = iter(range(100))
    plugins = SimpleNamespace(get_plugin=lambda name: reporter)
    config = SimpleNamespace(pluginmanager=plugins)
    items = progress(range(9), "baselines", config, clock=lambda: next(ticks))  # type: ignore[arg-type]
    next(items)
    next(items)
    with pytest.raises(OSError, match="full"):
        items.throw(OSError("full"))  # type: ignore[attr-defined]
    assert reporter.lines[-1] == ""
