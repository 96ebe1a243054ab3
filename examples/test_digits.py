"""What training and evaluating the classifier of digits.py may cost."""

import pytest
import torch
from digits import Classifier, accuracy, batches, read_pictures, train_step

SIZE = 256


@pytest.fixture
def pictures(torchmem):
    return read_pictures(torchmem.device)


@pytest.fixture
def model(torchmem):
    torch.manual_seed(0)
    return Classifier().to(torchmem.device)


@pytest.fixture
def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@pytest.mark.memory_budget("64MiB", growth="0B", unknown="0B")
@pytest.mark.memory_baseline
def test_training_for_three_epochs(torchmem, model, optimizer, pictures):
    epochs = []
    for _ in torchmem.steps(2, warmup=1):
        losses = [train_step(model, optimizer, *batch) for batch in batches(*pictures, SIZE)]
        epochs.append(sum(losses) / len(losses))
    assert epochs[-1] < epochs[0] / 2


@pytest.mark.parametrize("size", [128, 256])
def test_a_step_has_a_baseline_for_each_batch_size(torchmem, model, optimizer, pictures, size):
    with torchmem.measure("step") as step:
        train_step(model, optimizer, *next(batches(*pictures, size)))
    assert step.peak.temporary < step.peak.activation
    torchmem.check(step, floor="256KiB")


def test_activations_grow_no_faster_than_the_batch(torchmem, model, optimizer, pictures):
    regions = {}
    for size in (64, 256):
        with torchmem.measure(f"batch of {size}") as regions[size]:
            train_step(model, optimizer, *next(batches(*pictures, size)))
    assert regions[256].peak.activation <= 4 * regions[64].peak.activation


class TestEvaluation:
    """Without gradients, nothing may be kept for them."""

    pytestmark = pytest.mark.memory_budget(temporary="16MiB", gradient="0B", retained="0B")

    @pytest.mark.memory_baseline
    def test_evaluation_keeps_nothing(self, model, pictures):
        assert 0 <= accuracy(model, *pictures, size=SIZE) <= 1

    def test_a_larger_batch_fits_as_well(self, model, pictures):
        accuracy(model, *pictures, size=2 * SIZE)
