"""A limit fails the test that exceeds it, with a sentence that names the cause."""

from fnmatch import fnmatch
from xml.etree import ElementTree

import pytest


def test_a_body_over_its_limit_fails_in_one_sentence(project):
    project.write(
        """
        @pytest.mark.memory_budget(activation="1GiB")
        def test_a():
            use(700 * MiB, operator="aten::mm", module="net.fc")
            use(529 * MiB, operator="aten::relu", module="net.act", line=20)
        """
    )
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "activation peaked at 1.2 GiB, +205.0 MiB (+20 %) over the limit of 1.0 GiB: largest "
            "700.0 MiB "
            "from aten::mm at fake_measure.py:12 in net.fc",
            "activation at its own peak, 1.2 GiB on cpu:",
            "FAILED *::test_a - Failed: activation peaked at 1.2 GiB*",
        ]
    )


def test_a_failure_shows_no_traceback_of_ours(project):
    project.write(
        """
        @pytest.mark.memory_budget("1B")
        def test_a():
            use(2)
        """
    )
    for style in ("auto", "long", "short", "native"):
        result = project.run(f"--tb={style}")
        result.assert_outcomes(failed=1)
        assert "pytest_torchmem" not in result.stdout.str().replace("pytest_torchmem-", "")


def test_a_body_at_its_limit_passes(project):
    project.write(
        """
        @pytest.mark.memory_budget("3MiB", activation=2 * MiB, temporary="1MiB", retained="2MiB")
        def test_a():
            use(2 * MiB, retained=True)
            use(1 * MiB, "temporary")
        """
    )
    project.run().assert_outcomes(passed=1)


@pytest.mark.parametrize(
    "category",
    [
        "parameter",
        "gradient",
        "optimizer_state",
        "input",
        "autograd_detail",
        "activation",
        "temporary",
        "buffer",
        "workspace",
        "unknown",
    ],
)
def test_each_category_can_be_limited(project, category):
    project.write(
        f"""
        @pytest.mark.memory_budget({category}="3MiB")
        def test_over():
            use(4 * MiB, "{category}")

        @pytest.mark.memory_budget({category}="3MiB")
        def test_other():
            use(4 * MiB, "{"input" if category != "input" else "buffer"}")
        """
    )
    result = project.run()
    result.assert_outcomes(failed=1, passed=1)
    subject = category.replace("_", " ")
    result.stdout.fnmatch_lines(
        [f"{subject} peaked at 4.0 MiB, +1.0 MiB (+33 %) over the limit of 3.0 MiB*"]
    )


def test_what_is_retained_can_be_limited(project):
    project.write(
        """
        @pytest.mark.memory_budget(retained="0B")
        def test_a():
            use(2 * MiB)
            use(1 * MiB, "gradient", retained=True)
        """
    )
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "retained 1.0 MiB, +1.0 MiB over the limit of 0 B: largest 1.0 MiB of gradient from *",
            "retained at the end, 1.0 MiB:",
        ]
    )


def test_growth_per_step_can_be_limited(project):
    project.write(
        """
        @pytest.mark.memory_budget(growth="0B")
        def test_grows(torchmem):
            for _ in torchmem.steps(3, warmup=1):
                use(1 * MiB, retained=True)

        @pytest.mark.memory_budget(growth="0B")
        def test_does_not(torchmem):
            for step in torchmem.steps(3, warmup=1):
                use(1 * MiB, retained=step == 0)
        """
    )
    result = project.run()
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["grew by 1.0 MiB per step, +1.0 MiB over the limit of 0 B: *"])


def test_a_growth_limit_without_steps_fails(project):
    project.write(
        """
        @pytest.mark.memory_budget(growth="0B")
        def test_a():
            use(1)
        """
    )
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["the limit of 0 B on growth cannot be judged: *[[]no-steps]"])


