"""Regressions in programs of people who adopt the plugin: each of a kind that no other file has."""

from __future__ import annotations

from typing import Final

from benchmarks.regression_programs.case import CAST, KIB, MATMUL, MIB, Blame, Regression

FULL_PRECONDITIONER: Final = Regression(
    "full_preconditioner",
    """
      class Scaled(torch.optim.Optimizer):
          def __init__(self, parameters):
              super().__init__(parameters, {})

          @torch.no_grad()
          def step(self):
              for p in self.param_groups[0]["params"]:
                  state, gradient = self.state[p], p.grad
                  if not state:
    -                 state["second"] = torch.zeros(len(p))
    +                 state["second"] = torch.zeros(len(p), len(p))
    -             state["second"].add_(gradient.square().sum(1))
    -             p.addcdiv_(gradient, state["second"].sqrt()[:, None] + 1e-8, value=-0.1)
    +             state["second"].add_(gradient @ gradient.T)
    +             roots = state["second"].diagonal().sqrt()[:, None]
    +             p.addcdiv_(gradient, roots + 1e-8, value=-0.1)

      def train(net):
          optimizer = Scaled(net.parameters())
          for _ in range(2):
              optimizer.zero_grad()
              net(torch.ones(8, 64)).sum().backward()
              optimizer.step()
    """,
    "train(nn.Linear(64, 1024, bias=False))",
    # A square of 1024 rows, and another one that is added to it.
    (
        Blame("temporary", MATMUL, 4 * MIB),
        Blame("optimizer state", "aten::zeros", 4 * MIB - 4 * KIB),
    ),
)

FROZEN_WEIGHT: Final = Regression(
    "gradient_of_frozen",
    """
      class Product(torch.autograd.Function):
          @staticmethod
          def forward(ctx, x, weight):
              ctx.save_for_backward(x, weight)
              return x @ weight.T

          @staticmethod
          def backward(ctx, gradient):
              x, weight = ctx.saved_tensors
    -         of_weight = gradient.T @ x if ctx.needs_input_grad[1] else None
    +         of_weight = gradient.T @ x
              return gradient @ weight, of_weight

      class Adapted(nn.Module):
          def __init__(self, width=1024):
              super().__init__()
              self.weight = nn.Parameter(torch.zeros(width, width), requires_grad=False)
              self.scale = nn.Parameter(torch.ones(width))

          def forward(self, x):
              return Product.apply(x * self.scale, self.weight)
    """,
    "Adapted()(torch.ones(32, 1024)).sum().backward()",
    (Blame("autograd detail|temporary", MATMUL, 4 * MIB),),
)

WIDE_MASK: Final = Regression(
    "mask_of_integers",
    """
      class Threshold(torch.autograd.Function):
          @staticmethod
          def forward(ctx, x):
    -         keep = x > 0
    +         keep = (x > 0).long()
              ctx.save_for_backward(keep)
              return x * keep

          @staticmethod
          def backward(ctx, gradient):
              (keep,) = ctx.saved_tensors
              return gradient * keep

      class Net(nn.Module):
          def __init__(self):
              super().__init__()
              self.up, self.down = nn.Linear(64, 512), nn.Linear(512, 8)

          def forward(self, x):
              return self.down(Threshold.apply(self.up(x)))
    """,
    "Net()(torch.ones(512, 64)).sum().backward()",
    # Eight bytes a value; the mask of one byte is gone when the peak comes.
    (Blame("activation", CAST, 2 * MIB),),
)

GRADIENTS_IN_FLOAT32: Final = Regression(
    "gradients_in_float32",
    """
      class Sums:
          def __init__(self, net):
              self.net = net
              self.sums = {}

          def add(self):
              for name, p in self.net.named_parameters():
    -             gradient = p.grad
    +             gradient = p.grad.float()
                  p.grad = None
                  if name in self.sums:
                      self.sums[name] += gradient
                  else:
                      self.sums[name] = gradient
    """,
    """
    net = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4))).bfloat16()
    sums = Sums(net)
    for _ in range(2):
        net(torch.ones(8, 512, dtype=torch.bfloat16)).sum().backward()
        sums.add()
    """,
    # Sums of 4 MiB, and two gradients: the last one's name is still there.
    (Blame("temporary|gradient", CAST, 6 * MIB),),
)

QUASI_NEWTON: Final = Regression(
    "pairs_of_lbfgs",
    """
    - SETTINGS = {"lr": 0.1, "max_iter": 4, "history_size": 1}
    + SETTINGS = {"lr": 0.1, "max_iter": 4}

      def fit(net, x):
          optimizer = torch.optim.LBFGS(net.parameters(), **SETTINGS)

          def closure():
              optimizer.zero_grad()
              loss = (net(x) - 1).square().mean()
              loss.backward()
              return loss

          for _ in range(2):
    *         optimizer.step(closure)
    """,
    "torch.manual_seed(0)\nfit(nn.Linear(1024, 256, bias=False), torch.randn(16, 1024))",
    # Up to seven pairs of 1 MiB each: an iteration leaves a pair, two steps of four do.
    (Blame("optimizer state", "aten::sub|aten::mul", 6 * MIB),),
)

