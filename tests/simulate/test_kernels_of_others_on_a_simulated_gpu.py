"""What other libraries' kernels write is computed on the CPU, or counts as not exact."""

import ctypes
import re
import shutil
import subprocess

import pytest
import torch

from pytest_torchmem import measure
from pytest_torchmem.simulate import build

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("gpu")]

CUDA = "cuda"
# As nvcc has it for `__global__ void keep(const float* scores, long* kept)`.
SOURCE = """
struct Grid { unsigned x, y, z; };
extern "C" {
void** __cudaRegisterFatBinary(void*);
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*,
                            void*, int*);
int cudaLaunchKernel(const void*, Grid, Grid, void**, unsigned long, void*);
static char binary[64];
static void keep() {}
void start(const float* scores, long* kept) {
  static void** library = nullptr;
  if (!library) {
    library = __cudaRegisterFatBinary(binary);
    __cudaRegisterFunction(library, (char*)keep, nullptr, "_Z4keepPKfPl", -1, 0, 0, 0, 0, nullptr);
  }
  void* arguments[] = {&scores, &kept};
  cudaLaunchKernel((void*)keep, {1, 1, 1}, {1, 1, 1}, arguments, 0, nullptr);
}
}
"""


# As `torch.utils.cpp_extension` links what it has compiled for CUDA.
EXTENSION = """
extern "C" int cudaGetDeviceCount(int*);
extern "C" int count() { int found = 0; cudaGetDeviceCount(&found); return found; }
"""


def compiled(folder, source, *libraries):
    if not (compiler := shutil.which("g++")):
        pytest.skip("needs g++")
    (folder / "source.cpp").write_text(source)
    built = folder / "libbuilt.so"
    command = [compiler, "-shared", "-fPIC", folder / "source.cpp", *libraries, "-o", built]
    subprocess.run(command, check=True, timeout=120)
    return ctypes.CDLL(str(built))


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Start a kernel that reads one tensor and writes into another."""
    if not torch.cuda.is_available():
        pytest.skip("needs a simulated GPU: `.ci/cuda` runs this test on one")
    torch.ones(1, device=CUDA)  # the GPU was looked for when the library is loaded
    function = compiled(tmp_path_factory.mktemp("library"), SOURCE).start
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return lambda scores, kept: function(scores.data_ptr(), kept.data_ptr())


@pytest.fixture
def library():
    """A library of operators; what it registers is there while a test runs."""
    with torch.library._scoped_library("torchmem_test", "DEF") as made:
        made.define("keep(Tensor scores) -> Tensor")
        yield made


@pytest.fixture(autouse=True)
def _on_a_gpu(gpu):
    assert gpu


@pytest.mark.parametrize("place", [0, 3])
def test_what_a_kernel_of_another_library_may_write_is_not_exact(start, place):
    scores, kept = torch.ones(8, device=CUDA), torch.zeros(8, dtype=torch.long, device=CUDA)
    start(scores, kept[place:])
    with measure(device=CUDA) as measured:
        assert scores.tolist() == [1.0] * 8
        assert kept[:place].tolist() == [0] * place
    assert not measured.result.blind_spots
    with measure(device=CUDA) as measured:
        assert kept.tolist() == [0] * 8
    (said,) = measured.result.blind_spots
    assert "values that are not exact on a simulated GPU once, " in said


def kept_by_kernel(start):
    def on_gpu(scores):
        mask = torch.zeros(len(scores), dtype=torch.long, device=CUDA)
        start(scores, mask)
        return mask.nonzero().flatten()

    return on_gpu


def test_an_operator_of_another_library_returns_what_its_kernel_for_the_cpu_returns(start, library):
    library.impl("keep", lambda scores: (scores > 0.5).nonzero().flatten(), "CPU")
    library.impl("keep", kept_by_kernel(start), "CUDA")
    scores = torch.tensor([0.9, 0.1, 0.7], device=CUDA)
    with measure(device=CUDA) as measured:
        assert torch.ops.torchmem_test.keep(scores).tolist() == [0, 2]
    assert not measured.result.blind_spots


def test_what_another_library_cannot_compute_on_the_cpu_is_told_when_it_decides_a_shape(
    start, library
):
    library.impl("keep", kept_by_kernel(start), "CUDA")
    scores = torch.tensor([0.9, 0.1, 0.7], device=CUDA)
    with measure(device=CUDA) as measured:
        assert torch.ops.torchmem_test.keep(scores).tolist() == []
    assert any("not exact" in said for said in measured.result.blind_spots)


def test_what_another_library_computes_with_torchs_operators_stays(library):
    library.impl("keep", lambda scores: scores * 3, "CPU")
    library.impl("keep", lambda scores: scores * 2, "CUDA")
    assert torch.ops.torchmem_test.keep(torch.ones(2, device=CUDA)).tolist() == [2.0, 2.0]


def test_an_extension_is_linked_with_cuda_libraries_and_needs_them_by_their_versions(tmp_path):
    library = compiled(tmp_path, EXTENSION, "-lcudart", "-lcublas")
    assert library.count() == torch.cuda.device_count()
    needed = build.ElfFile(tmp_path / "libbuilt.so").linked_with()
    assert any(re.fullmatch(r"libcudart\.so\.\d+", name) for name in needed)
