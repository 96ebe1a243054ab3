"""Regressions within a forward pass: types, copies, broadcasts, the order of products.

Of the last ones no line is to blame: all activations of a model, several times over.
"""

from __future__ import annotations

from typing import Final

from benchmarks.regression_programs.case import ANY, CAST, COPY, KIB, MATMUL, MIB, Blame, Regression

_MASK: Final = "aten::empty_like|aten::empty_strided|aten::bernoulli_"
_RELU: Final = "aten::relu|aten::clamp_min"

RELU_NOT_IN_PLACE: Final = Regression(
    "relu_not_in_place",
    """
      class Up(nn.Module):
          def __init__(self):
              super().__init__()
              self.up = nn.Linear(64, 512)
    -         self.act = nn.ReLU(inplace=True)
    +         self.act = nn.ReLU()

          @torch.no_grad()
          def forward(self, x):
    *         return self.act(self.up(x)).sum()
    """,
    "Up()(torch.ones(1024, 64))",
    (Blame("temporary", _RELU, 2 * MIB),),
)

RESIDUAL: Final = Regression(
    "residual",
    """
      class Block(nn.Module):
          def __init__(self):
              super().__init__()
              self.first = nn.Linear(256, 256)
              self.second = nn.Linear(256, 256)

          @torch.no_grad()
          def forward(self, x):
              x = self.first(x)
              y = self.second(x)
    -         x += y
    +         x = x + y
              return x
    """,
    "Block()(torch.ones(2048, 256))",
    (Blame("temporary", "aten::add", 2 * MIB),),
)

DROPOUT_MASK: Final = Regression(
    "dropout_mask",
    """
      class Layer(nn.Module):
          def __init__(self):
              super().__init__()
              self.fc = nn.Linear(128, 128, bias=False)

          def forward(self, x):
    -         keep = torch.empty_like(x, dtype=torch.bool).bernoulli_(0.9)
    +         keep = torch.empty_like(x).bernoulli_(0.9)
              return self.fc(x) * keep

      def train(layers, x):
          for layer in layers:
              x = layer(x)
          x.sum().backward()
    """,
    "train(nn.ModuleList(Layer() for _ in range(4)), torch.ones(2048, 128))",
    # A mask of a byte for each element becomes one of four, in four layers. The total peaked where
    # a product still needed all four masks. Now it peaks one operator later, where the last layer
    # makes its gradients and three are left: 3 MiB where 1 was.
    (Blame("activation", _MASK, 3 * MIB), Blame("activation", _MASK, 2 * MIB)),
)

SILU: Final = Regression(
    "silu_by_hand",
    """
      class Layer(nn.Module):
          def __init__(self):
              super().__init__()
              self.fc = nn.Linear(128, 128, bias=False)

          def forward(self, x):
              y = self.fc(x)
    -         return F.silu(y)
    +         return y * torch.sigmoid(y)

      def train(layers, x):
          for layer in layers:
              x = layer(x)
          x.sum().backward()
    """,
    "train(nn.ModuleList(Layer() for _ in range(4)), torch.ones(2048, 128))",
    (Blame("activation", "aten::sigmoid", 4 * MIB),),
)

NORM_IN_FLOAT32: Final = Regression(
    "norm_in_float32",
    """
      class Block(nn.Module):
          def __init__(self):
              super().__init__()
              self.fc = nn.Linear(128, 128, bias=False)

          def forward(self, x):
    -         normed = F.layer_norm(x, (128,))
    +         normed = F.layer_norm(x.float(), (128,)).to(x.dtype)
              return x + self.fc(normed)

      def train(blocks, x):
          for block in blocks:
              x = block(x)
          x.sum().backward()
    """,
    """
    blocks = nn.ModuleList(Block() for _ in range(4)).bfloat16()
    train(blocks, torch.ones(4096, 128, dtype=torch.bfloat16))
    """,
    # The float32 copy is kept by the norm, 2 MiB for each block but the first, whose input needs no
    # gradient; the bfloat16 one by the layer, 1 MiB for each of four. The norm's own result and the
    # sum, 1 MiB each, are no longer kept. Where the total peaks, in the backward pass of the last
    # norm, the last layer has let its bfloat16 copy go.
    (Blame("activation", CAST, 10 * MIB), Blame("activation", CAST, 9 * MIB)),
)