PENALTY: Final = Regression(
    "penalty_each_step",
    """
      EVERY = 16

      def penalty(net, real):
          real = real.detach().requires_grad_()
    *     (gradient,) = torch.autograd.grad(net(real).sum(), real, create_graph=True)
    *     return gradient.square().sum(1).mean()

      def step(net, real, number):
    *     loss = F.softplus(-net(real)).mean()
    -     if number % EVERY == 0:
    +     if number % EVERY:
              loss = loss + penalty(net, real)
    *     loss.backward()
    """,
    """
    net = nn.Sequential(nn.Linear(256, 512), nn.Softplus(), nn.Linear(512, 1))
    for number in (2, 3):
        step(net, torch.ones(512, 256), number)
        net.zero_grad()
    """,
    # What the second derivative of softplus makes, 1 MiB each.
    (Blame("temporary|autograd detail", "aten::mul", 3 * MIB),),
)

COMPLEX: Final = Regression(
    "whole_spectrum",
    """
      def low_pass(x, count):
    -     spectrum = torch.fft.rfft(x)
    +     spectrum = torch.fft.fft(x)
          spectrum[..., count:] = 0
    -     return torch.fft.irfft(spectrum, n=x.shape[-1])
    +     return torch.fft.ifft(spectrum).real
    """,
    "low_pass(torch.ones(16, 16384), 100)",
    # The spectrum and its inverse have 2 MiB each; half the spectrum had 1 MiB, twice.
    (Blame("temporary|input", "aten::fft_fft|aten::_fft_c2c", 2 * MIB),),
)

ADJACENCY: Final = Regression(
    "dense_adjacency",
    """
      def ring(count):
          at = torch.arange(count)
          places = torch.stack([at, (at + 1) % count])
          edges = torch.sparse_coo_tensor(places, torch.ones(count), (count, count))
    -     return edges
    +     return edges.to_dense()

      class Layer(nn.Module):
          def __init__(self, count):
              super().__init__()
              self.edges = ring(count)
              self.linear = nn.Linear(32, 32)

          def forward(self, x):
              return self.linear(torch.mm(self.edges, x))
    """,
    "Layer(1024)(torch.ones(1024, 32)).sum().backward()",
    (Blame("input", "aten::zeros|aten::to_dense", 4 * MIB),),
)

TWO_COPIES: Final = Regression(
    "loaded_beside",
    """
      import io

      def saved(net):
          file = io.BytesIO()
          torch.save(net.state_dict(), file)
          file.seek(0)
          return file

      def make():
    *     return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))

      def load(file):
    -     with torch.device("meta"):
    -         net = make()
    -     net.load_state_dict(torch.load(file), assign=True)
    +     net = make()
    +     net.load_state_dict(torch.load(file))
          return net
    """,
    "load(file)",
    (Blame("parameter", "aten::empty", 4 * MIB), Blame("temporary", "", 4 * MIB)),
    fixtures="@pytest.fixture\ndef file():\n    return saved(make())",
    uses="file",
)

DEQUANTIZED: Final = Regression(
    "dequantized_kept",
    """
      class Quantized(nn.Module):
          def __init__(self, rows, columns):
              super().__init__()
              self.register_buffer("codes", torch.zeros(columns, rows, dtype=torch.int8))
              self.register_buffer("scales", torch.ones(columns, 1))
              self.cached = None

          def weight(self):
              if self.cached is None:
    -             return self.codes * self.scales
    +             self.cached = self.codes * self.scales
              return self.cached

          def forward(self, x):
              return x @ self.weight().T
    """,
    "net(torch.ones(8, 256))",
    (Blame("temporary", "aten::mul", MIB),),
    fixtures="""
    @pytest.fixture
    def net():
        return nn.Sequential(Quantized(256, 1024), Quantized(1024, 256))
    """,
    uses="net",
    holder="the fixture 'net'.*.cached",
)

CACHED_METHOD: Final = Regression(
    "cached_method",
    """
      import functools

      class Model:
          def __init__(self, width):
    *         self.net = nn.Linear(width, width, bias=False)

    +     @functools.lru_cache
          def score(self, number):
              with torch.no_grad():
                  return self.net(torch.full((1, 512), float(number))).mean().item()

      def reload(times):
          for _ in range(times):
              model = Model(512)
              model.score(1)
    """,
    "reload(4)",
    (Blame("parameter", "aten::empty", 2 * MIB),),
    holder="cached_method.Model.score",
)

TIMER: Final = Regression(
    "timed_arguments",
    """
      import time

      def timed(function):
          calls = []

          def run(*arguments):
              began = time.perf_counter()
              result = function(*arguments)
    -         calls.append((function.__name__, time.perf_counter() - began))
    +         calls.append((function.__name__, arguments, time.perf_counter() - began))
              return result

          run.calls = calls
          return run

      @timed
      @torch.no_grad()
      def evaluate(net, x):
          return net(x).mean().item()

      def run(net):
          for number in range(4):
    *         evaluate(net, torch.full((1024, 256), float(number)))
    """,
    "run(nn.Linear(256, 8))",
    (Blame("input", "aten::full", 3 * MIB),),
    holder="timed_arguments.evaluate.calls",
)

