"""`pytest_torchmem.measure`: blocks and functions, alone and within each other."""

from __future__ import annotations

import asyncio
import pickle
import threading

import pytest
import torch

from pytest_torchmem import MiB, TorchmemError, measure
from pytest_torchmem.measuring.body_measurement import running
from pytest_torchmem.record import devices
from pytest_torchmem.record.recorder import Recorder
from pytest_torchmem.record.torch_api import autograd, profiler
from pytest_torchmem.types import LimitError
from pytest_torchmem.values.errors import DeviceError, MarkerError, RecordingError

pytestmark = pytest.mark.slow

ONE_MIB = MiB // 4
"""How many float32 make 1 MiB."""


HELD: list[torch.Tensor] = []


def make(mib: int) -> torch.Tensor:
    return torch.ones(mib * ONE_MIB)


def test_a_limit_by_device_is_that_of_the_device_that_is_measured():
    block = measure(total={"cuda": "1MiB", "cpu": "2MiB"}, device="cpu")
    with pytest.raises(LimitError, match=r"over the limit of 2\.0 MiB"), block:
        make(4)
    with measure(total={"cuda": "1MiB", "cpu": None}, device="cpu"):
        make(4)


def test_a_block_has_the_numbers_of_what_it_did():
    with measure("work", device="cpu") as work:
        kept = make(2)
        make(3)
    assert work.peak.total == work.peak.temporary == 5 * MiB
    assert work.retained.total == kept.nbytes == 2 * MiB
    assert work.growth is None
    assert (work.result.name, work.result.device, work.device) == ("work", "cpu", "cpu")
    assert work.picture().change_count >= 3
    assert work.fits("1GiB")


def test_a_region_of_a_block_has_its_own_numbers():
    with measure(device="cpu") as block:
        make(5)
        with block.region("part") as part:
            make(1)
        assert part.peak.total == 1 * MiB
    assert block.peak.total == 5 * MiB


def test_growth_is_counted_over_the_steps_after_the_warm_up():
    kept = []
    with measure(device="cpu") as block:
        for step in block.steps(3, warmup=2):
            kept += [make(1 if step else 7)]
    assert block.growth == 1 * MiB
    assert len(block.result.steps) == 3


@pytest.mark.parametrize("arguments", [(0, 0), (1, -1), (True, 0), ("2", 0), (-(10**5000), 0)])
def test_a_number_that_makes_no_steps_is_refused(arguments):
    steps, warmup = arguments
    with measure(device="cpu") as block, pytest.raises(MarkerError, match="cannot make"):
        block.steps(steps, warmup=warmup)


def test_a_block_over_its_limit_raises_the_sentence_of_a_test():
    with pytest.raises(LimitError) as caught, measure("work", "1MiB", temporary="3B", device="cpu"):
        make(2)
    assert str(caught.value).startswith(
        "in 'work', temporary peaked at 2.0 MiB, +2.0 MiB over the limit of 3 B: "
        "largest 2.0 MiB from aten::ones at test_block.py:"
    )
    assert str(caught.value).endswith(" [over-limit]")
    assert len(caught.value.sentences) == 2
    assert (
        "memory peaked at 2.0 MiB, +1.0 MiB (+100 %) over the limit of 1.0 MiB"
        in caught.value.sentences[1]
    )


def test_a_block_at_its_limits_passes():
    with measure(total="2MiB", temporary=lambda: 2 * MiB, gradient=None, device="cpu"):
        make(2)


def test_numbers_can_be_read_after_a_limit_was_exceeded():
    block = measure(total="1B", device="cpu")
    with pytest.raises(LimitError), block:
        make(1)
    assert block.peak.total == 1 * MiB


def test_a_limit_that_nothing_can_answer_never_passes():
    with pytest.raises(LimitError) as caught, measure(activation="1GiB", device="cpu"):
        make(1)
    assert str(caught.value).endswith("[no-activation]")
    assert caught.value.slug == "no-activation"
    with pytest.raises(LimitError, match=r"\[no-reading\]$"), measure(total="1GiB", device="cpu"):
        pass


def test_a_limit_on_reserved_memory_is_answered_by_an_estimate():
    with measure(reserved="2MiB", device="cpu"):
        make(1)
    with pytest.raises(LimitError, match=r"peaked at an estimated 20.0 MiB.* had 17.0 MiB that"):  # noqa: SIM117
        with measure(reserved="2MiB", device="cpu"):
            make(3)


def test_a_limit_error_crosses_processes_and_counts_as_a_failed_assertion():
    error = pickle.loads(pickle.dumps(LimitError("first", ("first", "second"))))
    assert isinstance(error, AssertionError)
    assert isinstance(error, TorchmemError)
    assert (str(error), error.sentences) == ("first [over-limit]", ("first", "second"))


def test_what_the_body_raises_comes_out_and_all_is_restored():
    engine = autograd.engine()
    block = measure("work", total=0, device="cpu")
    mine = KeyError("mine")

    def body():
        with block:
            make(1)
            raise mine

    with pytest.raises(KeyError) as caught:
        body()
    assert caught.value is mine
    assert running() is None
    assert not profiler.profiler_is_active()
    assert autograd.engine() is engine
    with pytest.raises(RecordingError, match="'work' has no numbers: its body raised"):
        _ = block.peak


