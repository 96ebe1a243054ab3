"""Runs torch's own tests of CUDA on a simulated GPU, and compares what fails with a list.

    python -m tools.torch_cuda_tests                    # fetches the tests of TESTS
    python -m tools.torch_cuda_tests --source FOLDER    # takes them from a checkout that is there
    python -m tools.torch_cuda_tests cuda fsdp -o PAGE  # some suites; writes the table to a page
    python -m tools.torch_cuda_tests --torch 2.10.0     # with another release of torch

The tests are torch's, and none of them is in this repository. `torch_cuda_tests.txt` beside this
file names each test that fails, and why. Another failure, and a listed test that passes or is
gone, end the run with exit code 1. Each test runs in a fork of its own, see `tools.alone`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Final

import torch

from tools.torch_tests import fetched

#: The release whose tests the list is of.
TESTS: Final = "2.6.0"
LIST: Final = Path(__file__).with_suffix(".txt")
#: Why a test on the list fails: the first word of its reason, and what the page says of it.
REASONS: Final = {
    "release": "the installed torch no longer does what the test asserts",
    "values": "values that a simulated GPU does not compute",
    "machine": "needs a network, a compiler, a driver or more memory",
    "simulation": "the simulated GPU is wrong",
    "open": "the cause is not known yet",
}


@dataclass(frozen=True, slots=True)
class Suite:
    """Tests of some files; each expression in ``chosen`` has a process of its own."""

    files: tuple[str, ...]
    chosen: tuple[str, ...] = ("",)
    gpu: str = "H100"
    timeout_s: int = 3600
    environment: Mapping[str, str] = field(default_factory=dict)


EXPANDABLE: Final = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
ONE_GRAPH: Final = {"TORCHINDUCTOR_GRAPH_PARTITION": "0", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
SUITES: Final = {
    "cuda": Suite(("test_cuda.py",)),
    "trace": Suite(("test_cuda_trace.py",)),
    "context": Suite(
        ("test_cuda_primary_ctx.py",),
        chosen=("test_copy", "test_pin_memory", "test_str_repr"),
        gpu="H100x2",
    ),
    "fsdp": Suite(
        (
            "distributed/fsdp/test_fsdp_memory.py",
            "distributed/_composable/fsdp/test_fully_shard_memory.py",
        ),
        gpu="H100x2",
    ),
    "optimizers": Suite(("test_optim.py",), chosen=("peak_memory or cuda_params",)),
    "inductor": Suite(("inductor/test_memory.py",)),
    "expandable": Suite(("test_cuda.py",), environment=EXPANDABLE),
    # 2.6 made one graph of a function; later releases make several unless they are told not to.
    "trees": Suite(("inductor/test_cudagraph_trees.py",), environment=ONE_GRAPH),
    "checkpointing": Suite(("functorch/test_ac.py",)),
}


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What became of the tests of a suite, by ``Class::test``."""

    passed: frozenset[str]
    failed: frozenset[str]
    skipped: frozenset[str]

    @classmethod
    def read(cls, report: Path) -> Outcomes:
        """Read a report of pytest's; a test is failed if any of its phases is."""
        found: dict[str, set[str]] = {"passed": set(), "failed": set(), "skipped": set()}
        for case in ElementTree.parse(report).iter("testcase"):
            kinds = {child.tag for child in case}
            outcome = "skipped" if "skipped" in kinds else "passed"
            outcome = "failed" if kinds & {"failure", "error"} else outcome
            module, _, owner = case.get("classname", "").rpartition(".")
            found[outcome].add(f"{owner if module else ''}::{case.get('name')}")
        failed = frozenset(found["failed"])
        return cls(frozenset(found["passed"]) - failed, failed, frozenset(found["skipped"]))


def listed(release: str, path: Path = LIST) -> dict[str, dict[str, str]]:
    """Return the reason of each test that is listed for a release of torch, by suite."""
    lists: dict[str, dict[str, str]] = {name: {} for name in SUITES}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            names, test, reason = line.split(maxsplit=2)
            suites, _, releases = names.partition("@")
            if reason.split(":")[0] not in REASONS:
                raise ValueError(f"{test}: no reason begins with {reason!r}")
            if not releases or release.rpartition(".")[0] in releases.split(","):
                lists |= {s: {**lists[s], test: reason} for s in suites.split(",")}
    return lists


def surprises(outcomes: Outcomes, reasons: Mapping[str, str]) -> Iterator[str]:
    """Yield what the list does not say of a suite."""
    for test in sorted(outcomes.failed - reasons.keys()):
        yield f"failed, and is not on the list: {test}"
    for test in sorted(reasons.keys() - outcomes.failed):
        became = "passed" if test in outcomes.passed else "did not run"
        yield f"{became}, and is on the list: {test}"


