"""Environments: their names, and which one is nearest."""

import pytest

from pytest_torchmem.values.baseline import complete, environment_name, nearest

H200 = complete(
    {"device": "NVIDIA H200", "capability": "sm90", "torch": "2.13", "runtime": "cuda12"}
)
CPU = complete({"device": "cpu", "torch": "2.13"})


@pytest.mark.parametrize(
    ("near", "far"),
    [
        ({"torch": "2.12"}, {"torch": "2.10"}),
        ({"torch": "2.14"}, {"torch": "2.11"}),
        ({"torch": "2.12"}, {"torch": "2.14"}),  # of two at equal distance, the older
        ({"torch": "2.9"}, {"torch": "3.13"}),
        ({"torch": "2.1"}, {"device": "NVIDIA H100"}),
        ({"runtime": "cuda13"}, {"torch": "2.12"}),
        ({"allocator": "x"}, {"runtime": "cuda13"}),
        ({"libraries": "x"}, {"allocator": "x"}),
        ({"device": "NVIDIA H100"}, {"device": "NVIDIA A100", "capability": "sm80"}),
    ],
)
def test_the_order_of_fallback(near, far):
    others = [{**H200, **far}, {**H200, **near}]
    assert nearest(H200, others) == {**H200, **near}
    assert nearest(H200, reversed(others)) == {**H200, **near}


def test_a_gpu_and_the_cpu_are_never_near():
    assert nearest(H200, [CPU]) is None
    assert nearest(CPU, [H200]) is None
    assert nearest(CPU, [H200, {**CPU, "torch": "1.0"}]) == {**CPU, "torch": "1.0"}


def test_an_environment_is_not_its_own_neighbour():
    assert nearest(CPU, [CPU]) is None
    assert nearest(CPU, [{"device": "cpu", "torch": "2.13"}]) is None  # as format 1 had it


def test_the_name_says_what_is_not_usual_and_nothing_else():
    assert environment_name(CPU) == "cpu-torch2.13"
    assert environment_name(H200) == "nvidia-h200-sm90-cuda12-torch2.13"
    rocm = {"device": "AMD Instinct MI300X", "capability": "gfx942", "runtime": "rocm6"}
    assert environment_name({**H200, **rocm}) == "amd-instinct-mi300x-gfx942-rocm6-torch2.13"


def test_what_this_machine_is_has_all_parts(monkeypatch):
    from pytest_torchmem.record import environment as of_devices
    from pytest_torchmem.record.environment import environment
    from pytest_torchmem.values.baseline import KEYS

    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    usual = environment("cpu")
    assert sorted(usual) == sorted(KEYS)
    assert usual["libraries"] == ""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert environment("cpu")["libraries"] == "ONEDNN_MAX_CPU_ISA=AVX2"
    monkeypatch.setattr(of_devices.platform, "machine", lambda: "aarch64")  # type: ignore[attr-defined]
    assert environment_name(environment("cpu")).startswith("cpu-arm64-torch")
    monkeypatch.setattr(of_devices.platform, "machine", lambda: "AMD64")  # type: ignore[attr-defined]
    assert environment("cpu")["capability"] == ""


def test_a_rank_of_a_job_has_a_name_of_its_own():
    rank = complete({"device": "cpu", "torch": "2.13", "rank": "1 of 2"})
    assert environment_name(rank) == "cpu-torch2.13-rank1of2"
