"""Python itself goes on as without a measurement: profile functions, imports, names of files."""

from __future__ import annotations

import copy
import cProfile
import gc
import importlib.util
import os
import pstats
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import pytest_torchmem
from pytest_torchmem.record.environment import library_paths
from pytest_torchmem.values.contributors import Source
from tests.measured import measured

pytestmark = pytest.mark.slow


@pytest.fixture
def own_profile_function() -> Iterator[None]:
    before = sys.getprofile()
    yield
    sys.setprofile(before)


def first() -> None:
    """A function that a profile can show."""


def second() -> None:
    """Another one."""


def test_a_profile_function_is_given_back(own_profile_function: None) -> None:
    called: list[str] = []

    def profile(frame: Any, event: str, _: Any) -> None:
        called.append(f"{event} {frame.f_code.co_name}")

    sys.setprofile(profile)
    measured(lambda: torch.ones(5))
    assert sys.getprofile() is profile
    second()
    sys.setprofile(None)
    assert "call second" in called


def test_what_a_body_sets_as_profile_function_stays(own_profile_function: None) -> None:
    def profile(frame: Any, event: str, _: Any) -> None:
        """Notes nothing."""

    measured(lambda: sys.setprofile(profile))
    assert sys.getprofile() is profile


def test_a_profile_function_does_not_see_us_look(own_profile_function: None) -> None:
    ours, seen = str(Path(pytest_torchmem.__file__).parent), set()

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ours):
            seen.add(frame.f_code.co_name)

    def body() -> None:
        sys.setprofile(profile)
        layer = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        copy.deepcopy(layer)
        sys.setprofile(None)

    measured(body)
    assert {"quietly", "_run", "forward"} <= seen
    # What looks at modules, graphs and storages calls most.
    assert seen.isdisjoint({"sample", "before_backward", "after_backward", "_log_held", "owner"})


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="cProfile listens in another way")
def test_cprofile_goes_on_after_a_measurement(own_profile_function: None) -> None:
    profile = cProfile.Profile()
    profile.enable()
    first()
    measured(lambda: torch.ones(5))
    second()
    profile.disable()
    names = {name for _, _, name in pstats.Stats(profile).stats}  # type: ignore[attr-defined]
    assert {"first", "second"} <= names


def test_a_source_path_that_is_not_utf8_fails_no_body(tmp_path: Path) -> None:
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    try:
        Path(folder).mkdir()
    except OSError:
        pytest.skip("the file system takes no such name")
    Path(folder, "made_in_latin.py").write_text(
        "import torch\ndef make(): return torch.ones(256)\n"
    )
    sys.path.insert(0, folder)
    try:
        made = importlib.import_module("made_in_latin")
        kept: list[torch.Tensor] = []
        assert measured(lambda: kept.append(made.make())).retained.total == 1024
    finally:
        sys.path.remove(folder)
        del sys.modules["made_in_latin"]


def test_a_module_from_a_path_that_is_not_utf8_fails_no_body(tmp_path: Path) -> None:
    """pytest's import mode "importlib" puts no folder on ``sys.path``."""
    file = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.py"))
    try:
        file.write_text("import torch\ndef make(): return torch.ones(256)\n")
    except OSError:
        pytest.skip("the file system takes no such name")
    spec = importlib.util.spec_from_file_location("made_in_latin", file)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules["made_in_latin"] = made
    try:
        spec.loader.exec_module(made)
        kept: list[torch.Tensor] = []
        assert measured(lambda: kept.append(made.make())).retained.total == 1024
    finally:
        del sys.modules["made_in_latin"]


def _executed_under_a_name_that_is_no_text() -> None:
    source = "def make(size): return torch.ones(size)\nKEPT = make(256)"
    names: dict[str, Any] = {"torch": torch}
    exec(compile(source, "<\udcff>", "exec"), names)
    names["make"](256)


def test_code_whose_file_is_no_text_runs() -> None:
    assert measured(_executed_under_a_name_that_is_no_text).peak.total == 2048
    gc.collect()
    assert [source.file for source in _sources(lambda: torch.ones(256))] == [__file__]


def test_code_whose_file_is_no_text_runs_below_an_operator() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            _executed_under_a_name_that_is_no_text()
            return x * 2

    assert measured(lambda: Twice.apply(torch.ones(4))).peak.total == 16 + 2048


def test_a_folder_whose_name_is_no_text_is_put_on_the_path_by_a_body(tmp_path: Path) -> None:
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    try:
        Path(folder).mkdir()
    except OSError:
        pytest.skip("the file system takes no such name")
    Path(folder, "made_later.py").write_text("import torch\ndef make(): return torch.ones(256)\n")

    def body() -> None:
        sys.path.insert(0, folder)
        importlib.import_module("made_later").make()

    try:
        assert measured(body).peak.total == 1024
    finally:
        sys.path.remove(folder)
        del sys.modules["made_later"]


def test_code_whose_file_is_no_text_runs_on_another_thread() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        measured(lambda: pool.submit(_executed_under_a_name_that_is_no_text).result())


def _sources(body: Callable[[], object]) -> list[Source | None]:
    kept: list[object] = []
    return [cause.source for cause in measured(lambda: kept.append(body())).peak.live]


