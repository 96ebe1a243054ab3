"""Regressions of what is kept: caches, tables, queues, exceptions; by a log or a weak reference."""

from __future__ import annotations

from typing import Final

from benchmarks.regression_programs.case import CAST, KIB, MATMUL, MIB, SOFTMAX, Blame, Regression

_EMPTY: Final = "aten::zeros|aten::empty|aten::zero_"

KEYS_BY_CAT: Final = Regression(
    "keys_by_cat",
    """
      class Cache:
          def __init__(self, b, h, t, d):
    -         self.keys = torch.zeros(b, h, t, d)
    +         self.keys = torch.zeros(b, h, 0, d)

          def append(self, position, new):
    -         self.keys[:, :, position] = new
    +         self.keys = torch.cat([self.keys, new[:, :, None]], 2)
              return self.keys

      @torch.no_grad()
      def generate(cache, steps):
          for position in range(steps):
              cache.append(position, torch.ones(8, 8, 256))
    """,
    "generate(Cache(8, 8, 64, 256), 64)",
    # The old 63 and the new 64 steps of 64 KiB are there together. The 64 of before are gone.
    (Blame("temporary", "aten::cat", 127 * 64 * KIB),),
)

CACHE_NOT_CLEARED: Final = Regression(
    "cache_not_cleared",
    """
      class Server:
          def __init__(self):
              self.key = nn.Linear(256, 256)
              self.cache = []

          @torch.no_grad()
          def answer(self, tokens):
    -         self.cache.clear()
              for chunk in tokens.split(256):
    *             self.cache.append(self.key(chunk))
              return sum(keys.sum() for keys in self.cache)
    """,
    """
    for _ in range(4):
        server.answer(torch.ones(1024, 256))
    """,
    # A request leaves 1 MiB. The total grows as much, since the last request is the largest.
    (Blame("temporary", MATMUL, 3 * MIB),),
    fixtures="""
    @pytest.fixture
    def server():
        return Server()
    """,
    uses="server",
    holder="'server'.cache",
)

CACHE_IN_FLOAT32: Final = Regression(
    "cache_in_float32",
    """
      class Cache:
          def __init__(self, like, steps):
              shape = (steps, *like.shape)
    -         self.keys = torch.zeros(shape, dtype=like.dtype)
    +         self.keys = torch.zeros(shape)

          @torch.no_grad()
          def put(self, position, new):
              self.keys[position] = new
    """,
    """
    new = torch.ones(8, 64, dtype=torch.bfloat16)
    Cache(new, 2048).put(0, new)
    """,
    # Without a module, what comes out of nothing and is read is data.
    (Blame("temporary|input", _EMPTY, 2 * MIB),),
)

VIEW_KEEPS_ALL: Final = Regression(
    "view_keeps_all",
    """
      class Encoder:
          def __init__(self):
              self.layer = nn.Linear(128, 128)
              self.features = []

          @torch.no_grad()
          def encode(self, batches):
              for batch in batches:
    *             hidden = self.layer(batch)
    -             self.features.append(hidden[-1].clone())
    +             self.features.append(hidden[-1])
    """,
    "encoder.encode([torch.ones(2048, 128)] * 4)",
    # A view of one row keeps the whole: 4 MiB of outputs, of which 2 were there at a time before.
    (Blame("temporary", MATMUL, 2 * MIB), Blame("temporary", MATMUL, 4 * MIB)),
    fixtures="""
    @pytest.fixture
    def encoder():
        return Encoder()
    """,
    uses="encoder",
    holder="'encoder'.features",
)

LRU_CACHE: Final = Regression(
    "lru_cache",
    """
    + import functools

    + @functools.lru_cache
      def table(length):
    *     return torch.arange(length * 256, dtype=torch.float32)

      def encode(lengths):
          return [table(length)[-1].item() for length in lengths]
    """,
    "encode([1024] * 2 + [1025, 1026, 1027])",
    # Four tables of 1 MiB and a little; one of them was the peak before.
    (
        Blame("temporary|input", "aten::arange", 3 * MIB + 3 * KIB),
        Blame("temporary|input", "aten::arange", 4 * MIB + 6 * KIB),
    ),
    holder="lru_cache.table",
)