def test_reserved_memory_is_limited_on_a_gpu(project):
    project.write(
        """
        @pytest.mark.memory_budget(reserved="3MiB", device="cuda")
        def test_over(): use(1)

        @pytest.mark.memory_budget(reserved="4MiB", device="cuda")
        def test_within(): use(1)
        """
    )
    result = project.run()
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(
        ["reserved memory peaked at 4.0 MiB, +1.0 MiB (+33 %) over the limit*"]
    )


def test_an_activation_limit_without_a_backward_pass_fails(project):
    project.write(
        """
        @pytest.mark.memory_budget(activation="1GiB")
        def test_a():
            fake_measure.state["backward"] = False
            use(1, "temporary")
        """
    )
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*on activation cannot be judged: the body kept nothing*[[]no-activation]"]
    )


def test_a_reading_of_zero_never_passes_a_limit(project):
    project.write(
        """
        @pytest.mark.memory_budget("1GiB")
        def test_a():
            pass
        """
    )
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["the body used no memory on cpu: *[[]no-reading]"])


def test_a_body_without_tensors_leaves_nothing_behind(project):
    project.write(
        """
        @pytest.mark.memory_budget(retained="0B")
        def test_a():
            pass

        @pytest.mark.memory_budget(retained="0B", total="1GiB")
        def test_b():
            pass
        """
    )
    result = project.run()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["FAILED *::test_b - Failed: the body used no memory*"])


def test_a_limit_whose_body_could_not_be_recorded_fails(project):
    project.write(
        """
        fake_measure.state["busy"] = True

        @pytest.mark.memory_budget("1GiB")
        def test_a():
            use(1)
        """
    )
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "the limit on memory cannot be judged: another profiler is active [[]not-measured]",
            "not measured: *::test_a: another profiler is active [[]not-measured]",
        ]
    )


def test_sizes_one_byte_apart_do_not_read_the_same(project):
    project.write(
        """
        @pytest.mark.memory_budget("1GiB")
        def test_a():
            use(1024 * MiB + 1)
        """
    )
    result = project.run()
    result.stdout.fnmatch_lines(
        ["memory peaked at 1073741825 B, +1 B over the limit of 1073741824 B: *"]
    )


def test_a_callable_limit_is_computed_after_the_body(project):
    project.write(
        """
        sizes = []

        @pytest.mark.memory_budget(lambda: sizes[0])
        def test_a():
            sizes.append(3 * MiB)
            use(4 * MiB)
        """
    )
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["memory peaked at 4.0 MiB, +1.0 MiB (+33 %) over the limit of 3.0 MiB*"]
    )


def test_a_callable_limit_that_raises_fails_its_test_only(project):
    project.write(
        """
        @pytest.mark.memory_budget(lambda: 1 / 0)
        def test_a(): use(1)

        def test_b(): pass
        """
    )
    result = project.run()
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["*could not be computed: ZeroDivisionError: *[[]bad-argument]"])


def test_a_callable_limit_that_returns_nothing_is_told_what_to_return(project):
    project.write("@pytest.mark.memory_budget(lambda: None)\ndef test_a(): use(1)\n")
    project.run().stdout.fnmatch_lines(
        ["memory_budget, total: *: it returned None; it has to return an int *give None instead*"]
    )


BY_DEVICE = """
@pytest.mark.memory_budget({limits})
@pytest.mark.memory_budget(temporary="1B", device="{device}")
def test_a():
    use(4 * MiB)
"""


@pytest.mark.parametrize(
    ("device", "limit"), [("cuda", "3.0 MiB"), ("xpu", "2.0 MiB"), ("cpu", "1.0 MiB")]
)
def test_a_limit_by_device_is_that_of_the_model_then_of_the_kind(project, device, limit):
    limits = {"Fake 100": "3MiB", "cuda": "9MiB", "cpu": "1MiB"}
    if device == "xpu":
        limits = {"cpu": "1MiB", "xpu": "2MiB"}
    project.write(BY_DEVICE.format(limits=limits, device=device))
    project.run().stdout.fnmatch_lines([f"memory *the limit of {limit}*"])


