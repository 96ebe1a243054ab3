"""Regressions whose edited line makes no memory: it keeps what others make, or makes them larger.

What the first line says of the cause is right with the line that makes the memory. That it names
the edited line as well is scored in a column of its own.
"""

from __future__ import annotations

from typing import Final

from benchmarks.regression_programs.case import KIB, MATMUL, MIB, Blame, Regression

_NET: Final = """
      class Net(nn.Module):
          def __init__(self, width=256):
              super().__init__()
              self.up = nn.Linear(width, width)
              self.act = nn.Tanh()
              self.down = nn.Linear(width, width)

          def forward(self, x):
    *         return self.down(self.act(self.up(x)))
"""

RETAINED_LOSSES: Final = Regression(
    "retained_losses",
    f"""{_NET}
      def train(net):
          losses = []
          for _ in range(4):
    *         loss = net(torch.ones(512, 256)).square().mean()
              loss.backward(retain_graph=True)
    -         losses.append(loss.item())
    +         losses.append(loss)
    """,
    "train(Net())",
    # Each graph keeps the batch and two activations of 512 KiB. The baseline has two of each.
    (Blame("input", "aten::ones", MIB), Blame("activation", f"aten::tanh|{MATMUL}", MIB)),
)

SUM_OF_LOSSES: Final = Regression(
    "sum_of_losses",
    f"""{_NET}
      class Meter:
          sum = 0.0

          def update(self, value):
    -         self.sum += value.item()
    +         self.sum += value

      def evaluate(net, meter):
          for _ in range(4):
    *         meter.update(net(torch.ones(512, 256)).square().mean())
    """,
    "evaluate(Net(), Meter())",
    # The graphs of four, where there was one at a time.
    (
        Blame("input", "aten::ones", 3 * 512 * KIB),
        Blame("temporary", f"aten::tanh|{MATMUL}", 3 * 512 * KIB),
    ),
)

PREDICTIONS: Final = Regression(
    "predictions",
    f"""{_NET}
      class Accuracy:
          def __init__(self):
              self.predictions = []

          def update(self, logits):
    -         self.predictions.append(logits.detach().argmax(-1))
    +         self.predictions.append(logits.detach())

      def evaluate(net, accuracy):
          for _ in range(4):
              accuracy.update(net(torch.ones(512, 256)))
    """,
    "evaluate(Net(), Accuracy())",
    # The logits of three batches while the fourth is on its way, where there were those of one.
    (Blame("temporary", MATMUL, 2 * 512 * KIB),),
)

LAYERS: Final = Regression(
    "layers",
    f"""
    - CONFIG = {{"width": 256, "layers": 2}}
    + CONFIG = {{"width": 256, "layers": 3}}

{_NET}
      def build(config):
          return nn.Sequential(*(Net(config["width"]) for _ in range(config["layers"])))
    """,
    "build(CONFIG)(torch.ones(1024, 256)).sum().backward()",
    (Blame("activation", f"aten::tanh|{MATMUL}", MIB),),
)

WINDOW: Final = Regression(
    "window",
    """
      class Cache:
          def __init__(self, window):
              self.window, self.keys = window, torch.ones(16, 1, 512)

          def append(self, keys):
    *         self.keys = torch.cat([self.keys, keys], 1)
    -         self.keys = self.keys[:, -self.window:]
              return self.keys

      def generate(cache):
          for _ in range(31):
              cache.append(torch.ones(16, 1, 512)).sum(1)
    """,
    "generate(Cache(8))",
    # The last two of 31 and 32 tokens, where there were two of 9 that the views kept whole.
    (Blame("temporary", "aten::cat", (31 + 32 - 9 - 9) * 32 * KIB),),
)

CACHED_TABLE: Final = Regression(
    "cached_table",
    """
      import functools

      class Rotary(nn.Module):
    -     @property
    +     @functools.cached_property
          def table(self):
    *         return torch.outer(torch.arange(2048.0), torch.arange(128.0))

          def forward(self, x):
              return x * self.table[: len(x)]
    """,
    "for rotary in rotaries:\n    rotary(torch.ones(16, 128))",
    (Blame("temporary", "aten::outer|aten::mul", 3 * MIB),),
    fixtures="@pytest.fixture\ndef rotaries():\n    return [Rotary() for _ in range(4)]",
    uses="rotaries",
    holder="still held by the fixture 'rotaries'[*].table",
)

SAVED_TWICE: Final = Regression(
    "saved_twice",
    """
      class Gate(torch.autograd.Function):
          @staticmethod
          def forward(ctx, x):
    *         y = x * torch.sigmoid(x)
    -         ctx.save_for_backward(x)
    +         ctx.save_for_backward(x, y)
              return y

          @staticmethod
          def backward(ctx, gradient):
              x = ctx.saved_tensors[0]
              return gradient * torch.sigmoid(x)

      def run(x):
          for _ in range(4):
              x = Gate.apply(x) + 1
          x.sum().backward()
    """,
    "run(torch.ones(1024, 256, requires_grad=True))",
    (Blame("activation", "aten::mul", 4 * MIB),),
)

AVERAGE_WITH_GRAPH: Final = Regression(
    "average_with_graph",
    f"""{_NET}
      class Average:
          def __init__(self, net):
              self.shadow = [p.detach().clone() for p in net.parameters()]

    -     @torch.no_grad()
          def update(self, net):
              for i, p in enumerate(net.parameters()):
    *             self.shadow[i] = 0.9 * self.shadow[i] + 0.1 * p * p.norm()

      def train(net, average):
          for _ in range(4):
              average.update(net)
    """,
    "train(net, Average(net))",
    # Of 256 KiB: eight are kept beside the last two, where three were there at once.
    (Blame("temporary", "aten::mul", 7 * 256 * KIB),),
    fixtures="@pytest.fixture\ndef net():\n    return Net()",
    uses="net",
)

CHANNELS_LAST: Final = Regression(
    "channels_last",
    """
      class Net(nn.Module):
          def __init__(self):
              super().__init__()
              self.convolution = nn.Conv2d(3, 16, 3, padding=1)

          def forward(self, x):
    +         x = x.to(memory_format=torch.channels_last)
              return torch.relu(self.convolution(x))
    """,
    "with torch.no_grad():\n    Net()(torch.ones(8, 3, 128, 128))",
    # The results of convolution and relu take each other's place, as they did.
    (Blame("temporary", "aten::to|aten::_to_copy|aten::clone", 3 * 512 * KIB),),
)

REGRESSIONS: Final = (
    RETAINED_LOSSES,
    SUM_OF_LOSSES,
    PREDICTIONS,
    LAYERS,
    WINDOW,
    CACHED_TABLE,
    SAVED_TWICE,
    AVERAGE_WITH_GRAPH,
    CHANNELS_LAST,
)