TABLES_BY_LENGTH: Final = Regression(
    "tables_by_length",
    """
      class Positions(nn.Module):
          def __init__(self):
              super().__init__()
              self.tables = {}

          def forward(self, x):
              t = x.shape[0]
    -         if t not in self.tables:
    -             self.tables = {t: torch.zeros(t, 256)}
    +         if t not in self.tables:
    +             self.tables[t] = torch.zeros(t, 256)
              return (x[:, 0] + self.tables[t][:, 0]).sum()
    """,
    """
    with torch.no_grad():
        for t in (1024, 1025, 1026, 1027):
            positions(torch.ones(t, 1))
    """,
    # One is made while the last one is still there: 1026 and 1027 rows before, all four after.
    (
        Blame("temporary", _EMPTY, 2 * MIB + KIB),
        Blame("temporary", _EMPTY, 3 * MIB + 3 * KIB),
    ),
    fixtures="""
    @pytest.fixture
    def positions():
        return Positions()
    """,
    uses="positions",
    holder="'positions'.tables",
)

CACHE_AFTER_GENERATION: Final = Regression(
    "cache_after_generation",
    """
      class Generator(nn.Module):
          def __init__(self):
              super().__init__()
              self.key = nn.Linear(64, 64)
              self.cache = None

          @torch.no_grad()
          def generate(self, prompt):
    *         self.cache = self.key(prompt)
              answer = self.cache.sum()
    -         self.cache = None
              return answer
    """,
    "generator.generate(torch.ones(8192, 64))",
    (Blame("temporary", MATMUL, 2 * MIB),),
    fixtures="""
    @pytest.fixture
    def generator():
        return Generator()
    """,
    uses="generator",
    holder="'generator'.cache",
)

EXCEPTIONS: Final = Regression(
    "exceptions",
    """
      FAILURES = []

      def check(batch):
    *     hidden = batch * 2
          raise ValueError(f"not finite: {hidden.shape}")

      def run(batches):
          for batch in batches:
              try:
                  check(batch)
              except ValueError as error:
    -             FAILURES.append(str(error))
    +             FAILURES.append(error)
    """,
    "run([torch.ones(1024, 256)] * 4)",
    (Blame("temporary", "aten::mul", 3 * MIB), Blame("temporary", "aten::mul", 4 * MIB)),
    holder="exceptions.FAILURES",
)

CLOSURES: Final = Regression(
    "closures",
    """
      CALLBACKS = []

      @torch.no_grad()
      def evaluate(model, batch):
    *     logits = model(batch)
          mean = logits.mean().item()
    -     CALLBACKS.append(lambda: mean)
    +     CALLBACKS.append(lambda: logits.mean().item())
    """,
    """
    model = nn.Linear(16, 256)
    for _ in range(4):
        evaluate(model, torch.ones(1024, 16))
    """,
    (Blame("temporary", MATMUL, 3 * MIB), Blame("temporary", MATMUL, 4 * MIB)),
    holder="closures.CALLBACKS",
)

QUEUE: Final = Regression(
    "queue_without_end",
    """
      from collections import deque

      class Loader:
          def __init__(self):
    -         self.ready = deque(maxlen=2)
    +         self.ready = deque()

          def load(self):
    *         self.ready.append(torch.randn(1024, 256))
    """,
    """
    for _ in range(6):
        loader.load()
    """,
    # Two of 1 MiB and the next one before, six after; four more are left behind.
    (
        Blame("temporary|input", "aten::randn", 3 * MIB),
        Blame("temporary|input", "aten::randn", 4 * MIB),
    ),
    fixtures="""
    @pytest.fixture
    def loader():
        return Loader()
    """,
    uses="loader",
    holder="'loader'.ready",
)

CYCLE: Final = Regression(
    "cycle",
    """
      import weakref

      class Node:
          def __init__(self):
    *         self.values = torch.zeros(1024, 256)
    -         self.owner = weakref.ref(self)
    +         self.owner = self

      def build():
          for _ in range(4):
              Node()
    """,
    "build()",
    (Blame("temporary|input", _EMPTY, 3 * MIB), Blame("temporary|input", _EMPTY, 4 * MIB)),
    holder="cycle of cycle.Node",
)