def test_a_body_that_profiles_itself_is_measured():
    with measure(device="cpu") as measured, torch.profiler.profile():
        make(1)
    assert measured.peak.total == 1 * MiB


def test_an_open_block_has_no_numbers_and_does_not_open_twice():
    block = measure(device="cpu")
    with pytest.raises(RecordingError, match="nothing has been measured yet"):
        _ = block.result
    with block:
        with pytest.raises(RecordingError, match="it is still open"):
            _ = block.peak
        with pytest.raises(RecordingError, match="measuring already"), block:
            pass
        make(1)
    assert block.peak.total == 1 * MiB


def test_a_block_measures_anew_each_time():
    block = measure(device="cpu")
    for mib in (3, 1):
        with block:
            make(mib)
        assert block.peak.total == mib * MiB


def test_each_call_of_a_function_has_a_result():
    @measure(device="cpu", total="2MiB")
    def work(mib: int) -> int:
        """Do it."""
        make(mib)
        return mib

    assert [work(1), work(mib=2)] == [1, 2]
    with pytest.raises(LimitError, match=r"in 'work', memory peaked at 3.0 MiB"):
        work(3)
    assert [result.peak.total for result in work.results] == [1 * MiB, 2 * MiB, 3 * MiB]
    assert [result.name for result in work.results[-2:]] == ["work", "work"]
    assert (work.__name__, work.__doc__) == ("work", "Do it.")  # type: ignore[attr-defined]


def test_a_function_can_be_decorated_without_parentheses_and_so_can_a_method():
    class Model:
        size = 2

        @measure
        def step(self) -> int:
            make(self.size)
            return self.size

    assert Model().step() == 2  # type: ignore[call-arg]
    assert [result.name for result in Model.step.results] == ["Model.step"]


def test_a_call_that_raises_has_no_result():
    @measure(device="cpu")
    def work():
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        work()
    assert len(work.results) == 0


def test_a_function_is_warmed_up_by_each_call():
    runs = []

    @measure(device="cpu", warmup=2)
    def work(mib: int) -> int:
        runs.append(mib)
        make(9 if len(runs) < 3 else mib)
        return len(runs)

    assert work(1) == 3
    assert runs == [1, 1, 1]
    assert work.results[0].peak.total == 1 * MiB


def test_a_with_block_cannot_be_warmed_up():
    with pytest.raises(MarkerError, match="a with block cannot be run twice"), measure(warmup=1):
        pass
    assert running() is None


def test_an_async_function_is_measured_while_it_runs():
    @measure(device="cpu", warmup=1)
    async def work() -> str:
        held = make(1)
        await asyncio.sleep(0)
        make(1)
        return str(held[0].item())

    assert asyncio.run(work()) == "1.0"
    assert [result.peak.total for result in work.results] == [2 * MiB]


def generator():
    yield 1


async def async_generator():
    yield 1


@pytest.mark.parametrize("function", [generator, async_generator])
def test_a_generator_is_refused(function):
    with pytest.raises(MarkerError, match=f"cannot decorate the generator '{function.__name__}'"):
        measure("name")(function)


