"""Random numbers are those that a GPU draws from the same seed."""

import itertools
import math

import pytest
import torch
from torch.nn import functional

from pytest_torchmem.simulate.gaps import gaps_so_far
from tests.simulate.test_values_on_a_simulated_gpu import inexact_reads

pytestmark = pytest.mark.usefixtures("gpu")

CUDA = "cuda"

# Printed by others' GPUs: the first numbers are the same on all of them.
PUBLISHED = {
    # storch's documentation of torch.rand
    "rand": (
        0,
        lambda: torch.rand(3, 3, device=CUDA).flatten(),
        [0.3990, 0.5167, 0.0249, 0.9401, 0.9459],
    ),
    # a lecture on fused kernels, torch 2.2
    "randn": (
        0,
        lambda: torch.randn(2, 8, device=CUDA).flatten(),
        [-0.9247, -0.4253, -2.6438, 0.1452, -0.1209, -0.5797, -0.6229, -0.3284, -1.0745, -0.3631],
    ),
    # flashinfer's documentation of LogitsPipe
    "logits": (
        42,
        lambda: torch.randn(2, 2, device=CUDA).flatten(),
        [0.1940, 2.1614, -0.1721, 0.8491],
    ),
    # pytorch/pytorch#79496
    "seed 10": (10, lambda: torch.randn(3, device=CUDA), [-0.1029, 1.6810, -0.2708]),
    # mrdbourke/pytorch-deep-learning#759: the weight and the bias of a layer
    "uniform_": (42, lambda: torch.nn.Linear(1, 1, device=CUDA).weight[0], [0.2259]),
    # pytorch/pytorch#62467, an A6000
    "normal_": (
        43,
        lambda: torch.empty(1, 3, 128, 128, device=CUDA).normal_()[0, :, 0, 0],
        [1.9983, 0.8704, 2.1127],
    ),
    # pytorch/pytorch#97097, an A4000
    "mean and deviation": (
        14,
        lambda: torch.empty(1000, 100, device=CUDA).normal_(5, math.sqrt(5))[0],
        [2.8731, 5.2727, 2.9889],
    ),
    # pytorch/pytorch#143086: the last numbers of an A100, which has fewer threads, are other ones
    "the last of many": (
        1,
        lambda: torch.randn(1, 49 * 12 * 112 * 144, device=CUDA)[0, -3:],
        [-0.6970, -0.7780, 0.3267],
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_seed_gives_the_numbers_that_gpus_have_printed(name, gpu):
    seed, draw, expected = PUBLISHED[name]
    if name == "the last of many" and gpu != "H100":
        pytest.skip("was printed by an H100")
    torch.manual_seed(seed)
    before = inexact_reads()
    found = draw()[: len(expected)].tolist()
    assert found == pytest.approx(expected, abs=6e-5)
    assert inexact_reads() == before


def philox(place, thread, seed):
    """Four words of Philox4x32-10, as Salmon et al. describe it."""
    low = 0xFFFFFFFF
    keys = [seed & low, seed >> 32]
    words = [place & low, place >> 32, thread & low, thread >> 32]
    for _ in range(10):
        first, second = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [
            second >> 32 ^ words[1] ^ keys[0],
            second & low,
            first >> 32 ^ words[3] ^ keys[1],
            first & low,
        ]
        keys = [keys[0] + 0x9E3779B9 & low, keys[1] + 0xBB67AE85 & low]
    return words


def test_the_generator_has_the_published_answers():
    assert philox(0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 2**64 - 1
    assert philox(ones, ones, ones) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


SEED = 2**40 + 7
UNIFORM = [(philox(0, thread, SEED)[0] + 0.5) / 2**32 for thread in range(64)]
LONG = [philox(0, thread, SEED)[0] << 32 | philox(0, thread, SEED)[1] for thread in range(64)]
ROWS = [(word + 0.5) / 2**32 for thread in range(16) for word in philox(0, thread, SEED)]
TWO_DRAWS = [
    (word + 0.5) / 2**32
    for thread in range(8)
    for turn in range(2)
    for word in philox(turn, thread, SEED)
]


def kept(values, share):
    return functional.dropout(values, share).ne(0).float()


def below(numbers, share):
    return [float(number < share) for number in numbers]


def permuted(count, seed):
    """Return the permutation, and how many places have the key of the one before."""
    drawn = [philox(0, thread, seed)[:2] for thread in range(count)]
    bits = math.ceil(math.log2(count - (6 * count**2 + 1) / (12 * math.log(0.9))))
    keys = [((high << 32 | low) % (2**32 - 1) - 2**31) % 2**bits for high, low in drawn]
    order, same = [], 0
    for _, group in itertools.groupby(sorted(range(count), key=keys.__getitem__), keys.__getitem__):
        island = list(group)
        words = philox(1, len(order), seed)  # of the thread of its first place
        for left, word in zip(range(len(island) - 1, 0, -1), words, strict=False):
            taken = word % (left + 1)
            island[left], island[taken] = island[taken], island[left]
            same += 1
        order += island
    return order, same


DRAWS = {
    "rand": (lambda: torch.rand(64, device=CUDA), UNIFORM),
    "double": (
        lambda: torch.rand(64, device=CUDA, dtype=torch.double),
        [((long >> 32) ^ (long & 0xFFFFFFFF) << 21) / 2**53 for long in LONG],
    ),
    "columns": (lambda: torch.empty(8, 8, device=CUDA).t().uniform_().t().flatten(), UNIFORM),
    "between": (lambda: torch.empty(64, device=CUDA).uniform_(-1, 3), [4 * u - 1 for u in UNIFORM]),
    "exponential_": (
        lambda: torch.empty(64, device=CUDA).exponential_(2),
        [-math.log(u) / 2 for u in UNIFORM],
    ),
    "bernoulli_": (lambda: torch.empty(64, device=CUDA).bernoulli_(0.3), below(UNIFORM, 0.3)),
    "bernoulli": (lambda: torch.full((64,), 0.3, device=CUDA).bernoulli(), below(ROWS, 0.3)),
    "randint": (
        lambda: torch.randint(-5, 95, (64,), device=CUDA),
        [(long >> 32) % 100 - 5 for long in LONG],
    ),
    "long": (
        lambda: torch.randint(0, 10**12, (64,), device=CUDA),
        [long % 10**12 for long in LONG],
    ),
    "random_": (
        lambda: torch.empty(64, device=CUDA, dtype=torch.long).random_(),
        [x % 2**63 for x in LONG],
    ),
    "bytes": (
        lambda: torch.empty(64, device=CUDA, dtype=torch.uint8).random_(),
        [(long >> 32) % 256 for long in LONG],
    ),
    "multinomial": (
        lambda: torch.arange(1.0, 65, device=CUDA).multinomial(3),
        sorted(range(64), key=lambda at: (at + 1) / math.log(UNIFORM[at]))[:3],
    ),
    "randperm": (lambda: torch.randperm(64, device=CUDA), permuted(64, SEED)[0]),
    "dropout": (lambda: kept(torch.ones(64, device=CUDA), 0.4), below(ROWS, 0.6)),
    "dropout of halves": (
        lambda: kept(torch.ones(64, device=CUDA).half(), 0.4),
        below(TWO_DRAWS, 0.6),
    ),
    "dropout of an odd number": (
        lambda: kept(torch.ones(63, device=CUDA), 0.4),
        below(UNIFORM[:63], 0.6),
    ),
}


@pytest.mark.parametrize("name", DRAWS)
def test_each_operator_takes_the_words_that_its_kernel_takes(name):
    draw, expected = DRAWS[name]
    torch.manual_seed(SEED)
    host, before = torch.get_rng_state(), inexact_reads()
    found = torch.as_tensor(draw()).tolist()
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert inexact_reads() == before
    assert torch.equal(torch.get_rng_state(), host)


def test_a_draw_goes_on_where_the_one_before_ended():
    torch.manual_seed(0)
    torch.rand(10, device=CUDA)
    found = torch.rand(8, device=CUDA).tolist()  # as the teacher's GPU of a course on Triton has it
    assert found == pytest.approx(
        [0.9722, 0.7910, 0.4690, 0.3300, 0.3345, 0.3783, 0.7640, 0.6405], abs=6e-5
    )


def threads():
    properties = torch.cuda.get_device_properties(0)
    return properties.multi_processor_count * properties.max_threads_per_multi_processor


def words_for(number, together):
    """Return what the thread of an element draws, and which of it is for this element."""
    turn, rest = divmod(number, together * threads())
    place, thread = divmod(rest, threads())
    return philox(turn, thread, SEED), place


def fraction_of(number):
    words, place = words_for(number, 4)
    return (words[place] + 0.5) / 2**32


def normal_of(number):
    words, place = words_for(number, 4)
    size, angle = ((word + 0.5) / 2**32 for word in words[place // 2 * 2 :][:2])
    return math.sqrt(-2 * math.log(size)) * (math.sin, math.cos)[place % 2](math.tau * angle)


def long_of(number):
    words, place = words_for(number, 2)
    return (words[2 * place] << 32 | words[2 * place + 1]) % 2**40


MANY_DRAWS = {
    "rand": (lambda n: torch.rand(n, device=CUDA), fraction_of),
    "randn": (lambda n: torch.randn(n, device=CUDA), normal_of),
    "randint": (lambda n: torch.randint(0, 2**40, (n,), device=CUDA), long_of),
}


@pytest.mark.parametrize("name", MANY_DRAWS)
def test_a_thread_that_draws_again_takes_the_words_of_its_own_stream(name):
    draw, expected = MANY_DRAWS[name]
    torch.manual_seed(SEED)
    once = threads()
    drawn = draw(4 * once + 5).cpu()
    for number in (
        0,
        1,
        once - 1,
        once,
        2 * once + 3,
        3 * once,
        4 * once - 1,
        4 * once,
        4 * once + 4,
    ):
        assert drawn[number].item() == pytest.approx(expected(number), abs=1e-5)


def test_a_kernel_draws_along_memory_and_not_along_axes():
    def drawn(tensor):
        torch.manual_seed(SEED)
        return tensor.normal_().cpu()

    rows = drawn(torch.empty(4, 6, device=CUDA))
    assert torch.equal(drawn(torch.empty(6, 4, device=CUDA).t()), rows.view(6, 4).t())
    assert torch.equal(drawn(torch.empty(4, 9, device=CUDA)[:, :6]), rows)


def test_places_that_have_the_same_key_are_shuffled():
    shuffles = 0
    for seed in range(60):
        torch.manual_seed(seed)
        expected, same = permuted(64, seed)
        assert torch.randperm(64, device=CUDA).tolist() == expected
        shuffles += same
    assert shuffles > 1
    assert torch.equal(torch.randperm(40000, device=CUDA).sort()[0].cpu(), torch.arange(40000))


INEXACT = {
    "poisson": lambda: torch.poisson(torch.full((8,), 3.0, device=CUDA)),
    "with replacement": lambda: torch.ones(8, device=CUDA).multinomial(4, replacement=True),
    "gamma": lambda: torch._standard_gamma(torch.ones(8, device=CUDA)),
}


@pytest.mark.parametrize("name", INEXACT)
def test_a_draw_whose_kernel_is_not_known_is_not_exact(name):
    torch.manual_seed(SEED)
    before = gaps_so_far()
    first = INEXACT[name]().tolist()
    assert gaps_so_far() != before
    torch.manual_seed(SEED)
    assert INEXACT[name]().tolist() == first