BROADCAST: Final = Regression(
    "broadcast",
    """
      @torch.no_grad()
      def error(prediction, target):
    -     return (prediction.squeeze(1) - target).square().mean()
    +     return (prediction - target).square().mean()
    """,
    "error(torch.ones(1024, 1), torch.ones(1024))",
    (Blame("temporary", "aten::sub|aten::square|aten::pow", 4 * MIB),),
)

DISTANCES: Final = Regression(
    "distances",
    """
      @torch.no_grad()
      def nearest(a, b):
    -     return torch.cdist(a, b).argmin(1)
    +     return (a[:, None] - b).norm(dim=-1).argmin(1)
    """,
    "nearest(torch.ones(256, 32), torch.ones(256, 32))",
    (Blame("temporary", "aten::sub", 8 * MIB),),
)

LOW_RANK: Final = Regression(
    "low_rank",
    """
      class LoRA(nn.Module):
          def __init__(self, width=1024, rank=4):
              super().__init__()
              self.down = nn.Parameter(torch.zeros(width, rank))
              self.up = nn.Parameter(torch.zeros(rank, width))

          @torch.no_grad()
          def forward(self, x):
    -         return (x @ self.down) @ self.up
    +         return x @ (self.down @ self.up)
    """,
    "LoRA()(torch.ones(8, 1024))",
    (Blame("temporary", MATMUL, 4 * MIB),),
)

ONE_HOT: Final = Regression(
    "one_hot_embedding",
    """
      class Embed(nn.Module):
          def __init__(self, size=1024, width=64):
              super().__init__()
              self.weight = nn.Parameter(torch.zeros(size, width))

          @torch.no_grad()
          def forward(self, tokens):
    -         return self.weight[tokens]
    +         return F.one_hot(tokens, len(self.weight)).float() @ self.weight
    """,
    "Embed()(torch.arange(512))",
    # One hot is int64: 8 B for each of 512 x 1024, beside the float32 copy.
    (Blame("temporary", "aten::one_hot|aten::zeros|aten::empty", 4 * MIB),),
)

SPARSE: Final = Regression(
    "dense_gradient",
    """
      class Bag(nn.Module):
          def __init__(self):
              super().__init__()
    -         self.embed = nn.Embedding(16384, 64, sparse=True)
    +         self.embed = nn.Embedding(16384, 64)

          def forward(self, tokens):
    *         return self.embed(tokens).sum()

      def train(model, tokens):
    *     model(tokens).backward()
    """,
    "train(Bag(), torch.arange(64))",
    # The backward kernel of embedding calls zeros.
    (
        Blame(
            "gradient",
            "aten::embedding_backward|aten::embedding_dense_backward|aten::zeros",
            4 * MIB,
        ),
    ),
)

UNFOLD: Final = Regression(
    "unfolded_convolution",
    """
      class Convolution(nn.Module):
          def __init__(self):
              super().__init__()
              self.weight = nn.Parameter(torch.ones(8, 8, 3, 3))

          @torch.no_grad()
          def forward(self, x):
    -         return F.conv2d(x, self.weight, padding=1)
    +         columns = F.unfold(x, 3, padding=1)
    +         return (self.weight.flatten(1) @ columns).view_as(x)
    """,
    "Convolution()(torch.ones(4, 8, 64, 64))",
    # The columns are 9 times the input of 512 KiB. matmul folds the smaller operand: it copies the
    # columns and, the other way round, its result.
    (
        Blame("temporary", "aten::im2col", 9 * 512 * KIB),
        Blame("temporary", COPY, 10 * 512 * KIB),
    ),
)

PADDING: Final = Regression(
    "padding_apart",
    """
      class Block(nn.Module):
          def __init__(self):
              super().__init__()
    -         self.convolution = nn.Conv2d(16, 4, 3, padding=1)
    +         self.convolution = nn.Conv2d(16, 4, 3)

          def forward(self, x):
    +         x = F.pad(x, (1, 1, 1, 1))
              return self.convolution(x)
    """,
    "Block()(torch.ones(4, 16, 64, 64)).sum().backward()",
    (Blame("activation", "aten::pad|aten::constant_pad_nd", 4 * 16 * 66 * 66 * 4),),
)

