"""The markers of one test as values, checked when the test is collected."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

import pytest

from pytest_torchmem.plugin.options.option_table import BASELINE, BUDGET, uses_fixture
from pytest_torchmem.plugin.options.settings import checked_device_name
from pytest_torchmem.plugin.run.workers import plain_nodeid
from pytest_torchmem.plugin.stash import BAD_ARGUMENT, RUN
from pytest_torchmem.values import findings
from pytest_torchmem.values.baseline import Allowance
from pytest_torchmem.values.errors import DeviceNameError, MarkerError, is_torchmem_error
from pytest_torchmem.values.findings import LIMIT_KEYS, Size, SizeByDevice
from pytest_torchmem.values.json_values import shown
from pytest_torchmem.values.units import MOST_RUNS, device_text, is_run_count

__tracebackhide__ = is_torchmem_error

_BUDGET_KEYS: Final = (*LIMIT_KEYS, "device", "warmup", "collect")
_BASELINE_KEYS: Final = ("tolerance", "floor")


@dataclass(frozen=True, slots=True)
class Demands:
    """The requests of the markers of one test.

    Attributes:
        limits: Sizes by limit key, not yet computed where a callable was given, nor chosen where
            each device has its own.
        baseline: Compare with the stored baseline.
        allowance: How far from the baseline a number may be.
        device: Where to measure; ``""`` means wherever the run does.
        warmup: How often the body runs before the run that is measured.
        least_bytes: Where the run and no marker asks for a baseline, the smallest peak that is
            compared; 0 where a marker asks.
        collect: Garbage is collected before and after the body, and is not retained.
    """

    limits: Mapping[str, Size | SizeByDevice]
    baseline: bool
    allowance: Allowance
    device: str = ""
    warmup: int = 0
    collect: bool = False
    least_bytes: int = 0

    @property
    def anything(self) -> bool:
        """True where a marker asks, not only the run."""
        return bool(self.limits) or (self.baseline and not self.least_bytes)

    @property
    def differs_by_device(self) -> bool:
        """True while the limits of the device that is measured have to be chosen: `on_device`."""
        return any(isinstance(size, Mapping) for size in self.limits.values())

    def on_device(self, *names: str) -> Demands:
        """Return what is asked on a device. Raises `MarkerError` where it has no limit."""
        return replace(self, limits=findings.limits_on(BUDGET, self.limits, names))

    def sizes(self) -> dict[str, int]:
        """Return the limits in bytes; callables are called. Raises `MarkerError` if one fails."""
        return findings.sizes_now(BUDGET, findings.limits_on(BUDGET, self.limits, ()))


DEMANDS: Final[pytest.StashKey[tuple[list[pytest.Mark], Demands]]] = pytest.StashKey()
"""Of a test: the markers that were read, and what they ask for."""


def read_markers(item: pytest.Item, defaults: Allowance) -> Demands:
    """Return what the markers of ``item`` ask for; the closest marker wins for each key.

    Raises `MarkerError` with a sentence about the first argument that cannot be used.
    """
    budget: dict[str, object] = {}
    for mark in closest_first(item, BUDGET):
        budget = {**_budget_arguments(mark), **budget}
    comparison: dict[str, object] = {}
    marks = list(closest_first(item, BASELINE))
    for mark in marks:
        if mark.args:
            raise MarkerError(f"{BASELINE} takes keywords only, got {shown(mark.args[0])}")
        findings.require_known(BASELINE, mark.kwargs, _BASELINE_KEYS)
        comparison = {**mark.kwargs, **comparison}
    others = {key: budget.pop(key, None) for key in ("device", "warmup", "collect")}
    collect = False if others["collect"] is None else others["collect"]
    tolerance, floor = comparison.get("tolerance"), comparison.get("floor")
    demands = Demands(
        limits=findings.read_limits(BUDGET, budget),
        baseline=bool(marks),
        allowance=findings.read_allowance(BASELINE, tolerance, floor, defaults),
        device=_device(others["device"]),
        warmup=_warmup(item, 0 if others["warmup"] is None else others["warmup"]),
        collect=bool(collect),
    )
    if not isinstance(collect, bool):
        raise MarkerError(f"{BUDGET}, collect: {shown(collect)} is not True or False")
    is_empty = (budget or any(others.values())) and not demands.anything
    if is_empty and None not in budget.values() and not uses_fixture(item):
        text = "sets a device, a warm-up or collect, and no marker sets a limit"
        raise MarkerError(f"{BUDGET} {text}")
    return demands


def demands_of(item: pytest.Item) -> Demands:
    """Return what the markers and the run ask of a test; read again where a fixture adds a marker.

    Raises pytest's failure for a marker that cannot be read.
    """
    marks = _memory_marks(item)
    cached = item.stash.get(DEMANDS, None)
    if cached is not None and cached[0] == marks:
        return cached[1]
    settings = item.config.stash[RUN].settings
    with bad_argument_fails(item):
        demands = read_markers(item, settings.allowance)
    if settings.baseline_all_bytes and not demands.baseline and isinstance(item, pytest.Function):
        demands = replace(demands, baseline=True, least_bytes=settings.baseline_all_bytes)
    item.stash[DEMANDS] = marks, demands
    return demands


def has_new_marks(item: pytest.Item) -> bool:
    """Return whether a test has other markers than those that were read."""
    return _memory_marks(item) != (item.stash[DEMANDS][0] if DEMANDS in item.stash else [])


def _memory_marks(item: pytest.Item) -> list[pytest.Mark]:
    return [mark for mark in item.iter_markers() if mark.name in (BUDGET, BASELINE)]


@contextlib.contextmanager
def bad_argument_fails(item: pytest.Item) -> Iterator[None]:
    """Fail a test whose markers cannot be used."""
    try:
        yield
    except MarkerError as error:
        item.stash[BAD_ARGUMENT] = True
        raise pytest.fail.Exception(f"{plain_nodeid(item)}: {error}", pytrace=False) from None


def argument_problem(item: pytest.Item) -> str:
    """Return what is wrong with the arguments of a test's markers; ``""`` when nothing is."""
    try:
        read_markers(item, item.config.stash[RUN].settings.allowance)
    except MarkerError as error:
        return f"{plain_nodeid(item)}: {error}"
    return ""


