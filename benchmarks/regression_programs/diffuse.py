"""Regressions that no line is to blame for: all activations of a model, several times over."""

from __future__ import annotations

from typing import Final

from benchmarks.regression_programs.case import ANY, KIB, Blame, Regression

_MODEL: Final = """
      class Block(nn.Module):
          def __init__(self, width=64):
              super().__init__()
              self.norm = nn.LayerNorm(width)
              self.up = nn.Linear(width, 4 * width)
              self.down = nn.Linear(4 * width, width)

          def forward(self, x):
    *         normed = self.norm(x)
    *         wide = F.gelu(self.up(normed))
    *         return x + self.down(wide)

      class LM(nn.Module):
          def __init__(self):
              super().__init__()
              self.blocks = nn.ModuleList(Block() for _ in range(4))

          def forward(self, x):
              for block in self.blocks:
    *             x = block(x)
              return x.mean()
"""

#: What a step over 1024 tokens keeps for its backward pass: in each block the sum before it (but
#: for the first one: that is the input), what the norm makes with 8 KiB of statistics, and what
#: `up` and gelu make, four times as wide. A row of 64 numbers for each token is 256 KiB.
_STEP_BYTES: Final = (3 + 4 * (1 + 4 + 4)) * 256 * KIB + 4 * 8 * KIB

LOSSES: Final = Regression(
    "losses_of_blocks",
    f"""{_MODEL}
      def train(model, batches):
          losses = []
          for batch in batches:
              loss = model(batch)
    -         loss.backward()
    -         losses.append(loss.item())
    +         losses.append(loss)
    -     return sum(losses)
    +     sum(losses).backward()
    """,
    "train(LM(), [torch.ones(1024, 64)] * 4)",
    (Blame("activation", ANY, 3 * _STEP_BYTES),),
)

GRAPH_KEPT: Final = Regression(
    "graph_of_blocks",
    f"""{_MODEL}
      class Trainer:
          def __init__(self):
              self.model = LM()
              self.loss = None

          def step(self, batch):
              loss = self.model(batch)
    -         loss.backward()
    +         loss.backward(retain_graph=True)
              self.loss = loss
    """,
    """
    for _ in range(3):
        trainer.step(batch)
    """,
    (Blame("activation", ANY, _STEP_BYTES),),
    fixtures="""
    @pytest.fixture
    def trainer():
        return Trainer()

    @pytest.fixture
    def batch():
        return torch.ones(1024, 64)
    """,
    uses="trainer, batch",
    holder="'trainer'.loss",
)

BATCHES_AT_ONCE: Final = Regression(
    "batches_at_once",
    f"""{_MODEL}
      def train(model, x):
    -     for part in x.split(1024):
    -         model(part).backward()
    +     model(x).backward()
    """,
    "train(LM(), torch.ones(4096, 64))",
    (Blame("activation", ANY, 3 * _STEP_BYTES),),
)

REGRESSIONS: Final = (LOSSES, GRAPH_KEPT, BATCHES_AT_ONCE)
