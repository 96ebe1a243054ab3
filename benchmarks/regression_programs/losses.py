"""Regressions of losses and logits: kept graphs, wider types, the whole vocabulary at once."""

from __future__ import annotations

from typing import Final

from benchmarks.regression_programs.case import CAST, MATMUL, MIB, SOFTMAX, Blame, Regression

_CROSS_ENTROPY: Final = "aten::cross_entropy_loss|aten::log_softmax|aten::_log_softmax"

_CROSS_ENTROPY_BACKWARD: Final = "aten::_log_softmax_backward_data|aten::nll_loss_backward"

#: Two layers of tanh: each keeps its result of 512 KiB for the backward pass.
_MODEL: Final = """
      class Model(nn.Module):
          def __init__(self, width=64):
              super().__init__()
              self.first = nn.Linear(width, width)
              self.second = nn.Linear(width, width)

          def forward(self, x):
    *         return torch.tanh(self.second(torch.tanh(self.first(x))))
"""

LOSSES_WITH_GRAPH: Final = Regression(
    "losses_with_graph",
    f"""{_MODEL}
      def train(model, batches):
          losses = []
          for batch in batches:
              loss = model(batch).mean()
    -         loss.backward()
    -         losses.append(loss.item())
    +         losses.append(loss)
    -     return sum(losses)
    +     sum(losses).backward()
    """,
    "train(Model(), [torch.ones(2048, 64)] * 4)",
    # 1 MiB of a step is kept four times over. mean() needs no values: of the second tanh it is its
    # own backward that does.
    (Blame("activation", "aten::tanh", 3 * MIB),),
)

EVALUATION_LOSSES: Final = Regression(
    "evaluation_losses",
    f"""{_MODEL}
      def evaluate(model, batches):
          losses = []
          for batch in batches:
    -         losses.append(model(batch).mean().item())
    +         losses.append(model(batch).mean())
          return float(sum(losses)) / len(losses)
    """,
    "evaluate(Model(), [torch.ones(2048, 64)] * 4)",
    # A graph that nobody goes back through: 4 MiB of tanh, where 1 MiB was there at a time.
    (Blame("activation|temporary", "aten::tanh", 3 * MIB),),
)

RETAIN_GRAPH: Final = Regression(
    "retain_graph",
    f"""{_MODEL}
      class Trainer:
          def __init__(self):
              self.model = Model()
              self.last_loss = None

          def step(self, batch):
              loss = self.model(batch).mean()
    -         loss.backward()
    +         loss.backward(retain_graph=True)
              self.last_loss = loss
    """,
    """
    for _ in range(3):
        trainer.step(torch.ones(2048, 64))
    """,
    # The last step's graph is there while the next one is made.
    (Blame("activation", "aten::tanh", MIB),),
    fixtures="""
    @pytest.fixture
    def trainer():
        return Trainer()
    """,
    uses="trainer",
    holder="'trainer'.last_loss",
)

BPTT: Final = Regression(
    "through_time",
    """
      class Cell(nn.Module):
          def __init__(self, width=64):
              super().__init__()
              self.inner = nn.Linear(width, width)

          def forward(self, x, h):
    *         return torch.tanh(x + self.inner(h))

      def train(cell, windows):
          h = torch.zeros(1024, 64)
          for window in windows:
              for x in window:
                  h = cell(x, h)
    -         h.sum().backward()
    -         h = h.detach()
    +         h.sum().backward(retain_graph=True)
    """,
    "train(Cell(), torch.ones(4, 4, 1024, 64))",
    # Four windows of four states of 256 KiB, where one window and the last state were kept.
    (
        Blame("activation", "aten::tanh", 3 * MIB),
        Blame("activation", "aten::tanh", 3 * MIB - 256 * 1024),
    ),
)

CREATE_GRAPH: Final = Regression(
    "create_graph",
    """
      def adapt(x, w):
          y = x
          for _ in range(4):
    *         y = torch.tanh(y @ w)
    -     (gradient,) = torch.autograd.grad(y.sum(), w)
    +     (gradient,) = torch.autograd.grad(y.sum(), w, create_graph=True)
          return (w - 0.1 * gradient).detach()
    """,
    "adapt(torch.ones(2048, 128), torch.ones(128, 128, requires_grad=True))",
    # The gradients behind each tanh, 1 MiB of its backward kernel, are kept for a second pass: four
    # where there was one at a time. Of those before a tanh, which a product makes, there are three.
    # No second pass comes: so they are gradients on their way as well as kept for one.
    (Blame("activation|autograd detail", "aten::tanh_backward", 3 * MIB),),
)