def closest_first(item: pytest.Item, name: str) -> Iterator[pytest.Mark]:
    """Yield the marks of one name, the one that a reader would call closest to the test first.

    `pytest.Item.iter_markers` puts a function's decorators before the marks of `pytest.param` and
    a base class before the classes derived from it; both are the other way round here.
    """
    for node in reversed(item.listchain()):
        marks = [mark for mark in node.own_markers if mark.name == name]
        if isinstance(node, pytest.Class):
            bases = (base.__dict__.get("pytestmark", []) for base in node.obj.__mro__)
            by_base = chain.from_iterable(map(_plain_marks, bases))
            distance = {id(mark): at for at, mark in enumerate(by_base)}
            marks.sort(key=lambda mark: distance.get(id(mark), -1))
        callspec = getattr(node, "callspec", None)
        if callspec is not None:
            of_param = {id(mark) for mark in _plain_marks(callspec.marks)}
            marks.sort(key=lambda mark: id(mark) not in of_param)
        yield from marks


def _plain_marks(marks: object) -> Iterator[pytest.Mark]:
    """Yield the marks of a ``pytestmark`` value: one mark or decorator, or several."""
    for mark in marks if isinstance(marks, list | tuple) else [marks]:
        if isinstance(mark, pytest.MarkDecorator):
            yield mark.mark
        elif isinstance(mark, pytest.Mark):
            yield mark


def _budget_arguments(mark: pytest.Mark) -> dict[str, object]:
    if len(mark.args) > 1:
        raise MarkerError(
            f"{BUDGET} takes one positional argument, the limit of the whole peak; "
            f"got {len(mark.args)}"
        )
    given = mark.kwargs
    findings.require_known(BUDGET, given, _BUDGET_KEYS)
    if mark.args and "total" in given:
        raise MarkerError(
            f"{BUDGET} got the total twice: {shown(mark.args[0])} and {shown(given['total'])}"
        )
    if not mark.args and not given:
        raise MarkerError(f"{BUDGET} needs a limit, such as {BUDGET}('2GiB')")
    return {"total": mark.args[0], **given} if mark.args else {**given}


def _device(value: object) -> str:
    if value is None:
        return ""
    try:
        return checked_device_name(device_text(value))
    except MarkerError as error:
        raise MarkerError(f"{BUDGET}, {error.sentence}") from None
    except DeviceNameError as error:
        raise MarkerError(f"{BUDGET}, device: {error.sentence}") from None


def _warmup(item: pytest.Item, value: object) -> int:
    if not isinstance(value, int) or not is_run_count(value, 0):
        raise MarkerError(
            f"{BUDGET}, warmup: {shown(value)} is not a number of runs, 0 to {MOST_RUNS:,}"
        )
    if value and not can_rerun(item):
        raise MarkerError(
            f"{BUDGET}, warmup: the body of a {type(item).__name__} cannot be run twice by the "
            "plugin; warm up inside the test, for instance with torchmem.steps(n, warmup=1)"
        )
    return value


def can_rerun(item: pytest.Item) -> bool:
    """True where calling the body again is all that a second run needs.

    A TestCase's run includes its setUp and tearDown and reports into the item as it goes; the
    namespace of a doctest has been changed by its first run.
    """
    if not isinstance(item, pytest.Function):
        return False
    import unittest  # pytest itself gets by without it until there is a TestCase

    owner = item.getparent(pytest.Class)
    return owner is None or not issubclass(owner.obj, unittest.TestCase)
