"""Random numbers on a simulated GPU: those that the GPU draws with the same seed."""

import math

import pytest
import torch

pytestmark = pytest.mark.usefixtures("gpu")

CUDA = "cuda"

# What torch prints on NVIDIA's GPUs, of whatever kind: so few numbers are a thread's first each.
ON_A_GPU = {
    "uniform": (
        lambda: torch.rand(10, device=CUDA),
        [0.3990, 0.5167, 0.0249, 0.9401, 0.9459, 0.7967, 0.4150, 0.8203, 0.2290, 0.9096],
    ),
    "the second draw": (
        lambda: (torch.rand(10, device=CUDA), torch.rand(10, device=CUDA))[1],
        [0.9722, 0.7910, 0.4690, 0.3300, 0.3345, 0.3783, 0.7640, 0.6405, 0.1103, 0.3594],
    ),
    "normal": (
        lambda: torch.randn(2, 3, device=CUDA).flatten(),
        [-0.9247, -0.4253, -2.6438, 0.1452, -0.1209, -0.5797],
    ),
}


@pytest.mark.parametrize("name", ON_A_GPU)
def test_a_seed_draws_what_it_draws_on_a_gpu(name):
    draw, expected = ON_A_GPU[name]
    torch.manual_seed(0)
    assert draw().tolist() == pytest.approx(expected, abs=6e-5)


def test_a_seed_draws_another_number_where_it_is_another():
    torch.manual_seed(42)
    expected = [0.1940, 2.1614, -0.1721, 0.8491, -1.9244, 0.6530, -0.6494, -0.8175]
    assert torch.randn(8, device=CUDA).tolist() == pytest.approx(expected, abs=6e-5)


def words_of(seed, thread, round_):
    """Philox4x32-10, after Salmon et al., Parallel random numbers: as easy as 1, 2, 3."""
    counter, key = [round_, 0, thread, 0], [seed, 0]
    for _ in range(10):
        high, low = divmod(0xD2511F53 * counter[0], 2**32), divmod(0xCD9E8D57 * counter[2], 2**32)
        counter = [low[0] ^ counter[1] ^ key[0], low[1], high[0] ^ counter[3] ^ key[1], high[1]]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


def threads():
    properties = torch.cuda.get_device_properties(0)
    return properties.multi_processor_count * properties.max_threads_per_multi_processor


def words_at(seed, number, together=4):
    """Return what the thread of an element draws for it and others, and its place among them."""
    round_, rest = divmod(number, together * threads())
    place, thread = divmod(rest, threads())
    return words_of(seed, thread, round_), place


def places():
    once = threads()
    return [0, 1, once - 1, once, 2 * once + 3, 3 * once, 4 * once - 1, 4 * once, 4 * once + 4]


def test_a_thread_that_draws_again_takes_the_words_of_its_own_sequence():
    torch.manual_seed(7)
    drawn = torch.rand(4 * threads() + 5, device=CUDA).cpu()
    for number in places():
        words, place = words_at(7, number)
        assert drawn[number].item() == pytest.approx((words[place] + 0.5) / 2**32, abs=1e-7)


def test_two_words_make_a_pair_of_normal_numbers():
    torch.manual_seed(7)
    drawn = torch.randn(4 * threads() + 5, device=CUDA).cpu()
    for number in places():
        words, place = words_at(7, number)
        size, angle = ((word + 0.5) / 2**32 for word in words[place // 2 * 2 :][:2])
        turned = (math.sin, math.cos)[place % 2](math.tau * angle)
        expected = math.sqrt(-2 * math.log(size)) * turned
        assert drawn[number].item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("most", [10, 2**40])
def test_integers_are_the_rest_of_a_word_or_of_two(most):
    torch.manual_seed(7)
    drawn = torch.randint(5, most, (4 * threads() + 5,), device=CUDA).cpu()
    for number in places():
        words, place = words_at(7, number, 4 if most == 10 else 2)
        two = words[2 * place % 4] << 32 | words[2 * place % 4 + 1]
        assert drawn[number].item() == (words[place] if most == 10 else two) % (most - 5) + 5


def test_a_number_in_double_precision_takes_two_words():
    torch.manual_seed(7)
    drawn = torch.rand(threads() + 1, device=CUDA, dtype=torch.float64).cpu()
    for number in (0, 5, threads()):
        words, place = words_at(7, number, 2)
        expected = ((words[2 * place + 1] << 21) ^ words[2 * place]) / 2**53
        assert drawn[number].item() == pytest.approx(expected, abs=1e-15)


def test_other_distributions_are_made_of_the_same_numbers():
    def drawn(fill):
        torch.manual_seed(3)
        return fill(torch.empty(100, device=CUDA)).cpu()

    uniform = drawn(lambda x: x.uniform_())
    torch.testing.assert_close(drawn(lambda x: x.exponential_(2.0)), uniform.log() / -2)
    assert torch.equal(drawn(lambda x: x.bernoulli_(0.3)), (uniform < 0.3).float())
    torch.testing.assert_close(drawn(lambda x: x.uniform_(-1, 3)), uniform * 4 - 1)
    half = drawn(lambda x: x.half().uniform_().float())
    torch.testing.assert_close(half, uniform, atol=1e-3, rtol=0)


def test_a_kernel_draws_along_memory_and_not_along_axes():
    def drawn(tensor):
        torch.manual_seed(3)
        return tensor.normal_().cpu()

    rows = drawn(torch.empty(4, 6, device=CUDA))
    assert torch.equal(drawn(torch.empty(6, 4, device=CUDA).t()), rows.view(6, 4).t())
    assert torch.equal(drawn(torch.empty(4, 9, device=CUDA)[:, :6]), rows)


def test_a_graph_draws_what_the_seed_draws():
    x = torch.empty(8, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.normal_()
    torch.manual_seed(0)
    graph.replay()
    first = x.tolist()
    torch.manual_seed(0)
    assert torch.randn(8, device=CUDA).tolist() == first