LOGITS_OF_ALL: Final = Regression(
    "logits_of_all",
    """
      class LM(nn.Module):
          def __init__(self, size=4096, width=64):
              super().__init__()
              self.embed = nn.Embedding(size, width)
              self.head = nn.Linear(width, size, bias=False)

          @torch.no_grad()
          def next_token(self, tokens):
              hidden = self.embed(tokens)
    -         return self.head(hidden[-1:]).argmax(-1)
    +         return self.head(hidden).argmax(-1)[-1]
    """,
    "LM().next_token(torch.arange(256))",
    (Blame("temporary", MATMUL, 4 * MIB - 16 * 1024),),
)

LOGITS_UPCAST: Final = Regression(
    "logits_upcast",
    """
      def loss(head, hidden, targets):
          logits = head(hidden)
    -     return F.cross_entropy(logits, targets)
    +     return F.cross_entropy(logits.float(), targets)
    """,
    """
    head = nn.Linear(64, 4096, bias=False).bfloat16()
    loss(head, torch.ones(512, 64, dtype=torch.bfloat16), torch.arange(512)).backward()
    """,
    # Logits are 4 MiB in bfloat16. In the forward pass there are the copy (8) and the log-softmax
    # (8, where it was 4); in the backward pass that one and two gradients as large.
    (
        Blame("temporary", CAST, 8 * MIB),
        Blame("activation", _CROSS_ENTROPY, 4 * MIB),
        Blame("temporary", f"{_CROSS_ENTROPY}|{_CROSS_ENTROPY_BACKWARD}", 4 * MIB),
    ),
)

WHOLE_VOCABULARY: Final = Regression(
    "whole_vocabulary",
    """
    - CHUNK = 64
    + CHUNK = 512

      @torch.no_grad()
      def loss(head, hidden, targets):
          total = 0.0
          for some, wanted in zip(hidden.split(CHUNK), targets.split(CHUNK)):
    *         logits = head(some)
    *         total += F.cross_entropy(logits, wanted, reduction="sum").item()
          return total / len(targets)
    """,
    "loss(nn.Linear(64, 4096), torch.ones(512, 64), torch.arange(512))",
    # 8 MiB of logits and of log-softmax where 1 MiB of each was there; or at another moment, which
    # is as high, 2 MiB of logits, the old chunk's and the new one's.
    (
        Blame("temporary", f"{MATMUL}|{_CROSS_ENTROPY}", 7 * MIB),
        Blame("temporary", MATMUL, 6 * MIB),
        Blame("temporary", _CROSS_ENTROPY, 8 * MIB),
    ),
)

ONE_HOT_TARGETS: Final = Regression(
    "one_hot_targets",
    """
      @torch.no_grad()
      def loss(logits, targets):
    -     return F.cross_entropy(logits, targets)
    +     wanted = F.one_hot(targets, logits.shape[-1])
    +     return -(wanted * logits.log_softmax(-1)).sum(-1).mean()
    """,
    "loss(torch.rand(256, 2048), torch.arange(256))",
    # 2 MiB of logits. One hot is int64, and the product makes a float32 copy of it.
    (
        Blame("temporary", "aten::one_hot|aten::zeros|aten::empty", 4 * MIB),
        Blame("temporary", "aten::mul", 4 * MIB),
    ),
)

LOGGED_OUTPUTS: Final = Regression(
    "logged_outputs",
    """
      @torch.no_grad()
      def predict(model, batches):
          seen = []
          for batch in batches:
    *         logits = model(batch)
    -         seen.append(logits.argmax(-1))
    +         seen.append(logits)
    *     return torch.cat(seen)
    """,
    "predict(nn.Linear(64, 512), [torch.ones(512, 64)] * 4)",
    # Four outputs of 1 MiB, and all of them once more in one tensor. Two were there before.
    (Blame("temporary", "aten::cat", 4 * MIB),),
)