CONTIGUOUS: Final = Regression(
    "contiguous",
    """
      @torch.no_grad()
      def channels(x):
    -     return x.transpose(1, 2).amax(-1)
    +     return x.transpose(1, 2).contiguous().amax(-1)
    """,
    "channels(torch.ones(16, 256, 256))",
    (Blame("temporary", COPY, 4 * MIB),),
)

FLOAT64_MEAN: Final = Regression(
    "float64_mean",
    """
      import numpy

      MEAN = numpy.array([0.5] * 64)

      @torch.no_grad()
      def normalise(images):
    -     mean = torch.tensor(MEAN, dtype=torch.float32)
    +     mean = torch.tensor(MEAN)
    *     return images - mean
    """,
    "normalise(torch.ones(8192, 64))",
    # A difference of two types makes a copy of the narrower operand (4 MiB, may be named itself),
    # and its result is twice as wide.
    (Blame("temporary", "aten::sub", 6 * MIB), Blame("temporary", CAST, 4 * MIB)),
)

ALL_HIDDEN_STATES: Final = Regression(
    "all_hidden_states",
    """
      class Net(nn.Module):
          def __init__(self):
              super().__init__()
              self.cell = nn.Linear(128, 128)

          @torch.no_grad()
          def forward(self, x):
              states = []
              for _ in range(8):
    *             x = torch.relu_(self.cell(x))
    -             states = [x]
    +             states.append(x)
              return states[-1]
    """,
    "Net()(torch.ones(2048, 128))",
    # Eight where two were: the last one and the one that is being made.
    (Blame("temporary", MATMUL, 6 * MIB),),
)

EXPERTS: Final = Regression(
    "all_experts",
    """
      class Experts(nn.Module):
          def __init__(self, count=8, width=128):
              super().__init__()
              self.route = nn.Linear(width, count)
              self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

          @torch.no_grad()
          def forward(self, x):
              choice = self.route(x).argmax(-1)
    -         out = torch.empty_like(x)
    -         for number, expert in enumerate(self.experts):
    -             out[choice == number] = expert(x[choice == number])
    -         return out
    +         every = torch.stack([expert(x) for expert in self.experts])
    +         return every[choice, torch.arange(len(x))]
    """,
    "Experts()(torch.randn(1024, 128))",
    # Each expert's answer is there in the list and in the stack.
    (Blame("temporary", f"aten::stack|aten::cat|{MATMUL}", 4 * MIB),),
)

SORT: Final = Regression(
    "sort_for_top",
    """
      @torch.no_grad()
      def best(scores):
    -     return scores.topk(8).indices
    +     return scores.sort(descending=True).indices[:, :8]
    """,
    "best(torch.rand(256, 1024))",
    # Values in float32 and indices in int64.
    (Blame("temporary", "aten::sort", 3 * MIB),),
)

VARIANCE: Final = Regression(
    "variance_by_hand",
    """
      @torch.no_grad()
      def variance(x):
    -     return x.var(0)
    +     return (x - x.mean(0)).square().mean(0)
    """,
    "variance(torch.rand(2048, 256))",
    (Blame("temporary", "aten::sub|aten::square|aten::pow", 2 * MIB),),
)

SOFTMAX_BY_HAND: Final = Regression(
    "softmax_by_hand",
    """
      @torch.no_grad()
      def probabilities(scores):
    -     return scores.softmax(-1)
    +     shifted = scores - scores.amax(-1, keepdim=True)
    +     return shifted.exp() / shifted.exp().sum(-1, keepdim=True)
    """,
    "probabilities(torch.rand(1024, 512))",
    # Three at once, of which one is as large as the softmax: shifted, exp, and exp or the quotient.
    (
        Blame("temporary", "aten::sub|aten::div", 2 * MIB),
        Blame("temporary", "aten::exp", 2 * MIB),
        Blame("temporary", "aten::exp", 4 * MIB),
    ),
)

PADDED_BATCH: Final = Regression(
    "padded_batch",
    """
      @torch.no_grad()
      def pack(rows):
    -     width = max(map(len, rows))
    +     width = 4096
    *     batch = torch.zeros(len(rows), width)
          for number, row in enumerate(rows):
              batch[number, : len(row)] = row
          return batch
    """,
    "pack([torch.ones(512)] * 256)",
    (Blame("input|temporary", "aten::zeros|aten::empty", 7 * 512 * KIB),),
)