CLASS_ATTRIBUTE: Final = Regression(
    "class_attribute",
    """
      class Meter:
    +     history = []

    -     def __init__(self):
    -         self.history = []
    -
          def update(self, logits):
    *         self.history.append(logits.softmax(-1))
    """,
    """
    for _ in range(4):
        meter = Meter()
        meter.update(torch.ones(1024, 256))
    """,
    (Blame("temporary", SOFTMAX, 3 * MIB), Blame("temporary", SOFTMAX, 4 * MIB)),
    holder="class_attribute.Meter.history",
)

DEFAULT_ARGUMENT: Final = Regression(
    "default_argument",
    """
    - def collect(batch, out=None):
    + def collect(batch, out=[]):
    -     out = [] if out is None else out
    *     out.append(batch.relu())
          return len(out)
    """,
    """
    with torch.no_grad():
        for _ in range(4):
            collect(torch.ones(1024, 256))
    """,
    (
        Blame("temporary", "aten::relu|aten::clamp_min", 3 * MIB),
        Blame("temporary", "aten::relu|aten::clamp_min", 4 * MIB),
    ),
    holder="default_argument.collect",
)

METRIC: Final = Regression(
    "metric",
    """
      class Accuracy:
          def __init__(self):
              self.seen = []

          def update(self, logits, targets):
    -         self.seen.append((logits.argmax(-1) == targets).sum().item())
    +         self.seen.append(logits.softmax(-1))
    """,
    """
    logits, targets = torch.ones(512, 512), torch.ones(512)
    for _ in range(4):
        metric.update(logits, targets)
    """,
    (Blame("temporary", SOFTMAX, 4 * MIB),),
    fixtures="""
    @pytest.fixture
    def metric():
        return Accuracy()
    """,
    uses="metric",
    holder="'metric'.seen",
)

REGISTRY: Final = Regression(
    "registry",
    """
      MODELS = {}

      def make(name):
    *     model = nn.Linear(512, 512, bias=False)
    +     MODELS[name] = model
          return model
    """,
    """
    for name in "abcd":
        model = make(name)
        model(torch.ones(1, 512))
    """,
    # Two before, for a moment: the last one is there until its name is given to the next one.
    (
        Blame("parameter", "aten::empty", 2 * MIB),
        Blame("parameter", "aten::empty", 4 * MIB),
    ),
    holder="registry.MODELS",
)

LOADER_LIST: Final = Regression(
    "loader_list",
    """
      from torch.utils.data import DataLoader

      class Images(torch.utils.data.Dataset):
          def __len__(self):
              return 128

          def __getitem__(self, index):
              return torch.full((128, 128), float(index))

      @torch.no_grad()
      def mean():
          loader = DataLoader(Images(), batch_size=16)
    +     loader = list(loader)
    *     return sum(batch[:, 0, 0].sum().item() for batch in loader)
    """,
    "mean()",
    # Eight batches of 1 MiB; before there was the last one beside the one that is being made.
    (Blame("input|temporary", "aten::stack|aten::cat", 6 * MIB),),
)

STATE_DICT_COPIES: Final = Regression(
    "state_dict_copies",
    """
      import copy

      class EarlyStopping:
          def __init__(self):
              self.best = None

          def update(self, model):
    -         self.best = model.state_dict()
    +         self.best = copy.deepcopy(model.state_dict())
    """,
    """
    model(torch.ones(1, 512)).sum().item()
    stopping.update(model)
    """,
    # The copy is no module's parameter. deepcopy copies a plain tensor's storage, by no operator.
    (Blame("temporary", "|aten::clone|aten::copy_", 4 * MIB),),
    fixtures="""
    @pytest.fixture
    def model():
        return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))

    @pytest.fixture
    def stopping():
        return EarlyStopping()
    """,
    uses="model, stopping",
    holder="'stopping'.best",
)

HALF_TABLE: Final = Regression(
    "lookup_in_float32",
    """
      class Table(nn.Module):
          def __init__(self, rows, width):
              super().__init__()
              self.register_buffer("rows", torch.zeros(rows, width, dtype=torch.bfloat16))

          def forward(self, index):
    -         return self.rows[index].float()
    +         return self.rows.float()[index]
    """,
    "Table(4096, 256)(torch.arange(16))",
    (Blame("temporary", CAST, 4 * MIB),),
)

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