ENSEMBLE: Final = Regression(
    "ensemble",
    """
      @torch.no_grad()
      def predict(models, x):
    -     total = torch.zeros(len(x), 512)
    -     for model in models:
    -         total += model(x)
    -     return total / len(models)
    +     return torch.stack([model(x) for model in models]).mean(0)
    """,
    "predict([nn.Linear(16, 512) for _ in range(4)], torch.ones(512, 16))",
    (Blame("temporary", f"aten::stack|aten::cat|{MATMUL}", 4 * MIB),),
)

WITH_GRADIENT: Final = Regression(
    "generation_with_gradient",
    """
      class Model(nn.Module):
          def __init__(self):
              super().__init__()
              self.cell = nn.Linear(128, 128)

    -     @torch.no_grad()
          def generate(self, state, steps):
              for _ in range(steps):
    *             state = torch.tanh(self.cell(state))
              return state.sum().item()
    """,
    "Model().generate(torch.ones(1024, 128), 16)",
    # 16 states of 512 KiB are kept by their graph, where the old and the new one were there.
    (Blame("activation|temporary", "aten::tanh", 7 * MIB),),
)

TEACHER: Final = Regression(
    "teacher",
    """
      class Net(nn.Module):
          def __init__(self):
              super().__init__()
              self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(8))

          def forward(self, x):
              for layer in self.layers:
    *             x = torch.tanh(layer(x))
              return x

      def distil(student, teacher, x):
    -     with torch.no_grad():
    -         wanted = teacher(x)
    +     wanted = teacher(x)
          F.mse_loss(student(x), wanted).backward()
    """,
    "distil(nn.Linear(128, 128), Net(), torch.ones(1024, 128))",
    # Eight layers of 512 KiB, of which the last one was kept before, too.
    (Blame("activation", "aten::tanh", 7 * 512 * 1024),),
)

BACKBONE: Final = Regression(
    "backbone_not_frozen",
    """
      class Classifier(nn.Module):
          def __init__(self):
              super().__init__()
              self.backbone = nn.ModuleList(nn.Linear(128, 128) for _ in range(8))
              self.head = nn.Linear(128, 8)
    -         self.backbone.requires_grad_(False)

          def forward(self, x):
              for layer in self.backbone:
    *             x = torch.sigmoid(layer(x))
              return self.head(x)
    """,
    "Classifier()(torch.ones(1024, 128)).sum().backward()",
    # Eight layers of 512 KiB, of which the last one was kept before, too. Another one was there for
    # a moment, which counts if what is kept is not told apart.
    (
        Blame("activation", "aten::sigmoid", 7 * 512 * 1024),
        Blame("activation", "aten::sigmoid", 6 * 512 * 1024),
    ),
)

LOG_OF_SOFTMAX: Final = Regression(
    "log_of_softmax",
    """
      def loss(model, x, targets):
          logits = model(x)
    -     scores = logits.log_softmax(-1)
    +     scores = logits.softmax(-1).log()
          return F.nll_loss(scores, targets)
    """,
    "loss(nn.Linear(16, 1024), torch.ones(512, 16), torch.arange(512)).backward()",
    # Softmax and logarithm are kept, 2 MiB each, where there was the log-softmax. The total stays.
    (Blame("activation", f"{SOFTMAX}|aten::log", 2 * MIB),),
)

PAIRS_BY_BROADCAST: Final = Regression(
    "pairs_by_broadcast",
    """
      def loss(prediction, target):
    -     return (prediction.squeeze(-1) - target).square().mean()
    +     return (prediction - target).square().mean()
    """,
    "loss(nn.Linear(16, 1)(torch.ones(1024, 16)), torch.ones(1024)).backward()",
    # Each of 1024 predictions less each of 1024 targets; all that follows is as large.
    (Blame("activation", "aten::sub", 4 * MIB),),
)

CONFUSION: Final = Regression(
    "confusion_by_product",
    """
      def confusion(matrix, found, right):
    -     places = right * len(matrix) + found
    -     matrix.view(-1).index_add_(0, places, torch.ones(len(places)))
    +     a, b = (F.one_hot(x, len(matrix)).float() for x in (right, found))
    +     matrix += a.T @ b
    """,
    """
    labels = torch.zeros(4096, dtype=torch.long)
    confusion(torch.zeros(64, 64), labels, labels)
    """,
    # 64 columns for each label: 2 MiB of integers, of which one is there, and 1 MiB as numbers.
    (
        Blame("temporary", "aten::one_hot|aten::zeros|aten::scatter_", 2 * MIB),
        Blame("temporary", CAST, 2 * MIB),
    ),
)
