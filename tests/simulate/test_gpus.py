"""The names of GPUs, and those that are described."""

import pytest

from pytest_torchmem.simulate.gpus import GPUS, parse_gpu
from pytest_torchmem.values.errors import SimulationError
from pytest_torchmem.values.units import GiB, MiB


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_each_model_is_found_by_its_name(gpu):
    assert parse_gpu(gpu.name) == gpu
    assert parse_gpu(f"{gpu.name.lower()}x8").count == 8


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("NVIDIA H100", "H100"),
        ("rtx 4090", "RTX4090"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("Tesla T4", "T4"),
        ("A100-80GB", "A100"),
        ("a100 40gb", "A100-40GB"),
    ],
)
def test_a_name_is_found_as_people_write_it(written, name):
    assert parse_gpu(written).name == name


def test_a_gpu_can_be_described():
    gpu = parse_gpu("capability=8.7,memory=64GiB,processors=16,count=2")
    assert (gpu.capability, gpu.memory_bytes, gpu.processors, gpu.count) == (
        (8, 7),
        64 * GiB,
        16,
        2,
    )
    assert gpu.shown == "simulated GPU 64GiB"
    assert gpu.cache_bytes == 50 * MiB


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("H1000", "no GPU is called 'H1000'; known are B200"),
        ("", "no GPU is called ''"),
        ("H100x0", "0 is not a number from 1 to 64"),
        ("H100x65", "65 is not a number"),
        ("memory=80GiB", "does not say capability"),
        ("capability=9.0", "does not say memory"),
        ("capability=9,memory=80GiB", "capability=9 is not a compute capability"),
        ("capability=9.0,memory=much", "memory=much"),
        ("capability=9.0,memory=80GiB,cores=3", "'cores=3' says nothing about a GPU"),
        ("capability=9.0,memory=80GiB,processors=0", "0 is not a number from 1"),
    ],
)
def test_what_names_no_gpu_is_told(written, said):
    with pytest.raises(SimulationError) as raised:
        parse_gpu(written)
    assert said in str(raised.value)
    assert str(raised.value).endswith("[not-simulated]")