def run(name: str, tests: Path, release: str) -> Outcomes:
    """Run a suite on its simulated GPU. Raises `SystemExit` where a process leaves no report."""
    suite = SUITES[name]
    outcomes = []
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    added = {**suite.environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    for number, chosen in enumerate(suite.chosen):
        report = tests / f"{name}-{number}-{release}.xml"
        command = [sys.executable, "-m", "pytest_torchmem", "simulate", "--gpu", suite.gpu]
        command += ["--torch", release, "--", sys.executable, "-m", "pytest", "-q", "--tb=short"]
        command += ["-o", "addopts=", "-p", "tools.alone", f"--junitxml={report}"]
        command += [f"-pno:{plugin}" for plugin in ("torchmem", "cacheprovider", "logging")]
        command += ["-k", chosen] if chosen else []
        with (
            report.with_suffix(".log").open("wb") as log,
            contextlib.suppress(subprocess.TimeoutExpired),
        ):
            subprocess.run(
                [*command, *suite.files],
                cwd=tests,
                env={**os.environ, **added},
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=suite.timeout_s,
                check=False,
            )
        if not report.exists():
            print(report.with_suffix(".log").read_text(errors="replace")[-4000:])
            raise SystemExit(f"{name}: it ended without a report")
        outcomes.append(Outcomes.read(report))
    kinds = ((o.passed, o.failed, o.skipped) for o in outcomes)
    return Outcomes(*(frozenset().union(*kind) for kind in zip(*kinds, strict=True)))


Results = Mapping[str, Mapping[str, Outcomes]]
"""The outcomes of each suite, by release of torch."""


def page(results: Results) -> Iterator[str]:
    """Yield the lines of the page with what the suites reached."""
    yield "# torch's own tests on a simulated GPU\n"
    yield (
        f"The tests of torch {TESTS} on a simulated H100 (two for `context` and `fsdp`), "
        f"{date.today()}, each in a process of its own. "
        "Made by `python -m tools.torch_cuda_tests`.\n"
    )
    yield f"| torch | suite | tests | passed | skipped | {' | '.join(REASONS)} | not listed |"
    yield f"|---|---|{'--:|' * (len(REASONS) + 4)}"
    for release, suites in results.items():
        lists = listed(release)
        for name, outcomes in suites.items():
            reasons = lists[name]
            counts = Counter(reasons[t].split(":")[0] for t in outcomes.failed if t in reasons)
            unlisted = len(outcomes.failed - reasons.keys())
            passed, failed, skipped = map(len, (outcomes.passed, outcomes.failed, outcomes.skipped))
            total = passed + failed + skipped
            numbers = [total, passed, skipped, *(counts[r] for r in REASONS), unlisted]
            yield f"| {release} | {name} | {' | '.join(map(str, numbers))} |"
    yield "\nWhy tests fail; [the list](../../tools/torch_cuda_tests.txt) has each of them:\n"
    yield from (f"- *{reason}*: {meaning}" for reason, meaning in REASONS.items())


def main() -> int:
    """Run the suites, print the page and what is not as listed, and return 0 if all is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, help="a checkout of torch; default: fetch it")
    parser.add_argument("--torch", nargs="+", metavar="RELEASE", help="default: as installed")
    parser.add_argument("--keep", type=Path, help="a folder for reports and logs")
    parser.add_argument("-o", "--output", type=Path, help="write the page to a file")
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)}")
    options = parser.parse_args()
    results: dict[str, dict[str, Outcomes]] = {}
    wrong = False
    with tempfile.TemporaryDirectory(prefix="torch-tests-") as made:
        tests = Path(made, "test")
        source = options.source or fetched(Path(made, "torch"), TESTS, "test")
        shutil.copytree(source / "test", tests)
        for release in options.torch or [torch.__version__.partition("+")[0]]:
            results[release] = {}
            lists = listed(release)
            for name in options.suites or SUITES:
                results[release][name] = run(name, tests, release)
                if options.keep:
                    options.keep.mkdir(parents=True, exist_ok=True)
                    for written in tests.glob(f"{name}-*"):
                        shutil.copy(written, options.keep)
                for sentence in surprises(results[release][name], lists[name]):
                    wrong = True
                    print(f"{name}, torch {release}: {sentence}", flush=True)
    text = "\n".join(page(results)) + "\n"
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    print(text)
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