TIED: Final = Regression(
    "weights_not_tied",
    """
      class LM(nn.Module):
          def __init__(self, size=4096, width=64):
              super().__init__()
              self.embed = nn.Embedding(size, width)
    *         self.head = nn.Linear(width, size, bias=False)
    -         self.head.weight = self.embed.weight

          @torch.no_grad()
          def forward(self, tokens):
              return self.head(self.embed(tokens))
    """,
    "LM()(torch.arange(256))",
    (Blame("parameter", "aten::empty", MIB),),
)

WIDER: Final = Regression(
    "wider",
    """
      class MLP(nn.Module):
          def __init__(self, width=64):
              super().__init__()
    -         self.up = nn.Linear(width, 4 * width)
    -         self.down = nn.Linear(4 * width, width)
    +         self.up = nn.Linear(width, 8 * width)
    +         self.down = nn.Linear(8 * width, width)

          @torch.no_grad()
          def forward(self, x):
    *         return self.down(F.relu(self.up(x), inplace=True))
    """,
    "MLP()(torch.ones(2048, 64))",
    (Blame("temporary", MATMUL, 2 * MIB),),
)

MASKING: Final = Regression(
    "mask_as_float",
    """
      @torch.no_grad()
      def hide(x, hidden):
    -     return x.masked_fill(hidden, 0)
    +     return x * (~hidden).float()
    """,
    "hide(torch.ones(1024, 512), torch.zeros(1024, 512, dtype=torch.bool))",
    (Blame("temporary", f"{CAST}|aten::mul", 2 * MIB),),
)

COMPILED: Final = Regression(
    "compiled",
    """
      @torch.compile(backend="aot_eager")
      def score(x):
    -     y = x * 2
    +     y = x.repeat(4, 1) * 2
          return y.sum()
    """,
    """
    with torch.no_grad():
        score(torch.ones(1024, 256))
    """,
    # Repeated is 4 MiB, and the product of it is 4 MiB where it was 1.
    (Blame("temporary", "aten::repeat|aten::clone|aten::copy_", 4 * MIB),),
)

COMPILED_TRAINING: Final = Regression(
    "compiled_training",
    """
      @torch.compile(backend="aot_eager")
      def loss(x, w):
          y = x @ w
    -     return F.silu(y).sum()
    +     return (y * torch.sigmoid(y)).sum()
    """,
    """
    w = torch.ones(64, 256, requires_grad=True)
    loss(torch.ones(2048, 64), w).backward()
    """,
    # In the backward pass there is a second product and the sigmoid's own gradient, too.
    (
        Blame("activation", "aten::sigmoid", 2 * MIB),
        Blame("temporary", "aten::mul", 2 * MIB),
        Blame("temporary", "aten::mul", 4 * MIB),
    ),
)

DROPOUT_ON: Final = Regression(
    "dropout_on",
    """
      @torch.no_grad()
      def evaluate(net, x):
    -     net.eval()
    +     net.train()
    *     return net(x).sum()
    """,
    "evaluate(nn.Sequential(nn.Linear(64, 1024), nn.Dropout(0.1)), torch.ones(1024, 64))",
    # What it returns and its mask, each as large as its input.
    (Blame("temporary", "aten::dropout|aten::native_dropout|aten::mul|aten::empty_like", 4 * MIB),),
)

FORWARD_MODE: Final = Regression(
    "forward_mode",
    """
      def f(x):
          return torch.stack([x.sin().sum(), x.cos().sum()])

      def jacobian(x):
    -     return torch.func.jacrev(f)(x)
    +     return torch.func.jacfwd(f)(x)
    """,
    "jacobian(torch.ones(512))",
    # One row of 2 KiB for each of 512 inputs, where each of two outputs had one.
    (
        Blame("temporary", "aten::new_zeros", MIB),
        Blame("temporary", "aten::mul|aten::sin|aten::cos|aten::neg", MIB),
    ),
)

TURNED_WEIGHT: Final = Regression(
    "turned_weight",
    """
      class Tied(nn.Module):
          def __init__(self):
              super().__init__()
              self.table = nn.Embedding(2048, 512)

          def forward(self, x):
    -         return x @ self.table.weight.t()
    +         return x @ self.table.weight.t().contiguous()
    """,
    "Tied()(torch.ones(4, 512)).sum().backward()",
    # The gradient comes turned round, and is copied into one that lies as the weight does.
    (Blame("gradient", "torch::autograd::AccumulateGrad", 4 * MIB),),
)

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
