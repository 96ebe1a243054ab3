"""What allocator settings mean, read from their text and compared with the installed torch."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_torchmem.allocator import (
    UNLIMITED_BYTES,
    AllocatorSettings,
    AllocatorSettingsError,
)
from pytest_torchmem.values.units import GiB, KiB, MiB

parse = AllocatorSettings.parse


def test_no_text_means_the_defaults():
    assert parse("") == AllocatorSettings()
    assert AllocatorSettings().max_split_bytes == UNLIMITED_BYTES
    assert AllocatorSettings().large_segment_bytes == 20 * MiB


def test_every_option_is_read():
    read = parse(
        " max_split_size_mb : 128, max_non_split_rounding_mb:64,\t"
        "roundup_power2_divisions:4,garbage_collection_threshold:0.8,"
        "per_process_memory_fraction:0.5,expandable_segments:True,"
        "large_segment_size_mb:40,throw_on_cudamalloc_oom:True,"
    )
    assert read == AllocatorSettings(
        large_segment_bytes=40 * MiB,
        max_split_bytes=128 * MiB,
        max_non_split_rounding_bytes=64 * MiB,
        power2_divisions=(4,) * 16,
        garbage_collection_threshold=0.8,
        per_process_memory_fraction=0.5,
        expandable_segments=True,
        throw_on_cudamalloc_oom=True,
    )


def test_a_larger_segment_size_is_also_the_rounding_limit_wherever_it_stands():
    assert parse("large_segment_size_mb:64").max_non_split_rounding_bytes == 64 * MiB
    with pytest.raises(AllocatorSettingsError, match="at least 64"):
        parse("max_split_size_mb:32,large_segment_size_mb:64")


def test_options_of_the_pinned_host_allocator_change_nothing():
    text = "pinned_use_background_threads:True,pinned_num_register_threads:8,backend:native"
    assert parse(text) == AllocatorSettings()


def test_a_list_of_divisions_names_sizes_in_megabytes():
    divisions = parse("roundup_power2_divisions:[64:8,256:4,>:2]").power2_divisions
    # 1 to 64 MiB from the first entry; 128 MiB has no entry of its own; above 256 MiB the last.
    assert divisions == (8, 8, 8, 8, 8, 8, 8, 0, 4, 2, 2, 2, 2, 2, 2, 2)


def test_before_torch_2_10_the_rest_of_a_list_replaces_its_last_entry():
    text = "roundup_power2_divisions:[64:8,256:4,>:2]"
    assert AllocatorSettings.parse(text, (2, 9)).power2_divisions[8:] == (2,) * 8
    assert AllocatorSettings.parse(text, (2, 10)).power2_divisions[8:] == (4, *(2,) * 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("backend:cudaMallocAsync", "cannot be simulated"),
        ("graph_capture_record_stream_reuse:True", "cannot be simulated"),
        ("no_such_option:1", "unknown allocator option 'no_such_option'"),
        ("max_split_size_mb:19", "at least 20, got 19"),
        ("max_split_size_mb:-1", "whole number"),
        ("max_split_size_mb:", "whole number"),
        ("large_segment_size_mb:10", "at least 11"),
        ("max_non_split_rounding_mb:1", "at least 20"),
        ("garbage_collection_threshold:0.0", "between 0 and 1"),
        ("garbage_collection_threshold:1.0", "between 0 and 1"),
        ("garbage_collection_threshold:often", "between 0 and 1"),
        ("per_process_memory_fraction:1.5", "between 0 and 1"),
        ("expandable_segments:true", "True or False"),
        ("roundup_power2_divisions:3", "powers of two"),
        ("roundup_power2_divisions:[3:4]", "powers of two"),
        ("roundup_power2_divisions:[4:3]", "powers of two"),
        ("roundup_power2_divisions:[4:2", "cannot read"),
        ("max_split_size_mb", "cannot read"),
        ("max_split_size_mb:32;expandable_segments:True", "whole number"),
    ],
)
def test_what_torch_refuses_or_we_cannot_simulate_is_an_error_that_says_so(text, message):
    with pytest.raises(AllocatorSettingsError, match=message) as caught:
        parse(text)
    assert str(caught.value).endswith("[bad-allocator-settings]")


@pytest.mark.parametrize(
    ("request_bytes", "block_bytes"),
    [(1, 512), (511, 512), (512, 512), (513, 1024), (MiB, MiB), (MiB + 1, MiB + 512)],
)
def test_blocks_are_multiples_of_512_bytes(request_bytes, block_bytes):
    assert AllocatorSettings().block_bytes(request_bytes) == block_bytes


@pytest.mark.parametrize(
    ("request_bytes", "block_bytes"),
    [
        (1200 * KiB, 1280 * KiB),  # between 1 and 2 MiB in steps of 256 KiB
        (1280 * KiB, 1280 * KiB),
        (2 * MiB, 2 * MiB),  # a power of two stays
        (2 * MiB - 1, 2 * MiB),
        (2048, 2048),  # not above 4 * 512: plain rounding
        (2049, 2560),  # above: between 2048 and 4096 in steps of 512
        (5000, 5120),
    ],
)
def test_four_divisions_put_three_steps_between_powers_of_two(request_bytes, block_bytes):
    assert parse("roundup_power2_divisions:4").block_bytes(request_bytes) == block_bytes


def test_one_division_is_plain_rounding():
    assert parse("roundup_power2_divisions:1").block_bytes(1200 * KiB + 1) == 1200 * KiB + 512


@pytest.mark.parametrize(
    ("block_bytes", "segment_bytes"),
    [
        (512, 2 * MiB),
        (MiB, 2 * MiB),
        (MiB + 512, 20 * MiB),
        (10 * MiB - 512, 20 * MiB),
        (10 * MiB, 10 * MiB),
        (10 * MiB + 512, 12 * MiB),
        (1 * GiB, 1 * GiB),
    ],
)
def test_segments_come_in_three_sizes(block_bytes, segment_bytes):
    assert AllocatorSettings().segment_bytes(block_bytes) == segment_bytes


@settings(deadline=None)
@given(st.integers(1, 70 * GiB), st.sampled_from([0, 1, 2, 4, 8, 16, 64, 1024, 2**20]))
def test_a_block_is_a_multiple_of_512_and_less_than_twice_the_request(request_bytes, divisions):
    rules = AllocatorSettings(power2_divisions=(divisions,) * 16)
    block_bytes = rules.block_bytes(request_bytes)
    assert block_bytes % 512 == 0
    assert request_bytes <= block_bytes < max(2 * request_bytes, 1024)


# torch exports the function that looks the divisions up, so its parser can be compared with ours
# on a machine without a GPU.
_LOOK_UP = "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm"


@pytest.fixture
def torch_divisions():
    torch = pytest.importorskip("torch")
    if not hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        pytest.skip("this torch does not parse allocator settings without CUDA")
    spec = importlib.util.find_spec("torch")
    library = Path(spec.origin).parent / "lib" / "libc10.so"  # type: ignore[arg-type]
    try:
        look_up = getattr(ctypes.CDLL(str(library)), _LOOK_UP)
    except (OSError, AttributeError):
        pytest.skip("this torch does not export its look-up of divisions")
    look_up.argtypes, look_up.restype = [ctypes.c_size_t], ctypes.c_size_t

    def read(text):
        torch._C._accelerator_setAllocatorSettings(text)
        return tuple(look_up(MiB << slot) for slot in range(16))

    yield read
    torch._C._accelerator_setAllocatorSettings("")


@pytest.mark.parametrize(
    "value",
    [
        "4",
        "[256:1,512:2,1024:4,>:8]",
        "[64:8,256:4]",
        "[1:8,>:2]",
        "[>:4]",
        "[32768:2]",
        "[65536:4,>:8]",
        "[512:0,1024:16]",
    ],
)
def test_divisions_are_read_as_the_installed_torch_reads_them(torch_divisions, value):
    text = f"roundup_power2_divisions:{value}"
    assert parse(text).power2_divisions == torch_divisions(text)


@pytest.mark.parametrize(
    "text",
    [
        "max_split_size_mb:19",
        "large_segment_size_mb:10",
        "max_non_split_rounding_mb:1",
        "garbage_collection_threshold:1.0",
        "expandable_segments:true",
        "roundup_power2_divisions:3",
        "roundup_power2_divisions:[3:4]",
        "roundup_power2_divisions:[4:3]",
        "max_split_size_mb:32,large_segment_size_mb:64",
    ],
)
def test_the_installed_torch_refuses_what_we_refuse(torch_divisions, text):
    with pytest.raises(Exception, match=r".+"):
        torch_divisions(text)
    with pytest.raises(AllocatorSettingsError):
        parse(text)