def _sets_a_profile_function() -> None:
    sys.setprofile(lambda frame, event, _: None)


@pytest.mark.parametrize(
    "change", [_sets_a_profile_function, _executed_under_a_name_that_is_no_text]
)
def test_each_line_is_known_whatever_the_body_does_with_tracers(
    change: Callable[[], None], own_profile_function: None
) -> None:
    def body() -> object:
        x = torch.ones(256)
        change()
        return x, torch.zeros(1024)

    first = body.__code__.co_firstlineno
    sources = _sources(body)
    assert {(s.file, s.line) for s in sources if s is not None} >= {
        (__file__, first + 1),
        (__file__, first + 3),
    }
    assert None not in sources


def test_a_profile_function_of_before_is_what_a_body_is_told(own_profile_function: None) -> None:
    def profile(frame: Any, event: str, _: Any) -> None:
        """Notes nothing."""

    told: list[object] = []
    sys.setprofile(profile)
    measured(lambda: told.append(sys.getprofile()))
    assert told == [profile]
    assert sys.getprofile() is profile


def test_torch_behind_a_link_is_no_code_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(torch.__file__).parent
    (tmp_path / "torch").symlink_to(folder)
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(torch.nn, "__file__", str(tmp_path / "torch" / "nn" / "__init__.py"))
    monkeypatch.syspath_prepend(tmp_path)
    assert str(folder.resolve()) in library_paths()


def test_torch_whose_files_are_links_is_no_code_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(torch.__file__).parent
    (tmp_path / "torch").mkdir()
    for entry in folder.iterdir():
        (tmp_path / "torch" / entry.name).symlink_to(entry)
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(torch.nn, "__file__", str(tmp_path / "torch" / "nn" / "__init__.py"))
    monkeypatch.syspath_prepend(tmp_path)  # the answer is remembered for a path
    assert str(folder.resolve()) in library_paths()


def test_a_failed_import_shows_no_frame_of_ours() -> None:
    def body() -> None:
        with pytest.raises(ModuleNotFoundError) as caught:
            import no_such_module_anywhere  # noqa: F401
        found.extend(entry.path for entry in caught.traceback)

    found: list[Any] = []
    measured(body)
    assert [str(path) for path in found] == [__file__]


def test_a_body_may_leave_another_class_in_the_profilers_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured(lambda: monkeypatch.setattr(torch.autograd.profiler, "profile", None))
    assert measured(lambda: torch.ones(256)).peak.total == 1024


_MEASURE = """
import sys, torch
from pytest_torchmem import measure
with measure("step", device="cpu") as step:
    x = torch.ones(8, requires_grad=True)
    (x * x).sum().backward()
assert step.peak.total
print(*(name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules))
"""


def test_measuring_imports_no_compiler() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


def test_a_script_under_the_profiler_of_the_command_line_is_measured(tmp_path: Path) -> None:
    """``python -m cProfile`` makes its class in ``__main__``."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nfrom pytest_torchmem import measure\n\n\ndef after(): pass\n\n\n"
        "with measure('a', device='cpu') as a:\n    torch.ones(1000)\n"
        "after()\nassert a.peak.total == 4000\n"
    )
    profile = tmp_path / "out.prof"
    command = [sys.executable, "-m", "cProfile", "-o", str(profile), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    functions = {name for _, _, name in pstats.Stats(str(profile)).stats}  # type: ignore[attr-defined]
    assert "after" in functions


def test_a_run_of_pytest_under_the_profiler_of_the_command_line_shows_later_tests(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        mod="def one(): return 1\ndef two(): return 2\n",
        test_it="""
        import mod, pytest, torch

        @pytest.mark.memory_budget("100MiB")
        def test_1():
            mod.one()
            torch.ones(5)

        def test_2():
            mod.two()
        """,
    )
    command = ("-m", "cProfile", "-o", "prof", "-m", "pytest", "-p", "no:cacheprovider")
    pytester.run(sys.executable, *command).assert_outcomes(passed=2)
    stats: Any = pstats.Stats(str(pytester.path / "prof"))
    assert ("mod.py", "two") in {(Path(file).name, name) for file, _, name in stats.stats}


_FUNCTION_OF_ITS_OWN = """
import torch
from pytest_torchmem import measure

class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3 * ctx.saved_tensors[0] ** 2

x = torch.ones(1 << 18, requires_grad=True)
with measure("a", device="cpu") as a:
    Cubed.apply(torch.nn.functional.relu(x)).sum().backward()
print(torch.__file__, *{cause.source.file for cause in a.peak.live if cause.source}, sep="\\n")
"""


def test_behind_a_link_no_frame_of_torchs_is_the_users(tmp_path: Path) -> None:
    (tmp_path / "torch").symlink_to(Path(torch.__file__).parent)
    script = tmp_path / "script.py"
    script.write_text(_FUNCTION_OF_ITS_OWN)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == [str(tmp_path / "torch" / "__init__.py"), str(script)]


def test_none_keeps_its_references_where_tensors_have_no_memory():
    def body():
        for _ in range(200):
            torch.empty(0) + 1

    measured(body)  # what is learnt at first stays
    gc.collect()
    before = sys.getrefcount(None)
    measured(body)
    gc.collect()
    assert sys.getrefcount(None) > before - 100  # each mention of such a tensor took one away
