"""Regressions whose edited line makes no memory: it keeps what others make, or makes them larger.

What the first line says of the cause is right with the line that makes the memory. That it names
the edited line as well is scored in a column of its own. The last ones are edits of another file:
each has a project of its own, as a commit of its own would be.
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

_HIDDEN: Final = 512 * 768 * 4
"""What 768 more columns of hidden numbers take for 512 rows."""

WIDTH_IN_YAML: Final = Regression(
    "width_in_yaml",
    """
      from pathlib import Path

      def read(name):
          text = Path(__file__).with_name(name).read_text()
          pairs = (line.split(": ") for line in text.splitlines() if ": " in line)
          return {key.strip(): int(value) for key, value in pairs}

      def run():
          config = read("model.yaml")
          up = nn.Linear(64, config["hidden"])
    *     down = nn.Linear(config["hidden"], 8)
    *     x = up(torch.ones(512, 64))
    *     down(torch.tanh(x)).sum().backward()
    """,
    "run()",
    (
        Blame("activation", "aten::tanh", _HIDDEN),
        Blame("temporary|autograd detail", f"aten::tanh_backward|{MATMUL}", _HIDDEN),
    ),
    files={
        "model.yaml": """
          # of the model
          model:
        -   hidden: 256
        +   hidden: 1024
          seed: 0
        """
    },
)

BATCH_IN_JSON: Final = Regression(
    "batch_in_json",
    """
      import json
      from pathlib import Path

      def load(name):
          return json.loads(Path(__file__).with_name(f"{name}.json").read_text())

      def run():
          config = load("small")
    *     x = torch.ones(config["batch_size"], 256)
    *     torch.tanh(nn.Linear(256, 256)(x)).sum().backward()
    """,
    "run()",
    # 1 KiB for each row, of each thing.
    (
        Blame("input", "aten::ones", 1536 * KIB),
        Blame("activation", f"aten::tanh|{MATMUL}", 1536 * KIB),
    ),
    files={
        "small.json": """
          {
            "name": "small",
        -   "batch_size": 512,
        +   "batch_size": 2048,
            "seed": 0
          }
        """
    },
)

RECOMPUTED_IN_INI: Final = Regression(
    "recompute_in_ini",
    """
      import configparser
      from pathlib import Path

      from torch.utils.checkpoint import checkpoint

      class Block(nn.Module):
          def __init__(self, width):
              super().__init__()
              self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

          def forward(self, x):
    *         return x + self.down(torch.tanh(self.up(x)))

      class Net(nn.Module):
          def __init__(self, recompute):
              super().__init__()
              self.blocks = nn.ModuleList(Block(64) for _ in range(4))
              self.recompute = recompute

          def forward(self, x):
              for block in self.blocks:
                  x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
              return x

      def run():
          config = configparser.ConfigParser()
          config.read(Path(__file__).with_name("train.ini"))
          Net(config.getboolean("train", "recompute"))(torch.ones(1024, 64)).sum().backward()
    """,
    "run()",
    # What tanh makes, 1 MiB in each block; that of one block was recomputed at a time.
    (Blame("activation", "aten::tanh", 3 * MIB),),
    files={
        "train.ini": """
          [train]
          rate = 0.1
        - recompute = yes
        + recompute = no
        """
    },
)

POSITIONS: Final = Regression(
    "positions_by_default",
    """
      from options import Options

      class Attention(nn.Module):
          def __init__(self, options):
              super().__init__()
              self.width = options.width
              count = options.max_positions
    *         self.register_buffer("mask", torch.ones(count, count).tril())

          def forward(self, x):
              scores = x @ x.transpose(-1, -2) * self.mask[: x.shape[1], : x.shape[1]]
              return scores @ x

      @torch.no_grad()
      def run():
          options = Options()
          Attention(options)(torch.ones(1, 16, options.width))
    """,
    "run()",
    # The triangle, and the square that it is made of.
    (Blame("buffer", "aten::tril", 960 * KIB * 4), Blame("temporary", "aten::ones", 960 * KIB * 4)),
    files={
        "options.py": """
          from dataclasses import dataclass

          @dataclass
          class Options:
              width: int = 32
        -     max_positions: int = 256
        +     max_positions: int = 1024
        """
    },
)

FREEZING: Final = Regression(
    "trained_by_name",
    """
      from freezing import freeze

      class Layer(nn.Module):
          def __init__(self, width=512):
              super().__init__()
              self.base = nn.Linear(width, width)
              self.lora_a = nn.Linear(width, 4, bias=False)
              self.lora_b = nn.Linear(4, width, bias=False)

          def forward(self, x):
    *         return self.base(x) + self.lora_b(self.lora_a(x))

      def run():
          net = Layer()
          freeze(net)
          optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1)
          net(torch.ones(16, 512)).sum().backward()
          optimizer.step()
    """,
    "run()",
    # The gradient of the weights; at the old peak this line's products were outputs, of 32 KiB.
    (Blame("gradient", MATMUL, MIB), Blame("gradient", MATMUL, MIB - 32 * KIB)),
    files={
        "freezing.py": """
        - TRAINED = ("lora",)
        + TRAINED = ("lora", "base")

          def freeze(net):
              for name, parameter in net.named_parameters():
                  parameter.requires_grad_(any(part in name for part in TRAINED))
        """
    },
)