def test_none_by_device_is_no_limit_there(project):
    project.write(BY_DEVICE.format(limits={"cuda": "1MiB", "cpu": None}, device="cpu"))
    project.run().assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ({"cuda": "1MiB"}, "total: there is no limit for 'cpu', only for 'cuda'; add one*"),
        ({"cpu": "1"}, "total['cpu']: cannot read '1' as a size*"),
        ({}, "total: a limit for each device is a dictionary*"),
    ],
)
def test_a_limit_by_device_that_cannot_be_used_fails_its_test_only(project, limits, told):
    project.write(BY_DEVICE.format(limits=limits, device="cpu") + "\ndef test_b(): pass\n")
    result = project.run()
    result.assert_outcomes(errors=1, passed=1)
    told = told.replace("[", "[[]")
    result.stdout.fnmatch_lines([f"*::test_a: memory_budget, {told}[[]bad-argument]"])


OVER = """
@pytest.mark.memory_budget("1MiB", temporary="1MiB")
def test_over():
    use(4 * MiB)

@pytest.mark.memory_budget("1 gibi")
def test_misspelt(): pass
"""
FIRST = "Failed: memory peaked at 4.0 MiB, +3.0 MiB (+300 %) over the limit of 1.0 MiB: *"


@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n1")], ids=["here", "in a worker"])
def test_with_a_line_for_each_failure_it_has_the_test_and_the_first_sentence(project, workers):
    project.write(OVER)
    result = project.run_apart("--tb=line", *workers)
    result.assert_outcomes(failed=1, errors=1)
    shown = [line for line in after(result, "= FAILURES =") if not line.startswith("[gw")]
    assert fnmatch(shown[0], f"*/test_it.py:6: {FIRST}")
    assert shown[1].startswith("===")
    result.stdout.fnmatch_lines(["*memory_budget, total: cannot read '1 gibi' as a size*"])


def test_the_debugger_is_preceded_by_the_failure_in_any_style(project):
    # With --pdb pytest writes no line for each failure at the end.
    project.write(OVER)
    quiet = "import pdb\nclass Quiet(pdb.Pdb):\n    def interaction(self, *_): pass"
    project.pytester.makepyfile(quiet=quiet)
    project.pytester.syspathinsert()
    result = project.run("--tb=line", "--pdb", "--pdbcls=quiet:Quiet")
    result.stdout.fnmatch_lines(["*>> traceback >>*", FIRST.removeprefix("Failed: ")])


def test_junits_message_is_the_first_sentence_and_its_text_the_whole(project):
    project.write(OVER)
    project.run("--junitxml=run.xml")
    (failure,) = ElementTree.parse(project.path / "run.xml").iter("failure")
    assert fnmatch(failure.attrib["message"], FIRST)
    assert "\n" not in failure.attrib["message"]
    assert "live at the peak" in (failure.text or "")


def test_in_ci_the_last_lines_have_one_for_each_failure(project, monkeypatch):
    monkeypatch.setenv("CI", "true")
    project.write(OVER)
    result = project.run_apart()
    *told, _ = after(result, "= short test summary info =")
    assert len(told) == 2
    assert fnmatch(told[0], f"FAILED test_it.py::test_over - {FIRST}")
    misspelt = "memory_budget, total: cannot read '1 gibi' as a size"
    assert told[1].startswith(f"ERROR test_it.py::test_misspelt - Failed: {misspelt}")


def after(result, heading):
    """Return the lines below a heading."""
    found = next(number for number, line in enumerate(result.outlines) if heading in line)
    return result.outlines[found + 1 :]


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu"])
@pytest.mark.parametrize("limits", ['"40MiB"', '"1MiB"', 'retained="0B"', 'reserved="1B"'])
def test_a_body_with_limits_runs_once_whatever_becomes_of_it(project, device, limits):
    project.write(
        f"""
        @pytest.mark.memory_budget({limits})
        def test_a():
            use(30 * MiB)
            print("runs now, started", fake_measure.state["starts"])
        """
    )
    said = project.run("-rA", f"-otorchmem_device={device}").stdout.str()
    assert said.count("runs now") == said.count("runs now, started 1") == 1
