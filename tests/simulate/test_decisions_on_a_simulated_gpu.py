"""What decides a shape, a count or a branch is computed at any size, or said with its line."""

import io
import math

import pytest
import torch
from torch.nn import functional

from pytest_torchmem import measure
from pytest_torchmem.simulate.gaps import decision_sentence, gaps_so_far
from pytest_torchmem.values.units import MiB

pytestmark = pytest.mark.usefixtures("gpu")

CUDA = "cuda"
MANY = 6 * MiB  # more elements than are computed of floats, in bytes of any kind


@pytest.fixture
def undecided(gpu):
    """Fail the test if something rests on values that nobody computed."""
    before = gaps_so_far()
    yield
    assert decision_sentence(before) == ""


def not_computed(*sizes):
    """Scores of a product that is too large to be computed, cut down to the sizes asked for."""
    product = torch.ones(2048, 2048, device=CUDA) @ torch.ones(2048, 2048, device=CUDA)
    return product.flatten()[: torch.Size(sizes).numel()].view(sizes)


INTEGERS = {
    "one_hot": lambda x: functional.one_hot(x[: MANY // 64] % 64, 64).sum(dim=0),
    "eq": lambda x: (x == 3).sum(),
    "any": lambda x: (x > 98).any(),
    "nonzero": lambda x: (x == 3).nonzero()[:4],
    "a mask": lambda x: x[x == 3].sum(),
    "sum": lambda x: x.sum(),
    "cumsum": lambda x: (x == 3).cumsum(0)[-5:],
    "scatter": lambda x: torch.zeros_like(x).scatter(0, x, 1)[:120],
    "topk": lambda x: x.view(-1, 1024).topk(3)[0][-3:],
    "sort": lambda x: x.sort(stable=True)[1][:5],
    "unique": lambda x: torch.unique(x, return_counts=True)[1],
    "bincount": torch.bincount,
    "searchsorted": lambda x: torch.searchsorted(x.sort()[0], torch.arange(5).to(x.device)),
    "where": lambda x: torch.where(x == 3, x, -x).sum(),
    "isin": lambda x: torch.isin(x, torch.tensor([1, 2]).to(x.device)).sum(),
    "repeat_interleave": lambda x: torch.repeat_interleave(x[: MANY // 8] % 2).shape[0],
}


@pytest.mark.usefixtures("undecided")
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_and_masks_are_computed_at_any_size(name):
    values = torch.arange(MANY) * 31 % 101
    call = INTEGERS[name]
    expected, found = call(values), call(values.to(CUDA))
    assert torch.equal(torch.as_tensor(found).cpu(), torch.as_tensor(expected))


@pytest.mark.usefixtures("undecided")
@pytest.mark.parametrize("tokens", [511, 4096])
def test_a_mixture_of_many_experts_runs_the_experts_that_its_tokens_chose(tokens):
    logits = torch.randn(tokens, 128, device=CUDA)
    chosen = logits.topk(8)[1]
    mask = functional.one_hot(chosen, 128).permute(2, 1, 0)
    hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    assert len(hit) == 128
    rows = sum(len(torch.where(mask[int(expert)])[0]) for expert in hit)
    assert rows == tokens * 8


@pytest.mark.usefixtures("undecided")
@pytest.mark.parametrize("tokens", [64, 16384])
def test_a_router_whose_scores_are_not_computed_gives_each_expert_as_much(tokens):
    chosen = not_computed(tokens, 128).topk(2)[1]
    counts = torch.bincount(chosen.flatten(), minlength=128)
    assert counts.tolist() == [tokens * 2 // 128] * 128


REDUCED = {
    "mean": lambda x: x.mean(dtype=torch.float32),
    "mean of a mask": lambda x: (x == 3).mean(dtype=torch.float32),
    "norm": lambda x: x.sum(dtype=torch.float32) / 2,
    "half": lambda x: (x[: 2 * MiB] / 2).sum() > 1e6,
}


@pytest.mark.usefixtures("undecided")
@pytest.mark.parametrize("name", REDUCED)
def test_integers_that_become_other_numbers_are_computed_at_any_size(name):
    values = torch.arange(MANY) * 31 % 101
    call = REDUCED[name]
    torch.testing.assert_close(call(values.to(CUDA)).cpu(), call(values))


@pytest.mark.usefixtures("undecided")
def test_a_token_that_was_chosen_by_values_that_are_not_computed_ends_no_text():
    token = not_computed(16, 4096).argmax(-1)
    if (token == -1).all():
        pytest.fail("no such token can be chosen")


def given(device, *sizes, seed=0, below=None):
    """Values that the host has drawn, whole numbers if they are to be below one."""
    drawn = torch.Generator().manual_seed(seed)
    if below is not None:
        return torch.randint(1, below, sizes, generator=drawn).to(device)
    return torch.randn(*sizes, generator=drawn).to(device)


def experts_in_groups(device, n):
    scores = given(device, n, 64).sigmoid()
    groups = scores.view(n, 8, 8).topk(2)[0].sum(-1)
    mask = torch.zeros_like(groups).scatter(1, groups.topk(4, sorted=False)[1], 1)
    allowed = mask.unsqueeze(-1).expand(n, 8, 8).reshape(n, -1).bool()
    chosen = scores.masked_fill(~allowed, 0.0).topk(6, sorted=False)[1]
    counts = scores.new_zeros(n, 64).scatter(1, chosen, 1).sum(0).long()
    rows = given(device, n, 16)[chosen.flatten().argsort() // 6]
    return [len(part) for part in rows.split(counts.tolist())]


def boxes_that_overlap_little(device, n):
    corner, size = given(device, n, 2).abs() * 20, given(device, n, 2, seed=1).abs() * 5 + 1
    boxes = torch.cat([corner, corner + size], 1)
    order, left = given(device, n, seed=2).argsort(descending=True), []
    while order.numel() and len(left) < 12:
        left.append(order.numel())
        first, rest = boxes[order[0]], boxes[order[1:]]
        shared = torch.minimum(rest[:, 2:], first[2:]) - torch.maximum(rest[:, :2], first[:2])
        areas = (rest[:, 2:] - rest[:, :2]).prod(1) + (first[2:] - first[:2]).prod()
        order = order[1:][shared.clamp(min=0).prod(1) / areas < 0.1]
    return left


def beams_that_end(device, n):
    score, left = torch.zeros(4, device=device), []
    for step in range(5):
        following = given(device, 4, n, seed=step).log_softmax(-1) + score[:, None]
        score, token = following.flatten().topk(8)
        score = score[token % 3 != 0][:4]
        left.append(len(score))
        score = functional.pad(score, (0, 4 - len(score)), value=-1e9)
    return left


def sequences_without_padding(device, n):
    lengths = given(device, 16, below=n // 8)
    mask = (torch.arange(n // 8, device=device) < lengths[:, None]).int()
    own = mask.sum(-1, dtype=torch.int32)
    ends = functional.pad(own.cumsum(0, dtype=torch.int32), (1, 0))
    packed = given(device, 2 * n, 32)[mask.flatten().nonzero().flatten()]
    return [own.max().item(), len(packed), int(ends[-1])]


def tokens_beyond_the_capacity(device, n):
    expert = functional.one_hot(given(device, n, 16).softmax(-1).argmax(-1), 16)
    place = (expert.cumsum(0) * expert).sum(-1)
    return [len(given(device, n, 8)[place <= n // 16]), *expert.sum(0).tolist()]


def guesses_that_are_accepted(device, n):
    cache, accepted = given(device, n, 64), []
    for step in range(4):
        mine, theirs = (given(device, 8, n, seed=2 * step + k).softmax(-1) for k in range(2))
        guess = mine.argmax(-1, keepdim=True)
        enough = theirs.gather(1, guess) / mine.gather(1, guess) > 0.02 * step
        accepted.append(int(enough.long().cumprod(0).sum()))
        cache = cache[: len(cache) - 8 + accepted[-1]].clone()
    return [*accepted, len(cache), int((theirs - mine > 0).sum())]


def runs_of_equal_values(device, n):
    values, lengths = torch.unique_consecutive(given(device, 8 * n, below=4), return_counts=True)
    sums = torch.segment_reduce(given(device, 8 * n), "sum", lengths=lengths, unsafe=True)
    return [len(values), int(lengths.max()), int((sums > 1).sum())]


def sequences_of_any_length(device, n):
    lengths = given(device, 32, below=n // 8)
    values = given(device, int(lengths.sum()), 8)
    starts = functional.pad(lengths.cumsum(0), (1, 0))
    jagged = torch.nested.nested_tensor_from_jagged(values, starts)
    twice = (jagged * 2).values()
    return [*jagged.to_padded_tensor(0.0).shape, len(twice[twice[:, 0] > 0])]


def elements_that_are_not_zero(device, n):
    dense = functional.threshold(given(device, n, 64), 1, 0)
    rows, sparse = dense.to_sparse_csr(), dense.to_sparse()
    lengths = rows.crow_indices().diff()
    both = (sparse + sparse).coalesce()
    return [rows.values().numel(), int((lengths > 5).sum()), both._nnz()]


def numbers_of_eight_bits(device, n):
    values = given(device, n, 16)
    all_rows = torch.quantize_per_tensor(values, 0.25, 8, torch.quint8)
    half, none = torch.full((16,), 0.5), torch.zeros(16, dtype=torch.int64)
    columns = torch.quantize_per_channel(values, half.to(device), none.to(device), 1, torch.qint8)
    back = all_rows.dequantize()
    return [
        len(all_rows.int_repr().unique()),
        len(back[back > 1]),
        int((columns.int_repr() > 1).sum()),
    ]


def a_buffer_for_each_expert(device, n):
    expert = given(device, 2 * n, below=9) - 1
    counts = torch.zeros_like(expert[:8]).scatter_add_(0, expert, torch.ones_like(expert))
    place = torch.empty_like(expert)
    place[expert.argsort(stable=True)] = torch.arange(2 * n, device=device)
    buffer = torch.zeros(8, int(counts.max()), 4, device=device)
    buffer[expert, place - (counts.cumsum(0) - counts)[expert]] = given(device, 2 * n, 4)
    return [buffer.shape[1], int((buffer.abs().sum(-1) > 0).sum())]


def keys_that_are_kept(device, n):
    keys, score = given(device, 4, n, 16), torch.zeros(4, n, device=device)
    for step in range(3):
        score += (given(device, 4, 1, 16, seed=step) * keys).sum(-1).softmax(-1)
    kept = score.topk(n // 4)[1].sort()[0]
    rest = keys.gather(1, kept[..., None].expand(-1, -1, 16))
    return [int((kept < n // 2).sum()), len(rest[rest > 1])]


def tokens_that_leave_early(device, n):
    rows, halted, left = given(device, n, 32), torch.zeros(n, device=device), []
    for layer in range(5):
        halted = halted + rows[:, layer].sigmoid() * 0.6
        rows, halted = rows[halted < 1], halted[halted < 1]
        left.append(len(rows))
    return left


def words_that_are_likely(device, n):
    logits = given(device, 8, 4 * n) * 3
    ordered, place = logits.sort(descending=True)
    rest = ordered.softmax(-1).cumsum(-1) > 0.9
    cut = logits.masked_fill(rest.scatter(1, place, rest), float("-inf"))
    return [len((cut > -1e30).nonzero())]


def clusters_that_lose_their_points(device, n):
    points, left = given(device, n, 2), []
    centers = points[:16]
    for _ in range(3):
        nearest = (points[:, None] - centers).square().sum(-1).argmin(1)
        names, counts = nearest.unique(return_counts=True)
        kept = names[counts > n // 24].tolist()
        centers = torch.stack([points[nearest == name].mean(0) for name in kept])
        left += [len(kept), int(counts.max())]
    return left


def rows_that_are_written_one_by_one(device, n):
    rows = torch.empty(32, n, 8, device=device)
    for number, row in enumerate(rows):
        row.copy_(given(device, n, 8, seed=number))
    rows[7] = 2
    return [len(rows[rows > 1]), int((rows.sum(0) > 0).sum()), int((rows[3:9] > 0).sum())]


def rows_of_a_large_table(device, n):
    table, rows = given(device, n, 64), given(device, 60, below=n, seed=1)
    bags = functional.embedding_bag(rows, table, torch.arange(0, 60, 3).to(device))
    return [len(table[rows][functional.embedding(rows, table) > 0]), int((bags > 0).sum())]


PROGRAMS = [
    *(experts_in_groups, boxes_that_overlap_little, beams_that_end, sequences_without_padding),
    *(tokens_beyond_the_capacity, guesses_that_are_accepted, runs_of_equal_values),
    *(sequences_of_any_length, elements_that_are_not_zero, numbers_of_eight_bits),
    *(a_buffer_for_each_expert, keys_that_are_kept, tokens_that_leave_early),
    *(words_that_are_likely, clusters_that_lose_their_points, rows_that_are_written_one_by_one),
    rows_of_a_large_table,
]


@pytest.mark.usefixtures("undecided")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("n", [64, 8192], ids=["small", "large"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_whose_values_decide_its_memory_has_the_shapes_of_the_cpu(program, n):
    assert program(CUDA, n) == program("cpu", n)


def decisions(result):
    told = "a shape, a count or a branch rests "
    return [sentence for sentence in result.blind_spots if sentence.startswith(told)]


# What the program's text does not say.
ELSEWHERE = {
    "mask": lambda values: values * 2 > 0.5,
    "place": lambda values: values.flatten().argmax(),
}


DECISIONS = {
    "a shape": lambda scores: scores[scores > 0.5],
    "nonzero": lambda scores: (scores > 0.5).nonzero(),
    "a branch": lambda scores: scores + 1 if (scores > 0.5).any() else None,
    "all": lambda scores: scores + 1 if (scores > 0.5).all() else None,
    "all of a row": lambda scores: (scores > 0.5).all(-1).nonzero(),
    "equal": lambda scores: None if torch.equal(scores, scores + 1) else scores + 1,
    "close": lambda scores: None if torch.allclose(scores, scores + 1) else scores + 1,
    "a number": lambda scores: scores + 1 if scores.mean().item() > 0.5 else None,
    "a number that is rounded": lambda scores: torch.empty(math.ceil(scores.sum())),
    "a size": lambda scores: torch.empty(int(scores.sum() * 0 + 3)),
    "numbers in a list": lambda scores: [s for s in scores[0].tolist() if s > 0.5],
    "a count": lambda scores: range(int((scores > 0.5).sum())),
    "a maximum": lambda scores: functional.one_hot((scores.flatten()[:99] * 8).long()),
    "counts that the host reads": lambda scores: list(map(torch.empty, _counts(scores))),
    "a mask that the host computes": lambda scores: scores[scores.cpu() * 2 > 0.5],
    "a mask that comes back": lambda scores: scores[(scores.cpu() * 2 > 0.5).to(CUDA)],
    "a mask in a list": lambda scores: scores[0, (scores[0] > 0.5).tolist()],
    "a mask of an array": lambda scores: scores[(scores[:, 0] > 0.5).cpu().numpy()],
    "what is saved and loaded": lambda scores: (_loaded(scores, CUDA) > 0.5).nonzero(),
    "what is loaded on the host": lambda scores: (_loaded(scores, "cpu").to(CUDA) > 0).nonzero(),
    "a mask that the host computes elsewhere": lambda scores: scores[
        ELSEWHERE["mask"](scores.cpu())
    ],
    "rows beside those of a draw": lambda scores: _beside_a_draw(scores).gt(0.5).nonzero(),
    "places of a sparse tensor": lambda scores: _in_these_places(scores).coalesce(),
    "a sum of sparse tensors": lambda scores: _in_these_places(scores) + _in_these_places(scores),
    "places that the host finds": lambda scores: scores[(scores[:, 0].cpu().neg_() > 0).nonzero()],
    "counts in pinned memory": lambda scores: _pinned((scores > 0.5).sum(0)).copy_(
        (scores > 0.5).sum(0), non_blocking=True
    ),
    "a mask of the host": lambda scores: scores[(scores > 0.5).cpu()],
    "a branch of the host": lambda scores: [1 for row in (scores[0] > 0.5).cpu() if row],
    "values that come back": lambda scores: (scores.cpu().to(CUDA) > 0.5).nonzero(),
    "values that come back in rows": lambda scores: (_by_rows(scores).to(CUDA)[3] > 0).nonzero(),
    "what is saved for backward": lambda scores: (_saved_on_host(scores) > 0.5).nonzero(),
}


def _beside_a_draw(scores):
    both = torch.rand(2, scores.numel(), device=CUDA)
    both[1] = scores.flatten()
    return both


def _in_these_places(scores):
    places = (scores[:2, :99] * 0 + 1).long()
    return torch.sparse_coo_tensor(places, scores[0, :99], (9, 9), check_invariants=False)


def _loaded(scores, device):
    file = io.BytesIO()
    torch.save({"scores": scores}, file)
    file.seek(0)
    return torch.load(file, map_location=device)["scores"]


def _counts(scores):
    return (scores > 0.5).sum(0).tolist()


def _pinned(like):
    return torch.empty_like(like, device="cpu", pin_memory=True)


def _by_rows(scores):
    there = torch.empty_like(scores, device="cpu")
    for row, values in zip(there, scores, strict=True):
        row.copy_(values)
    return there


def _saved_on_host(scores):
    with torch.autograd.graph.save_on_cpu():
        squares = scores.requires_grad_().square().sum()
    squares.backward()
    return scores.grad


@pytest.mark.parametrize("name", DECISIONS)
@pytest.mark.parametrize("rows", [16, 1024], ids=["small", "large"])
def test_what_rests_on_values_that_nobody_computed_is_said_with_its_line(name, rows):
    scores = not_computed(rows, 1024)
    with measure(device=CUDA) as block:
        DECISIONS[name](scores)
    (sentence,) = decisions(block.result)
    assert "first in tests/simulate/test_decisions_on_a_simulated_gpu.py:" in sentence


DRAWN = {  # of n elements, and about which share of them
    "rand": (lambda n: (torch.rand(n, device=CUDA) > 0.9).nonzero(), 0.1),
    "half": (lambda n: (torch.rand(n, device=CUDA, dtype=torch.half) > 0.9).nonzero(), 0.1),
    "bernoulli": (lambda n: torch.empty(n, device=CUDA).bernoulli_(0.3).nonzero(), 0.3),
    "of weights": (lambda n: torch.full((n,), 0.3, device=CUDA).bernoulli().nonzero(), 0.3),
    "dropout": (lambda n: functional.dropout(torch.ones(n, device=CUDA), 0.7).nonzero(), 0.3),
    "randperm": (lambda n: (torch.randperm(n, device=CUDA)[: n // 2] >= n // 2).nonzero(), 0.25),
    "randint": (lambda n: (torch.randint(0, 10, (n,), device=CUDA) == 3).nonzero(), 0.1),
    "in place": (lambda n: torch.empty(n, device=CUDA).normal_().mul_(2).gt(2.0).nonzero(), 0.159),
    "a chain": (lambda n: torch.randn(n, device=CUDA).mul(2).sigmoid().gt(0.5).nonzero(), 0.5),
    "a copy": (lambda n: torch.randn(n, device=CUDA).clone().view(2, -1).gt(0).nonzero(), 0.5),
    "a part": (lambda n: torch.rand(2 * n, device=CUDA)[n:].gt(0.9).nonzero(), 0.1),
    "scattered": (lambda n: _left_of_top(n, 8).nonzero(), 8 / 1024),
}


def _left_of_top(count, kept):
    logits = torch.randn(count // 1024, 1024, device=CUDA)
    least = logits.topk(kept)[0][:, -1:]
    return logits.masked_fill(logits < least, float("-inf")) > -1e30


@pytest.mark.usefixtures("undecided")
@pytest.mark.parametrize("count", [16 * 1024, 2 * MiB])
@pytest.mark.parametrize("name", DRAWN)
def test_a_shape_that_rests_on_random_numbers_is_that_of_a_draw(name, count):
    call, share = DRAWN[name]
    torch.cuda.manual_seed(1)
    first = call(count)
    assert len(first) == pytest.approx(share * count, rel=0.1)
    torch.cuda.manual_seed(1)
    assert torch.equal(call(count).cpu(), first.cpu())


@pytest.mark.usefixtures("undecided")
def test_a_token_is_sampled_from_random_logits_of_a_whole_vocabulary():
    chances = torch.randn(64, 50257, device=CUDA).softmax(-1)
    assert len(set(torch.multinomial(chances, 1).flatten().tolist())) > 50


@pytest.mark.usefixtures("undecided")
@pytest.mark.parametrize("count", [MiB, 4 * MiB])
def test_a_shape_that_rests_on_what_was_copied_from_the_host_is_that_of_its_values(count):
    values = torch.arange(float(count))
    there = values.to(CUDA)
    far = (there - count / 2).abs() > count / 4
    there.zero_()
    assert len(there[far]) == int(((values - count / 2).abs() > count / 4).sum())


@pytest.mark.usefixtures("undecided")
def test_random_numbers_that_were_read_in_part_are_the_same_as_a_whole():
    drawn = torch.rand(MiB, device=CUDA)
    assert drawn[MiB // 2].item() == drawn.cpu()[MiB // 2].item()
    drawn[:8] = 2
    assert len((drawn > 1).nonzero()) == 8
    assert len((drawn + 0 > 0.5).nonzero()) == pytest.approx(MiB / 2, rel=0.01)


def test_random_numbers_that_are_overwritten_by_what_nobody_computed_decide_nothing_more():
    drawn = torch.rand(2048, 2048, device=CUDA)
    torch.mm(drawn, drawn.clone(), out=drawn)
    with measure(device=CUDA) as block:
        (drawn > 0.5).nonzero()
    assert len(decisions(block.result)) == 1


HARMLESS = {
    "a number": lambda scores: scores.mean().item(),
    "a check": lambda scores: scores + 1 if torch.isfinite(scores).all() else None,
    "nan": lambda scores: scores + 1 if scores.isnan().any() else None,
    "infinity": lambda scores: scores + 1 if torch.isinf(scores).any() else None,
    "itself": lambda scores: scores + 1 if (scores == scores).all() else None,
    "a check of many": lambda scores: _many(scores) if _many(scores).isfinite().all() else None,
    "infinity of many": lambda scores: _many(scores) if _many(scores).isinf().any() else None,
    "a printed tensor": lambda scores: f"{scores}",
    "a printed number": lambda scores: f"{scores.mean()}",
    "a comparison in a test": lambda scores: torch.testing.assert_close(scores, scores + 1),
    "arguments of a distribution": lambda scores: torch.distributions.Normal(scores, scores.exp()),
    "how many are right": lambda scores: (scores > 0.5).sum().item() / scores.numel(),
    "what was known is loaded": lambda scores: (
        _loaded(scores, CUDA),
        _loaded(torch.ones_like(scores), CUDA).nonzero(),
    ),
    "what is finite on the host": lambda scores: (
        scores + 1 if torch.isfinite(scores.cpu()).all() else None
    ),
    "the best on the host": lambda scores: torch.empty(ELSEWHERE["place"](scores.cpu()).item()),
    "a copy": lambda scores: (scores > 0.5).cpu(),
    "predictions": lambda scores: scores.argmax(-1).tolist(),
    "written over on the host": lambda scores: scores.cpu().fill_(1).mul_(2).to(CUDA).nonzero(),
    "copied over on the host": lambda scores: _twice(scores).to(CUDA).nonzero(),
    "values of known places": lambda scores: _in_known_places(scores)._nnz(),
    "drawn": lambda scores: len(torch.randint(0, 9, (99,), device=CUDA).nonzero()),
}


def _many(scores):
    return scores.repeat(9, 1)


def _twice(scores):
    there = scores.cpu()
    return there.copy_(torch.ones_like(scores))


def _in_known_places(scores):
    places = torch.arange(99, device=CUDA).expand(2, 99)
    sparse = torch.sparse_coo_tensor(places, scores.flatten()[:99], check_invariants=False)
    return (sparse + sparse.coalesce() * 2).coalesce()


@pytest.mark.usefixtures("undecided")
@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_shown_or_checked_decides_nothing(name):
    HARMLESS[name](not_computed(1024, 1024))


def test_a_test_that_rests_on_values_that_nobody_computed_fails_with_the_line(pytester):
    pytester.makepyfile(
        """
        import pytest
        import torch

        def scores():
            return torch.ones(2048, 2048, device="cuda") @ torch.ones(2048, 2048, device="cuda")

        @pytest.mark.memory_budget("1GiB")
        def test_loop():
            for _ in (scores() > 9).nonzero(): pass

        @pytest.mark.memory_budget("1GiB")
        def test_loss(): print(scores().mean().item())

        def test_unmeasured():
            for _ in (scores() > 9).nonzero(): pass
        """
    )
    told = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    told.assert_outcomes(failed=1, passed=2)
    said = "a shape, a count or a branch rests once on values *, first in *:9: *not-computed]"
    told.stdout.fnmatch_lines([f"*{said}"])


@pytest.mark.usefixtures("undecided")
@pytest.mark.parametrize("count", [MiB, MiB + 1, 3 * MiB, 5 * MiB])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_a_tensor_that_was_filled_passes_its_check(count, dtype):
    filled = torch.full((count,), 7, dtype=dtype, device=CUDA)
    assert bool((filled == 7).all())
    assert not bool((filled != 7).any())


KINDS = {  # the CPU has no kernel for these, or says of another number how long the result is
    "a product in single precision": lambda x: (
        torch.mm(x.bfloat16(), x.bfloat16().T, out_dtype=torch.float32) if x.is_cuda else x @ x.T
    ),
    "a transform in half precision": lambda x: (
        torch.fft.fft2(x.half() if x.is_cuda else x).abs().float()
    ),
    "absolute truth": lambda x: (x > 3).abs() if x.is_cuda else x > 3,
    "unique truth": lambda x: torch.unique(x > -1),
    "unique columns": lambda x: torch.unique((x > 3).long(), dim=1),
    "sparse rows": lambda x: (x * (x > 3)).to_sparse(1).to_dense(),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_numbers_that_only_a_gpu_takes_are_computed(name):
    values, call = torch.arange(8.0).view(2, 4), KINDS[name]
    torch.testing.assert_close(call(values.to(CUDA)).cpu(), call(values), rtol=0.01, atol=0.01)


def test_half_precision_can_be_cast_within_a_softmax():
    values = torch.randn(4, 8).half()
    for call in (torch.softmax, torch.log_softmax):
        for dtype in (torch.float32, None):
            mine, theirs = values.to(CUDA).requires_grad_(), values.clone().requires_grad_()
            found, expected = call(mine, -1, dtype=dtype), call(theirs, -1, dtype=dtype)
            torch.testing.assert_close(found.cpu(), expected)
            found.float().square().sum().backward()
            expected.float().square().sum().backward()
            torch.testing.assert_close(mine.grad.cpu(), theirs.grad)


def test_each_dropout_draws_a_mask_of_its_own_and_the_seed_gives_it_again():
    ones = torch.ones(4096, device=CUDA)
    state = torch.get_rng_state()
    torch.cuda.manual_seed(3)
    first, second = (functional.dropout(ones, 0.5) for _ in range(2))
    assert 1500 < int((first != second).sum()) < 2600
    torch.cuda.manual_seed(3)
    assert torch.equal(functional.dropout(ones, 0.5), first)
    assert torch.equal(torch.get_rng_state(), state)


GRAPHS = {
    "rand": lambda: torch.rand(5, device=CUDA),
    "two draws": lambda: torch.rand(5, device=CUDA) + torch.randn(5, device=CUDA),
    "bernoulli": lambda: torch.full((50,), 0.5, device=CUDA).bernoulli(),
    "dropout": lambda: functional.dropout(torch.ones(50, device=CUDA), 0.5),
    "large": lambda: torch.rand(MiB, device=CUDA).mean(),
    # Its kernel draws, and then calls an operator that draws nothing.
    "normal": lambda: torch.normal(torch.ones(50, device=CUDA), 1.0),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_each_launch_of_a_graph_draws_what_the_same_code_draws_without_one(name):
    draw = GRAPHS[name]
    torch.cuda.manual_seed(5)
    expected = [draw().cpu() for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = draw()
    torch.cuda.manual_seed(5)
    for each in expected:
        graph.replay()
        assert torch.equal(out.cpu(), each)
