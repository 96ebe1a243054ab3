"""Lines of inductor's generated code: which kernel a buffer is for, and what that computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_torchmem.record.compiled.inductor import Kernel, kernels_by_line

pytestmark = pytest.mark.compiles

CPU = """\
cpp_fused_gelu_1 = async_compile.cpp_pybinding(['const float*', 'float*'], r'''
''')

class Runner:
    def call(self, args):
        primals_1, primals_2 = args
        args.clear()
        buf0 = empty_strided_cpu((8, 1), (1, 8), torch.float32)
        buf1 = buf0; del buf0  # reuse
        assert_size_stride(primals_1, (8, 8), (8, 1), 'input')
        cpp_fused_native_layer_norm_native_layer_norm_backward_sum_0(primals_1, buf1)
        buf2 = empty_strided_cpu((8, 8), (8, 1), torch.float32)
        # Topologically Sorted Source Nodes: [h, h_1], Original ATen: [aten.t, aten.addmm]
        extern_kernels.addmm(primals_2, buf1, primals_1, alpha=1, beta=1, out=buf2)
        del primals_1
        buf3 = empty_strided_cpu((8, 8), (8, 1), torch.float32)
        buf4 = reinterpret_tensor(buf3, (64, ), (1, ), 0); del buf3  # reuse
        cpp_fused_gelu_1(buf2, buf4)
        return (buf4, )
"""

TRITON = """\
def call(args):
    arg0_1, = args
    args.clear()
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        buf0 = empty_strided_cuda((8, 8), (8, 1), torch.float32)
        # Topologically Sorted Source Nodes: [x], Original ATen: [aten.relu, mylib.scale]
        stream0 = get_raw_stream(0)
        triton_poi_fused_relu_scale_0.run(arg0_1, buf0, 64, stream=stream0)
        buf1 = empty_strided_cuda((8, 8), (8, 1), torch.float32)
        # Unsorted Source Nodes: [], Original ATen: []
        stream0 = get_raw_stream(0)
        triton_per_fused__softmax_1.run(buf0, buf1, 8, 8, stream=stream0)
        # Topologically Sorted Source Nodes: [y], Original ATen: [aten.convolution]
        buf2 = extern_kernels.convolution(buf1, arg0_1, stride=(1, 1))
    return (buf2, )
"""


@pytest.fixture
def kernel_at(tmp_path: Path):
    """The kernel of the line that begins with some text."""

    def find(source: str, text: str) -> Kernel | None:
        path = tmp_path / f"c{hash(source)}.py"
        path.write_text(source)
        line = next(n for n, t in enumerate(source.splitlines(), 1) if t.strip().startswith(text))
        return kernels_by_line(str(path)).get(line)

    return find


@pytest.mark.slow
def test_a_buffer_belongs_to_the_first_kernel_that_is_given_it(kernel_at):
    assert kernel_at(CPU, "buf2 =") == Kernel("aten::addmm", ("h", "h_1"))
    assert kernel_at(TRITON, "buf0 =") == Kernel("aten::relu+mylib::scale", ("x",))


@pytest.mark.slow
def test_views_are_named_only_where_there_is_nothing_else(kernel_at):
    assert kernel_at(CPU.replace(", aten.addmm", ""), "buf2 =") == Kernel("aten::t", ("h", "h_1"))


def test_a_buffer_is_followed_through_other_names(kernel_at):
    expected = "aten::native_layer_norm+native_layer_norm_backward+sum"
    assert kernel_at(CPU, "buf0 =") == Kernel(expected)
    assert kernel_at(CPU, "buf3 =") == Kernel("aten::gelu")


def test_another_name_for_an_argument_is_no_buffer(kernel_at):
    view = "buf4 = reinterpret_tensor(buf3"
    source = CPU.replace(
        view, f"buf9 = reinterpret_tensor(primals_2, (8, ), (1, ), 0)\n        {view}"
    )
    assert "buf9" in source
    assert kernel_at(source, "buf9 =") is None
    assert kernel_at(source, "buf3 =") == Kernel("aten::gelu")


def test_a_kernel_without_a_comment_is_explained_by_its_name(kernel_at):
    assert kernel_at(TRITON, "buf1 =") == Kernel("aten::_softmax")
    assert kernel_at(CPU, "cpp_fused_gelu_1(") == Kernel("aten::gelu")
    unknown = CPU.replace("cpp_fused_gelu_1(", "cpp_fused_flash_mystery_1(")
    assert kernel_at(unknown, "buf3 =") == Kernel("cpp_fused_flash_mystery_1")


def test_a_line_that_calls_an_operator_is_known_too(kernel_at):
    assert kernel_at(TRITON, "buf2 =") == Kernel("aten::convolution", ("y",))


def test_lines_that_run_nothing_stand_for_nothing(kernel_at):
    for text in ("args.clear()", "assert_size_stride", "return"):
        assert kernel_at(CPU, text) is None


def test_a_file_that_cannot_be_read_explains_nothing(tmp_path):
    (tmp_path / "broken.py").write_text("def call(")
    assert kernels_by_line(str(tmp_path / "broken.py")) == {}
    assert kernels_by_line(str(tmp_path / "missing.py")) == {}
