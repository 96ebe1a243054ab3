"""Sizes as people write and read them."""

import math
import sys

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_torchmem.values.errors import DeviceError, MarkerError, SizeError
from pytest_torchmem.values.units import (
    GiB,
    KiB,
    MiB,
    format_apart,
    format_change,
    format_size,
    one_line,
    parse_floor,
    parse_fraction,
    parse_size,
    printable,
    resolve_device,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (17, 17),
        (numpy.int64(17), 17),
        ("0B", 0),
        ("1KiB", 1024),
        ("2GiB", 2 * GiB),
        ("2GB", 2 * 10**9),
        (" 1.5 mib ", 3 * MiB // 2),
        ("1_000kb", 10**6),
        ("9007199254740993B", 9007199254740993),
    ],
)
def test_a_size_is_read(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("value", ["", "1", "GiB", "-1MiB", "1 Gibibyte", -1, 1.0, True, None])
def test_anything_else_is_refused_with_its_slug(value):
    with pytest.raises(SizeError, match=r"\[bad-size\]$"):
        parse_size(value)


@pytest.mark.parametrize("value", [sys.maxsize, 10**30, "99999999TiB", "99999999.5TiB"])
def test_more_than_a_report_can_carry_is_refused(value):
    with pytest.raises(SizeError, match="more than any machine has; for no limit, give None"):
        parse_size(value)


@pytest.mark.parametrize("value", ["2%", "2.0 %", 0.02, "0.02", ".02"])
def test_a_tolerance_is_read(value):
    assert parse_fraction(value) == 0.02


@pytest.mark.parametrize("value", ["2", "1.5", 2, 1, -0.1, "-2%", True, None, "much"])
def test_a_tolerance_without_a_clear_meaning_is_refused(value):
    with pytest.raises(SizeError):
        parse_fraction(value)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KiB, "1.0 KiB"),
        (1023 * KiB + 1023, "1.0 MiB"),
        (214 * MiB + MiB // 10, "214.1 MiB"),
        (-2 * GiB, "-2.0 GiB"),
    ],
)
def test_a_size_is_shown(size, text):
    assert format_size(size) == text


def test_a_change_has_a_sign():
    assert [format_change(size) for size in (32 * MiB, -4, 0)] == ["+32.0 MiB", "-4 B", "+0 B"]


@given(st.lists(st.integers(0, 1 << 50), max_size=4))
def test_sizes_that_differ_read_differently(sizes):
    texts = format_apart(*sizes)
    assert len(set(texts)) == len(set(sizes))


@given(st.integers(0, 1 << 50))
def test_what_is_shown_can_be_read_and_is_near(size):
    assert abs(parse_size(format_size(size)) - size) <= max(size * 0.06, 0)


def test_a_size_that_is_not_a_byte_is_refused():
    with pytest.raises(SizeError, match=r"'0\.3B' is less than a byte"):
        parse_size("0.3B")
    assert parse_size("0.0MiB") == 0


@pytest.mark.parametrize(
    ("floor", "parsed"),
    [("1MiB", (MiB, math.inf)), (0, (0, math.inf)), ("5% up to 1MiB", (MiB, 0.05))],
)
def test_a_floor_is_a_size_or_a_share_up_to_a_size(floor, parsed):
    assert parse_floor(floor) == parsed


@pytest.mark.parametrize("text", ["5% up to", "5 up to 1MiB", "x% up to 1MiB", "5%", "up to 1MiB"])
def test_any_other_floor_is_refused(text):
    with pytest.raises(SizeError):
        parse_floor(text)


@pytest.mark.parametrize("text", ["5%", "5% up to"])
def test_a_share_alone_is_told_what_else_it_needs(text):
    with pytest.raises(SizeError, match=f"'{text}' as a floor; .*: '5% up to 1MiB'"):
        parse_floor(text)


@pytest.mark.parametrize(
    "text",
    ["1iB", "9" * 5000 + "B", "9" * 400 + ".0B", "1_" * 4000 + "1B", 10**400, -(10**5000)],
    ids=lambda text: "" if isinstance(text, int) else text[:9],
)
def test_a_size_that_means_nothing_or_is_more_than_any_machine_has_is_refused(text):
    with pytest.raises(SizeError) as error:
        parse_size(text)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("text", "meant"),
    [("2Gb", "'2GiB', which counts in 1024s, or '2GB' in 1000s"), ("1.5Mib", "'1.5MiB', which *")],
)
def test_what_reads_as_bits_is_asked_about(text, meant):
    with pytest.raises(SizeError, match=f"{text!r} reads as bits; did you mean {meant}"):
        parse_size(text)


@pytest.mark.parametrize("text", ["2gb", "2GB", "2gib", "2GIB", "2B", "2b"])
def test_what_can_only_be_bytes_is_read_in_any_case(text):
    assert parse_size(text) == parse_size(text.upper())


@pytest.mark.parametrize("text", ["9" * 400 + "%", "100001%"])
def test_a_tolerance_beyond_all_use_is_refused(text):
    with pytest.raises(SizeError):
        parse_fraction(text)


def test_a_device_is_the_one_of_its_kind_that_is_there():
    there = ["cpu", "cuda:1"]
    assert resolve_device("cuda", there, "it") == "cuda:1"
    assert resolve_device(" CPU", there, "it") == resolve_device("cpu:0", there, "it") == "cpu"
    assert resolve_device("CUDA:1", there, "it") == "cuda:1"
    for name in ("gpu", "cuda:0", "cuda:11", ""):
        with pytest.raises(DeviceError, match=f"it has no memory on '{name}'; it has: cpu, cuda:1"):
            resolve_device(name, there, "it")
    with pytest.raises(DeviceError, match="it has 2 devices called cuda: cuda:0, cuda:1"):
        resolve_device("cuda", ["cuda:0", "cuda:1"], "it")
    with pytest.raises(MarkerError, match="device: 5 is not a device"):
        resolve_device(5, there, "it")


def test_what_a_terminal_would_obey_is_shown_as_its_escape():
    assert printable("a\x1b[2Jb\u202e\ud800") == r"a\x1b[2Jb\u202e\ud800"
    assert one_line("a\nb\x07") == r"a b\x07"
    assert printable("größe 🙂") == one_line("größe 🙂") == "größe 🙂"
