"""One number for each body: alone and in a suite, in any order, whatever lies around it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

HERE = Path(__file__).parent
INI = """
[pytest]
addopts = -q -p xdist -p stress_plugin -p no:cacheprovider -p no:logging -otorchmem_device=cpu
    --torchmem-summary=off
"""
Report = dict[str, Any]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text(INI)
    for path in HERE.glob("bodies_*.py"):
        (tmp_path / path.name.replace("bodies_", "test_")).write_text(path.read_text())
    for name in ("stress_plugin.py", "one_by_one.py"):
        (tmp_path / name).write_text((HERE / name).read_text())
    return tmp_path


def python(project: Path, *arguments: str, text: str = "") -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(project), os.environ.get("PYTHONPATH", "")]),
        # Compiled code comes from one place, whoever compiled it.
        "TORCHINDUCTOR_CACHE_DIR": str(project / "inductor"),
    }
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=project,
        env=environment,
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def suite(project: Path, name: str, *options: str) -> Report:
    """Run all bodies in one go."""
    path = project / f"{name}.json"
    said = python(project, "-m", "pytest", f"--torchmem-report={path}", *options)
    assert path.exists(), said
    return read(path)


def one_by_one(project: Path, tests: list[str]) -> Report:
    """Run each body in a process in which nothing ran before."""

    def half(first: int) -> str:
        return python(project, "one_by_one.py", str(first), "2", text="\n".join(tests))

    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(half, (0, 1)))
    found: Report = {}
    for path in project.glob("alone-*.json"):
        found |= read(path)
    missing = set(tests) - set(found)
    assert not missing, (missing, said)
    return found


def read(path: Path) -> Report:
    """Everything measured in a run, by test: outcomes, all windows, numbers that are its own."""
    found = {}
    for test in json.loads(path.read_text(encoding="utf-8"))["tests"]:
        results = [*(window["result"] for window in test["windows"]), *test.get("regions", ())]
        for result in results:
            del result["peak"]["time_ns"]
            # The garbage of others, where the body happens to free it: nobody asked for a net.
            del result["retained"]["freed"]
        numbers = {result["name"]: result for result in results}
        found[test["test"]] = {
            "outcome": test["outcome"],
            "not_measured": test["not_measured"],
            **flat(numbers),
        }
    return found


def flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, part in value.items():
        name = f"{prefix}{key}"
        found |= flat(part, f"{name}.") if isinstance(part, dict) else {name: part}
    return found


def differences(run: str, ours: Report, reference: Report) -> list[str]:
    lines: list[str] = []
    for test in sorted({*ours, *reference}):
        mine, theirs = ours.get(test, {}), reference.get(test, {})
        lines += [
            f"{run}: {test} {key}: {mine.get(key)}, not {theirs.get(key)}"
            for key in sorted({*mine, *theirs})
            if mine.get(key) != theirs.get(key)
        ]
    return lines


@pytest.mark.skipif(not hasattr(os, "fork"), reason="bodies are run alone by forking")
def test_every_body_has_one_number_however_it_is_run(project: Path) -> None:
    pytest.importorskip("xdist")
    shuffled: dict[str, tuple[str, ...]] = {
        "among rubbish, with the collector off": (
            "-n0",
            "--shuffle=1",
            "--rubbish",
            "--no-collector",
        ),
        "on two workers, among rubbish": ("-n2", "--shuffle=2", "--rubbish"),
    }
    with ThreadPoolExecutor(2) as pool:
        runs = {
            name: pool.submit(suite, project, f"run-{number}", *options)
            for number, (name, options) in enumerate(shuffled.items())
        }
        reports = {name: run.result() for name, run in runs.items()}
    alone = one_by_one(project, sorted(next(iter(reports.values()))))
    measured = [test for test, numbers in alone.items() if not numbers["not_measured"]]
    assert len(measured) >= 40
    found = [line for name, report in reports.items() for line in differences(name, report, alone)]
    assert not found, "\n".join(found)


def test_a_difference_of_one_byte_would_be_seen(tmp_path: Path) -> None:
    peak = {"total": 8, "time_ns": 1, "at_peak": {"input": 8}}
    result = {"name": "", "peak": peak, "retained": {"total": 0, "freed": 0}}
    test = {"test": "a", "outcome": "passed", "not_measured": "", "regions": []}
    reports = []
    for total, time_ns in ((8, 1), (8, 2), (9, 1)):
        changed = {**result, "peak": {**peak, "total": total, "time_ns": time_ns}}
        path = tmp_path / "report.json"
        path.write_text(json.dumps({"tests": [{**test, "windows": [{"result": changed}]}]}))
        reports.append(read(path))
    assert not differences("again", reports[1], reports[0])
    assert differences("again", reports[2], reports[0]) == ["again: a .peak.total: 9, not 8"]
    assert len(differences("again", {}, reports[0])) > 3