PARTIAL: Final = Regression(
    "put_off",
    """
      import functools

      class Later:
          def __init__(self):
              self.calls = []

          def put(self, function, *arguments):
              self.calls.append(functools.partial(function, *arguments))

      def serve(net, later, x):
          with torch.no_grad():
    *         logits = net(x)
    -     later.put(print, logits.mean().item())
    +     later.put(print, logits)
          return logits.argmax(-1)
    """,
    """
    net = nn.Linear(16, 256)
    for _ in range(3):
        serve(net, later, torch.ones(1024, 16))
    """,
    (Blame("temporary", MATMUL, 2 * MIB),),
    fixtures="@pytest.fixture\ndef later():\n    return Later()",
    uses="later",
    holder="the fixture 'later'.calls[*].args[*]",
)

PER_SAMPLE: Final = Regression(
    "chunks_of_samples",
    """
      def norms(net, x, count):
          parameters = {name: p.detach() for name, p in net.named_parameters()}

          def loss(parameters, row):
              return torch.func.functional_call(net, parameters, (row[None],)).square().sum()

          def some(part):
    *         found = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, part)
    *         return sum(g.flatten(1).square().sum(1) for g in found.values())

    -     return torch.cat([some(part) for part in x.split(count)])
    +     return some(x)
    """,
    "norms(nn.Linear(256, 64, bias=False), torch.ones(64, 256), 8)",
    # 64 KiB for each sample: the gradients, and their squares.
    (
        Blame("gradient", f"AddmmBackward0|MmBackward0|{MATMUL}", 56 * 64 * KIB),
        Blame("temporary", "aten::square|aten::pow", 56 * 64 * KIB),
    ),
)

OPTIMIZER_BY_NAME: Final = Regression(
    "optimizer_by_name",
    """
      from names import CONFIG

      KNOWN = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}

      def train(net):
          optimizer = KNOWN[CONFIG["optimizer"]](net.parameters(), lr=CONFIG["rate"])
          for _ in range(2):
              optimizer.zero_grad()
              net(torch.ones(8, 1024)).sum().backward()
    *         optimizer.step()
    """,
    "train(nn.Linear(1024, 512, bias=False))",
    # Both moments, of 2 MiB each.
    (Blame("optimizer state", "aten::zeros_like", 4 * MIB),),
    files={
        "names.py": """
          CONFIG = {
              "rate": 0.001,
        -     "optimizer": "sgd",
        +     "optimizer": "adam",
          }
        """
    },
)

PADDED_TO: Final = Regression(
    "pairs_in_toml",
    """
      from pathlib import Path

      def chunk():
          lines = Path(__file__).with_name("loss.toml").read_text().splitlines()
          return next(int(line.split(" = ")[1]) for line in lines if line.startswith("chunk"))

      @torch.no_grad()
      def contrast(a, b):
          total = 0.0
          targets = torch.arange(len(a))
          for part, target in zip(a.split(chunk()), targets.split(chunk())):
    *         total += F.cross_entropy(part @ b.T, target, reduction="sum").item()
          return total / len(a)
    """,
    "contrast(torch.ones(1024, 64), torch.ones(1024, 64))",
    # Rows of 4 KiB: 960 more of them, and their logarithms.
    (Blame("temporary", f"{MATMUL}|aten::_log_softmax", 960 * 4 * KIB),),
    files={
        "loss.toml": """
          [loss]
          kind = "contrast"
        - chunk = 64
        + chunk = 1024
        """
    },
)

UNTIED: Final = Regression(
    "untied_head",
    """
      class Words(nn.Module):
          def __init__(self):
              super().__init__()
              self.embed = nn.Embedding(8192, 128)
    -         self.head = self.embed
    +         self.head = nn.Linear(128, 8192, bias=False)

          def forward(self, tokens):
              return F.linear(self.embed(tokens), self.head.weight)

      def train(model, optimizer, tokens):
          for _ in range(2):
              F.cross_entropy(model(tokens), tokens).backward()
              optimizer.step()
              optimizer.zero_grad()
    """,
    """
    model = Words()
    train(model, torch.optim.AdamW(model.parameters()), torch.arange(16))
    """,
    # Its gradient and twice as much state are there for it.
    (Blame("parameter", "aten::empty", 4 * MIB),),
)

FUSED_INPUT: Final = Regression(
    "table_for_a_fused_kernel",
    """
      def table():
    -     return torch.ones(256, 1024)
    +     return torch.ones(1024, 1024)

      score = torch.compile(lambda rows, scale: (rows * scale).relu().sum(-1))
    """,
    """
    with torch.no_grad():
        score(rows, torch.ones(1024))
    """,
    # No operator reads it, and it was there before.
    (Blame("input", "", 3 * MIB),),
    fixtures="""
    @pytest.fixture
    def rows():
        return table()
    """,
    uses="rows",
)
