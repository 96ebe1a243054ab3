"""Regressions whose edit is in another file than the line that makes the memory.

Each has a project of its own, as a commit of its own would be.
"""

from __future__ import annotations

from typing import Final

from benchmarks.regression_programs.case import KIB, MATMUL, MIB, Blame, Regression

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

REGRESSIONS: Final = (
    WIDTH_IN_YAML,
    BATCH_IN_JSON,
    RECOMPUTED_IN_INI,
    POSITIONS,
    FREEZING,
)
