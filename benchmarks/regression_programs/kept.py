"""Regressions by what a library or the interpreter keeps: a log, an exception, a weak reference."""

from __future__ import annotations

from typing import Final

from benchmarks.regression_programs.case import KIB, MIB, Blame, Regression

KEPT_ERRORS: Final = Regression(
    "kept_errors",
    """
      class Retry:
          def __init__(self):
              self.errors = []

          def __call__(self, function, *arguments):
              for _ in range(3):
                  try:
                      return function(*arguments)
                  except RuntimeError as error:
    -                 self.errors.append(str(error))
    +                 self.errors.append(error)

      def work(x):
    *     y = x @ x
          raise RuntimeError("no luck")

      def run(retry):
          retry(work, torch.ones(512, 512))
    """,
    "run(retry)",
    # The frame of each attempt has its product, of 1 MiB. One was there at a time before.
    (Blame("temporary", "aten::matmul|aten::mm", 2 * MIB),),
    fixtures="""
    @pytest.fixture
    def retry():
        return Retry()
    """,
    uses="retry",
    holder="'retry'.errors[*], frame of work (kept_errors.py:",
)

CAPTURED_LOG: Final = Regression(
    "captured_log",
    """
      import logging

      def checked(x):
    *     y = x.exp()
          if y.max() == torch.inf:
              raise ValueError("overflow")
          return y

      def run(scales):
          for scale in scales:
              try:
    *             checked(torch.full((512, 512), scale))
              except ValueError:
    -             logging.error("overflow")
    +             logging.exception("overflow")
    """,
    "run((1e3, 2e3, 3e3))",
    # Pytest keeps the records of a test, and with them the frames of each exception.
    (
        Blame("temporary", "aten::exp", 2 * MIB),
        Blame("input|temporary", "aten::full", 2 * MIB),
    ),
    holder="the log that pytest captures: records[*]",
)

WEAK_TO_STRONG: Final = Regression(
    "weak_to_strong",
    """
      import weakref

      class Item:
          def __init__(self, number):
              self.number = number

      class Features:
          def __init__(self):
    -         self.of = weakref.WeakKeyDictionary()
    +         self.of = {}

          def __call__(self, item):
              if item not in self.of:
    *             self.of[item] = torch.full((256, 256), float(item.number))
              return self.of[item]

      def run(features, count):
          for number in range(count):
              features(Item(number)).sum()
    """,
    "run(Features(), 6)",
    # 256 KiB for each of six items; one is there at a time while keys are held weakly.
    (Blame("temporary|input", "aten::full", 5 * 256 * KIB),),
)

CHECKPOINT_KEPT: Final = Regression(
    "checkpoint_kept",
    """
      import io

      class Trainer:
          def __init__(self):
              self.net = nn.Linear(512, 512)
              self.file = io.BytesIO()
              torch.save({"net": self.net.state_dict(), "epoch": 3}, self.file)

          def restore(self):
              self.file.seek(0)
    -         saved = torch.load(self.file)
    -         self.net.load_state_dict(saved["net"])
    +         self.saved = torch.load(self.file)
    +         self.net.load_state_dict(self.saved["net"])

          @torch.no_grad()
          def answer(self, x):
              return self.net(x).sum()
    """,
    """
    trainer.restore()
    trainer.answer(torch.ones(1024, 512))
    """,
    # A storage is read from the file without an operator: 1 MiB of weights and 2 KiB of biases.
    (Blame("temporary", "", MIB + 2 * KIB), Blame("temporary", "", MIB)),
    fixtures="""
    @pytest.fixture
    def trainer():
        return Trainer()
    """,
    uses="trainer",
    holder="'trainer'.saved['net']",
)

BEAM_HISTORY: Final = Regression(
    "beam_history",
    """
      class Beam:
          def __init__(self, width):
              self.cache = torch.zeros(width, 64, 256)
              self.parents = []

          @torch.no_grad()
          def reorder(self, order):
    -         self.parents.append(order)
    +         self.parents.append((order, self.cache))
    *         self.cache = self.cache.index_select(0, order)
    """,
    """
    beam = Beam(8)
    for _ in range(5):
        beam.reorder(torch.zeros(8, dtype=torch.long))
    """,
    # 512 KiB for each of the five orders; two caches were there at a time before.
    (Blame("temporary", "aten::index_select", 3 * 512 * KIB),),
)

CONTEXT_VARIABLE: Final = Regression(
    "context_variable",
    """
      import contextvars

      CURRENT = contextvars.ContextVar("current", default=None)

      def run(x):
    *     y = x.exp()
          token = CURRENT.set(y)
          found = float(CURRENT.get().sum())
    -     CURRENT.reset(token)
          return found
    """,
    "run(torch.ones(1024, 1024))",
    (Blame("temporary", "aten::exp", 4 * MIB),),
    holder="the context variable 'current'",
)

THREAD_LOCAL: Final = Regression(
    "thread_local",
    """
      import threading

      STATE = threading.local()

      def scratch(count):
    *     made = torch.zeros(count)
    +     STATE.made = made
          return made

      def run(count):
          return float(scratch(count).sum())
    """,
    "run(1024 * 1024)",
    (Blame("temporary|input", "aten::zeros", 4 * MIB),),
    holder="thread_local.STATE.made",
)

REGRESSIONS: Final = (
    KEPT_ERRORS,
    CAPTURED_LOG,
    WEAK_TO_STRONG,
    CHECKPOINT_KEPT,
    BEAM_HISTORY,
    CONTEXT_VARIABLE,
    THREAD_LOCAL,
)