@pytest.mark.parametrize("thing", [object, 3])
def test_what_is_no_function_is_refused(thing):
    with pytest.raises(MarkerError, match="measure decorates functions"):
        measure("name")(thing)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activations": "1GiB"}, "did you mean 'activation'"),
        ({"total": "64"}, "measure, total: cannot read '64' as a size"),
        ({"name": "a\nb"}, "measure needs a name"),
        ({"name": 1024}, r"a limit is measure\(total="),
        ({"name": "1MiB"}, r"reads as a size; .* write measure\(total='1MiB'\)"),
        ({"name": "2 gb", "activation": 1}, "reads as a size"),
        ({"total": "64"}, r"^[^\[]*\[bad-argument\]$"),
        ({"warmup": -1}, "measure, warmup: -1 is not a number of runs, 0 to 1,000,000"),
        ({"warmup": 10**5000}, "is not a number of runs, 0 to 1,000,000"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(arguments, message):
    with pytest.raises(MarkerError, match=message):
        measure(**arguments)


def test_a_device_that_is_not_there_is_said_at_the_beginning():
    with pytest.raises(DeviceError, match="meta cannot be measured"), measure(device="meta"):
        pytest.fail("the body ran")


def test_a_block_within_another_is_a_part_of_it():
    with measure("outer", device="cpu") as outer:
        kept = make(1)
        with measure("inner", total="2MiB") as inner:
            make(2)
        with pytest.raises(LimitError, match=r"in 'inner', memory peaked at 3.0 MiB"):  # noqa: SIM117
            with measure("inner", total="2MiB"):
                make(3)
    assert inner.peak.total == 2 * MiB
    assert outer.peak.total == kept.nbytes + 3 * MiB
    assert inner.device == "cpu"


def test_steps_within_steps_are_counted_apart():
    kept = []
    with measure("outer", device="cpu") as outer:
        for _ in outer.steps(2):
            with measure("inner") as inner:
                for _ in inner.steps(3):
                    kept += [make(1)]
    assert inner.growth == 1 * MiB
    assert outer.growth == 3 * MiB


def test_a_decorated_function_within_a_block_has_results_during_and_after_it():
    @measure
    def work(mib: int) -> None:
        make(mib)

    with measure(device="cpu") as outer:
        work(1)
        assert work.results[-1].peak.total == 1 * MiB
        work(2)
    assert [result.peak.total for result in work.results] == [1 * MiB, 2 * MiB]
    assert outer.peak.total == 2 * MiB


def test_a_part_of_a_measurement_is_on_its_device(monkeypatch):
    find = devices.find_device
    monkeypatch.setattr(
        devices,
        "find_device",
        lambda name: torch.device("cuda", 1) if name == "cuda:1" else find(name),
    )
    with measure(device="cpu"), pytest.raises(RecordingError, match="cannot measure cuda:1 within"):  # noqa: SIM117
        with measure(device="cuda:1"):
            pass


def test_a_block_that_outlives_the_one_around_it_has_no_numbers():
    outer, inner = measure("outer", device="cpu"), measure("inner")
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    with pytest.raises(RecordingError, match="the measurement around 'inner' ended before it"):
        inner.__exit__(None, None, None)
    assert outer.peak.total == 0
    with pytest.raises(RecordingError, match="it could not be recorded"):
        _ = inner.peak


def measured_elsewhere(said: list[str]) -> None:
    try:
        with measure(device="cpu"):
            pass
    except RecordingError as error:
        said.append(str(error))


def test_another_thread_is_told_that_it_is_not_recorded():
    said: list[str] = []
    with measure(device="cpu"):
        thread = threading.Thread(target=measured_elsewhere, args=[said])
        thread.start()
        thread.join()
    assert said[0].startswith("another thread is being measured")


@pytest.mark.parametrize("moment", ["start", "stop"])
def test_another_thread_is_told_so_while_a_recording_begins_or_ends(moment, monkeypatch):
    """Two sessions of torch's profiler at once end the process."""
    said: list[str] = []
    original = getattr(Recorder, moment)

    def meanwhile(recorder):
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=measured_elsewhere, args=[said])
            thread.start()
            thread.join()
        return original(recorder)

    monkeypatch.setattr(Recorder, moment, meanwhile)
    with measure(device="cpu") as block:
        torch.ones(1000)
    assert block.peak.total == 4000
    assert [text.partition(",")[0] for text in said] == ["another thread is being measured"]


def test_a_region_of_another_thread_is_refused_and_spoils_nothing(torchmem):
    said = []

    def work():
        try:
            with torchmem.measure("there"):
                pass
        except RecordingError as error:
            said.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    with torchmem.measure("here") as here:
        torch.ones(1000)
    assert here.peak.total == 4000
    assert [text.partition(",")[0] for text in said] == ["another thread is being measured"]


def test_in_a_measured_test_it_is_a_region_of_the_body(torchmem):
    with measure("library") as library:
        make(1)
    assert library.peak.total == 1 * MiB
    assert [region.name for region in torchmem._body.measurement.regions] == ["library"]


def test_a_holder_that_ends_in_a_bracket_leaves_the_slug_where_it_was():
    with pytest.raises(LimitError, match=r"still held by \S*HELD\[0\] \[over-limit\]$"):  # noqa: SIM117
        with measure(retained=0, device="cpu"):
            HELD.append(torch.ones(MiB))
    HELD.clear()


def test_what_a_block_left_alive_is_named_with_what_holds_it():
    kept = []
    with pytest.raises(LimitError) as caught, measure("work", retained=0, device="cpu") as block:
        kept.append(torch.ones(MiB))
    held = ", still held by kept[0] in test_what_a_block_left_alive_is_named_with_what_holds_it ("
    assert f"{held}test_block.py:" in str(caught.value)
    assert block.retained.holders[0].size_bytes == 4 * MiB


def test_a_block_prints_its_name_and_its_numbers():
    block = measure("step", device="cpu")
    assert repr(block) == "<'step' has no numbers: nothing has been measured yet>"
    with block:
        assert repr(block) == "<'step' has no numbers: it is still open>"
        with block.region("part") as part:
            assert repr(part).startswith("<the region 'part' is still open; ")
        kept = torch.ones(MiB // 4)
        del kept
    assert repr(block) == "<'step': peak 1.0 MiB, retained 0 B>"
    assert repr(part) == "<'part': peak 0 B, retained 0 B>"


def breaks_in_its_second_step() -> None:
    with measure("loop", growth=0, device="cpu") as block:
        for step in block.steps(6):
            torch.ones(4)
            if step == 1:
                break


def test_a_loop_that_breaks_in_its_second_step_is_told_why_there_is_no_growth():
    with pytest.raises(LimitError, match="ended one step only"):
        breaks_in_its_second_step()
