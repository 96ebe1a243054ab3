"""Regressions of commits that edit the line that makes the memory, too, and not for its memory."""

from __future__ import annotations

from typing import Final

from benchmarks.regression_programs.case import MATMUL, MIB, Blame, Regression

FIXTURE: Final = Regression(
    "scaled_batch",
    """
      def scale(x):
    <     y = x * 2.0
    >     y = x * 2.5
          return y
    """,
    "scale(batch)",
    (Blame("temporary", "aten::mul", 7 * MIB),),
    uses="batch",
    files={
        "conftest.py": """
          import pytest

          @pytest.fixture
          def batch():
        -     return torch.ones(256, 1024)
        +     return torch.ones(2048, 1024)
        """
    },
)

DEFAULT: Final = Regression(
    "wide_by_default",
    """
      from sizes import inner

      class Block(nn.Module):
          def __init__(self):
              super().__init__()
              self.up, self.act = nn.Linear(64, inner(64)), nn.GELU()

          def forward(self, x):
    <         h = self.up(x) * 1.0
    >         h = self.up(x) * 1.1
    *         return self.act(h)
    """,
    "Block()(torch.ones(2048, 64)).sum().backward()",
    (Blame("activation|autograd detail|temporary", f"{MATMUL}|aten::mul|aten::gelu", 3 * MIB),),
    files={
        "sizes.py": """
        - def inner(width, factor=1):
        + def inner(width, factor=8):
              return width * factor
        """
    },
)

FIELD: Final = Regression(
    "another_activation",
    """
      from config import Config

      class Ffn(nn.Module):
          def __init__(self, config):
              super().__init__()
              inner = config.width * config.factor
              self.up, self.down = nn.Linear(config.width, inner), nn.Linear(inner, config.width)

          def forward(self, x):
    <         h = F.silu(self.up(x))
    >         h = F.gelu(self.up(x))
              return self.down(h)
    """,
    "Ffn(Config())(torch.ones(1024, 128)).sum().backward()",
    (Blame("activation|autograd detail", f"{MATMUL}|aten::gelu", 3 * MIB),),
    files={
        "config.py": """
          from dataclasses import dataclass

          @dataclass(frozen=True)
          class Config:
              width: int = 128
        -     factor: int = 2
        +     factor: int = 8
        """
    },
)

STAR: Final = Regression(
    "tokens_by_star",
    """
      from constants import *

      def logits(vocabulary=1000):
          h = torch.zeros(SHAPE.tokens, SHAPE.width)
    <     return (h @ torch.zeros(SHAPE.width, vocabulary)).log_softmax(-1) * 1.0
    >     return (h @ torch.zeros(SHAPE.width, vocabulary)).log_softmax(-1) * 1.5
    """,
    "logits()",
    (Blame("temporary", f"{MATMUL}|aten::mul|aten::log_softmax|aten::_log_softmax", 4 * MIB),),
    files={
        "constants.py": """
          from typing import NamedTuple

          class Shape(NamedTuple):
        -     tokens: int = 128
        +     tokens: int = 1024
              width: int = 256

          SHAPE = Shape()
        """
    },
)

DTYPE: Final = Regression(
    "double_by_conftest",
    """
      def run():
    *     x = torch.ones(512, 512)
    <     return torch.exp(x * 0.5)
    >     return torch.exp(x * 0.25)
    """,
    "run()",
    (Blame("temporary|input", "aten::exp|aten::mul|aten::ones", MIB),),
    files={
        "conftest.py": """
        - torch.set_default_dtype(torch.float32)
        + torch.set_default_dtype(torch.float64)
        """
    },
)

KEPT: Final = Regression(
    "hook_in_fixture",
    """
      def features(net, x):
          with torch.no_grad():
    <         return (net(x) * 0.5).sum()
    >         return (net(x) * 0.75).sum()
    """,
    "features(net, torch.ones(1024, 128))",
    (Blame("temporary", MATMUL, 4 * MIB),),
    uses="net",
    holder="feats['last']",
    files={
        "conftest.py": """
          import pytest

          @pytest.fixture
          def net():
              net = nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 16))
              feats = net.feats = {}

              def keep(module, arguments, out):
        -         feats["last"] = out.shape
        +         feats["last"] = out

              net[0].register_forward_hook(keep)
              return net
        """
    },
)

BASE: Final = Regression(
    "recompute_in_base",
    """
      from base import Base

      class Mlp(nn.Module):
          def __init__(self):
              super().__init__()
              self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)

          def forward(self, x):
    <         return x + self.down(F.gelu(self.up(x)))
    >         return x + 0.5 * self.down(F.gelu(self.up(x)))

      class Net(Base):
          def __init__(self):
              super().__init__()
              self.blocks = nn.ModuleList(Mlp() for _ in range(4))

          def forward(self, x):
              for block in self.blocks:
                  x = self.run(block, x)
              return x
    """,
    "Net()(torch.ones(1024, 128)).sum().backward()",
    (Blame("activation", f"{MATMUL}|aten::gelu", 10 * MIB),),
    files={
        "base.py": """
          from torch.utils.checkpoint import checkpoint

          class Base(nn.Module):
        -     recompute = True
        +     recompute = False

              def run(self, f, x):
                  return checkpoint(f, x, use_reentrant=False) if self.recompute else f(x)
        """
    },
)

CHUNK: Final = Regression(
    "chunk_in_environment",
    """
      import settings

      def attend(q, k, v):
          parts = []
          for part in q.split(settings.CHUNK):
    <         scores = torch.softmax(part @ k.T * 0.125, -1)
    >         scores = torch.softmax(part @ k.T * 0.25, -1)
              parts.append(scores @ v)
          return torch.cat(parts)
    """,
    "q = torch.ones(1024, 64)\nattend(q, q, q)",
    (Blame("temporary", f"{MATMUL}|aten::mul|aten::softmax", 6 * MIB),),
    files={
        "settings.py": """
          import os

        - CHUNK = int(os.environ.get("CHUNK", "64"))
        + CHUNK = int(os.environ.get("CHUNK", "1024"))
        """
    },
)
