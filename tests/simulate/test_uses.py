"""What a program does with values that it reads, as its text says it: it shows them, or decides."""

import importlib
import itertools
import math
import sys

import numpy as np
import pytest

from pytest_torchmem.simulate.uses import decides

PLACES = []


def item(value=0.5):
    """Return a value, and note who reads it."""
    frames, depth = [], 1
    while (frame := sys._getframe(depth)).f_back:
        frames.append((frame.f_code, frame.f_lasti))
        depth += 1
    PLACES.append(frames)
    return value


class Truth:
    """It is read where somebody asks whether it holds."""

    def __bool__(self):
        return item(False)


def run(*_, **__):
    return 1


class Solver:
    def __init__(self):
        self.residual, self.best = 1.0, 9.0

    def step(self):
        self.residual = item()

    def finished(self):
        return self.residual > 2

    def ends(self, value):
        if value < self.best:
            self.best = value
        return False


class Recorder:
    def save(self, state):
        self.state = state

    def observe(self, value):
        self.last = value


def residual():
    return abs(item())


def is_small(value):
    return value < 0


def a_loop():
    while item() > 1:
        run()


def a_loop_of_a_function():
    while residual() > 1:
        run()


def a_loop_that_ends():
    for _ in range(3):
        value = item() * 2
        if value > 3:
            break


def a_function_of_the_program():
    while is_small(item()):
        run()


def a_lambda():
    enough = lambda: item() > 1  # noqa: E731
    while enough():
        run()


def a_sum_of_many():
    total = sum(item() for _ in range(3))
    if total > 9:
        run()


def a_list_that_is_filtered():
    return [row for row in item([0.1]) if row > 1]


def rows_that_are_taken():
    for row in item([0.1]):
        if row > 1:
            run(row)


def a_size():
    return [0] * len(range(round(item())))


def a_whole_number():
    run(int(item()))


def a_branch_of_an_expression():
    return run() if item() > 1 else None


def what_comes_after_and():
    return item() > 1 and run()


def an_attribute():
    solver = Solver()
    while not solver.finished():
        solver.step()
        solver.residual = 9


def the_truth():
    while Truth():
        run()


def a_case():
    match item():
        case 1:
            run()


def a_name_in_an_expression():
    if (value := item()) > 1:
        run(value)


class Rows:
    def __getitem__(self, place):
        return place


def rows_of_a_tensor(rows=Rows()):  # noqa: B008
    scores = np.asarray(item([0.1]))
    return rows[np.nonzero(scores > 1)[0]]


def a_flag():
    is_done = False
    while not is_done:
        if item() < 3:
            is_done = True


def values_of_a_generator():
    for _ in range(3):
        yield item()


def a_loop_over_a_generator():
    for value in values_of_a_generator():
        if value > 3:
            break


def as_many_as_there_are_values():
    return [run(each) for each in set(item([0.1]))]


def a_table_of_values():
    counts = {}
    for value in item([0.1]):
        counts[value] = counts.get(value, 0) + 1
    return run(len(counts))


def elements_that_are_left():
    return list(map(run, itertools.compress([1], item([0.1]))))


DECIDES = [
    *(a_loop, a_loop_of_a_function, a_loop_that_ends, a_function_of_the_program, a_lambda),
    *(a_sum_of_many, a_list_that_is_filtered, rows_that_are_taken, a_size, a_whole_number),
    *(a_branch_of_an_expression, what_comes_after_and, an_attribute, the_truth, a_case),
    *(a_name_in_an_expression, rows_of_a_tensor),
    *(a_loop_over_a_generator, as_many_as_there_are_values, a_table_of_values),
    *(elements_that_are_left, a_flag),
]


def a_printed_number():
    print(f"loss {item():.3f}", item())


def a_mean():
    total = 0.0
    for _ in range(3):
        total += item()
    print(total / 3)


def a_record():
    best, bad = 9.0, 0
    for _ in range(3):
        value = item()
        if value < best - 0.1:
            best, bad = value, 0
            run(best)
        else:
            bad += 1
            if bad > 1:
                break


def a_moving_mean():
    mean = None
    for _ in range(2):
        value = item()
        mean = value if mean is None else 0.9 * mean + 0.1 * value
    print(mean)


def a_check_of_what_is_finite():
    value = item()
    if not math.isfinite(value) or value != value or value == float("inf"):
        run()


def an_assertion():
    assert item() < 1
    assert not Truth()
    assert item() < 2 and np.sqrt(item()) < run()  # noqa: PT018


def an_error():
    if item() > 3:
        raise ValueError


def a_warning():
    if item() > 3:
        print("large")


def a_rate_by_loss():
    rate, groups = 1.0, [{}]
    for _ in range(2):
        if item() > 0:
            rate *= 0.5
            for group in groups:
                group["rate"] = rate


def a_file_of_the_best(best=9.0):
    is_best = item() < best
    if is_best:
        Recorder().save({"best": best})


def a_history():
    history = {"loss": []}
    for _ in range(3):
        history["loss"].append(item())
    print(min(history["loss"]))


def a_method_of_another_object():
    solver, recorder = Solver(), Recorder()
    recorder.observe(item())
    solver.ends(item())


def a_result_that_nobody_uses():
    residual()
    is_small(item())


def rows_of_an_array():
    scores = np.asarray(item([0.1, 0.2]))
    labels = np.arange(2)
    order = np.argsort(-scores)
    print(labels[order].cumsum(), labels[scores > 1].sum())


def names_of_values():
    metrics = {"loss": item()}
    for name in list(metrics.keys()):
        if not name.startswith("eval_"):
            metrics[f"eval_{name}"] = metrics.pop(name)
    for name, value in metrics.items():
        print([1][len(name) :], value)


def arrays_that_are_put_together():
    losses = item([np.ones(1)])
    print(np.concatenate(losses) if isinstance(losses, list) and losses else losses)


def what_is_known_of_an_array():
    scores = np.asarray(item([0.1, 0.2]))
    while scores.shape[0] > 2:
        run()


SHOWS = [
    *(a_printed_number, a_mean, a_record, a_moving_mean, a_check_of_what_is_finite, an_assertion),
    *(
        an_error,
        a_warning,
        a_history,
        a_rate_by_loss,
        a_file_of_the_best,
        a_method_of_another_object,
        a_result_that_nobody_uses,
    ),
    *(rows_of_an_array, what_is_known_of_an_array, arrays_that_are_put_together),
    names_of_values,
]


def places_of(program):
    PLACES.clear()
    program()
    assert PLACES
    return PLACES


@pytest.mark.parametrize("program", DECIDES, ids=lambda program: program.__name__)
def test_a_program_decides_by_what_it_read(program):
    assert any(decides(frames, is_count=False) for frames in places_of(program))


@pytest.mark.parametrize("program", SHOWS, ids=lambda program: program.__name__)
def test_a_program_shows_what_it_read(program):
    assert not any(decides(frames, is_count=False) for frames in places_of(program))


def a_count_that_is_shown():
    right = 0
    for _ in range(3):
        right += item(1)
    share = right / 3
    print(share)
    assert share < 2


def a_size_by_a_call():
    run(item(1))


def an_element():
    print([1, 2][item(1)])


def sizes_of_calls():
    return list(map(run, item([3])))


def counts_that_are_summed_up():
    print(sum(map(int, item([3]))))


def a_count_that_is_kept():
    Solver().residual = item(1)


@pytest.mark.parametrize(
    ("program", "decided"),
    [
        (a_count_that_is_shown, False),
        (a_size_by_a_call, True),
        (an_element, True),
        (a_count_that_is_kept, True),
        (sizes_of_calls, True),
        (counts_that_are_summed_up, False),
    ],
)
def test_a_count_decides_unless_it_is_only_shown(program, decided):
    assert any(decides(frames, is_count=True) for frames in places_of(program)) is decided


def one_hot():
    return item(3)


def zeros():
    return item(3.0)


def a_function_of_c_that_reads_for_itself():
    one_hot()
    zeros()


def test_what_a_function_of_c_reads_for_itself_makes_a_size():
    count, number = (frames[1:] for frames in places_of(a_function_of_c_that_reads_for_itself))
    assert decides(count, is_count=True)
    assert decides(number, is_count=False)


def a_mask(rows=Rows()):  # noqa: B008
    return rows[item([True])]


def shares_of_a_mask():
    right = np.asarray(item([True])) == np.asarray([True])
    print(right.mean(), right.sum())


@pytest.mark.parametrize(("program", "decided"), [(a_mask, True), (shares_of_a_mask, False)])
def test_a_mask_decides_where_it_takes_elements(program, decided):
    (frames,) = places_of(program)
    assert decides(frames, is_count=False, is_mask=True) is decided


def test_a_function_of_another_file_is_followed(tmp_path, monkeypatch):
    (tmp_path / "ends_of_texts.py").write_text("def ends(value):\n    return value < 3\n")
    (tmp_path / "loops_of_texts.py").write_text(
        "from ends_of_texts import ends\nimport ends_of_texts\n"
        "def by_name(item):\n    while not ends(item()): pass\n"
        "def by_module(item):\n    while not ends_of_texts.ends(item()): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    loops = importlib.import_module("loops_of_texts")
    for loop in (loops.by_name, loops.by_module):
        assert any(decides(f, is_count=False) for f in places_of(lambda loop=loop: loop(item)))


def a_test_that_returns_a_count():
    return item(3)


def test_what_a_test_returns_decides_nothing(tmp_path):
    for folder, decided in (("_pytest", False), ("program", True)):
        file = tmp_path / folder / "python.py"
        file.parent.mkdir()
        file.write_text("def call(function):\n    return work(function())\n")
        names = {"work": run}
        exec(compile(file.read_text(), str(file), "exec"), names)
        (frames,) = places_of(lambda: names["call"](a_test_that_returns_a_count))  # noqa: B023
        assert decides(frames, is_count=True) is decided


def test_a_program_without_a_text_decides_by_counts():
    names = {"item": item, "run": run}
    exec("while item() > 1: run()", names)
    for is_count in (False, True):
        assert decides(PLACES[-1], is_count=is_count) is is_count
