"""Regressions of public issue trackers, each with its report; the edit is in another file."""

from __future__ import annotations

from typing import Final

from benchmarks.regression_programs.case import MATMUL, MIB, Blame, Regression

_KEPT: Final = "temporary|activation|autograd detail"

# EnnyvanBeest/UnitMatch#151: a parameter of chunks
CHUNK: Final = Regression(
    "chunk_by_default",
    """
      from parameters import default_parameters

      def nearest(points, centres, parameters=None):
          size = {**default_parameters(), **(parameters or {})}["chunk"]
    *     return [(p[:, None] - centres).square().sum(-1).argmin(-1) for p in points.split(size)]
    """,
    "nearest(torch.ones(512, 32), torch.ones(128, 32))",
    (Blame("temporary", "aten::sub|aten::square|aten::pow", 4 * MIB),),
    files={
        "parameters.py": """
          def default_parameters():
              return {
                  "metric": "euclidean",
        -         "chunk": 16,
        +         "chunk": 512,
              }
        """
    },
)

# AUTOMATIC1111/stable-diffusion-webui#13535
CHECKPOINTS: Final = Regression(
    "checkpoints_in_memory",
    """
      import settings

      class Checkpoints:
          def __init__(self):
              self.loaded = {}

          def load(self, name):
    *         self.loaded[name] = torch.ones(512, 1024)
              while len(self.loaded) > settings.OPTIONS["checkpoints_in_ram"]:
                  del self.loaded[next(iter(self.loaded))]
              return self.loaded[name]
    """,
    "c = Checkpoints()\nfor name in 'abcd':\n    c.load(name)",
    (Blame("temporary|input", "aten::ones", 4 * MIB),),
    files={
        "settings.py": """
          OPTIONS = {"theme": "dark"}
        - OPTIONS["checkpoints_in_ram"] = 1
        + OPTIONS["checkpoints_in_ram"] = 4
        """
    },
)

# huggingface/transformers#20887
HIDDEN_BY_CONFIG: Final = Regression(
    "hidden_by_config",
    """
      from config import Config

      @torch.no_grad()
      def encode(net, x, config=Config):
          hidden = []
          for layer in net:
    *         x = layer(x)
              if config.output_hidden_states:
                  hidden.append(x)
          return x, hidden
    """,
    "encode(nn.ModuleList([nn.Linear(256, 256) for _ in range(8)]), torch.ones(1024, 256))",
    (Blame("temporary", MATMUL, 5 * MIB),),
    files={
        "config.py": """
          class Config:
              layers = 8
        -     output_hidden_states = False
        +     output_hidden_states = True
        """
    },
)

# bigcode-project/starcoder#112
NO_CHECKPOINTING: Final = Regression(
    "no_checkpointing_flag",
    """
      from torch.utils.checkpoint import checkpoint

      from arguments import parse

      def train(net, x):
          arguments = parse([])
          for layer in net:
              if arguments.no_checkpointing:
    *             x = layer(x)
              else:
                  x = checkpoint(layer, x, use_reentrant=False)
          x.sum().backward()
    """,
    "parts = [(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(4)]\n"
    "layers = [nn.Sequential(*part) for part in parts]\n"
    "train(nn.ModuleList(layers), torch.ones(1024, 128))",
    (Blame(_KEPT, f"{MATMUL}|aten::gelu", 6 * MIB),),
    files={
        "arguments.py": """
          import argparse

          def parse(typed):
              parser = argparse.ArgumentParser()
              parser.add_argument("--rate", type=float, default=0.1)
        -     parser.add_argument("--no_checkpointing", type=bool, default=False)
        +     parser.add_argument("--no_checkpointing", type=bool, default=True)
              return parser.parse_args(typed)
        """
    },
)

# jiangxinke/Harness-RL#5
USE_CACHE: Final = Regression(
    "use_cache_in_training",
    """
      from memory import optimize

      class Net(nn.Module):
          def __init__(self):
              super().__init__()
              self.use_cache = False
              self.layers = nn.ModuleList([nn.Linear(128, 256) for _ in range(6)])

          @torch.no_grad()
          def forward(self, x):
              cache = []
              for layer in self.layers:
    *             keys = layer(x)
                  if self.use_cache:
                      cache.append(keys)
                  x = keys[:, :128] + keys[:, 128:]
              return x, cache
    """,
    "net = Net()\noptimize(net)\nnet(torch.ones(1024, 128))",
    (Blame("temporary", MATMUL, 4 * MIB),),
    fixtures="from memory import optimize",
    files={
        "memory.py": """
          def optimize(net):
              net.train()
        -     net.use_cache = False
        +     net.use_cache = True
              return net
        """
    },
)

# EuroEval/EuroEval#973
ACCUMULATION: Final = Regression(
    "accumulation_by_file",
    """
      import json
      from pathlib import Path

      def evaluate(net, batches):
          every = json.loads(Path(__file__).with_name("evaluation.json").read_text())["every"]
          done, kept = [], []
          with torch.no_grad():
              for number, x in enumerate(batches, 1):
    *             kept.append(net(x))
                  if number % every == 0:
                      done += [k.argmax(1) for k in kept]
                      kept.clear()
          return done, kept
    """,
    "evaluate(nn.Linear(64, 512), [torch.ones(512, 64) for _ in range(8)])",
    (Blame("temporary", MATMUL, 6 * MIB),),
    files={
        "evaluation.json": """
          {
              "metric": "accuracy",
        -     "every": 1
        +     "every": 64
          }
        """
    },
)

# vllm-project/vllm#25350: the type of a cache
CACHE_TYPE: Final = Regression(
    "cache_type_by_name",
    """
      from types_by_name import TYPES

      def cache(name, length=4096, width=256):
    *     return torch.zeros(2, length, width, dtype=TYPES[name])
    """,
    "cache('half')",
    (Blame("temporary|input", "aten::zeros", 4 * MIB),),
    files={
        "types_by_name.py": """
          TYPES = {
              "full": torch.float32,
        -     "half": torch.float16,
        +     "half": torch.float32,
          }
        """
    },
)

# allenai/allennlp#4689
MAX_LENGTH: Final = Regression(
    "length_of_a_state",
    """
      from generation import Generation

      def start(width=256):
          options = Generation()
    *     return torch.zeros(options.beams, options.max_length, width)
    """,
    "start()",
    (Blame("temporary|input", "aten::zeros", 3 * MIB),),
    files={
        "generation.py": """
          from dataclasses import dataclass

          @dataclass
          class Generation:
              beams: int = 4
        -     max_length: int = 128
        +     max_length: int = 1024
        """
    },
)

# awslabs/sockeye#1035
BEAMS: Final = Regression(
    "beams_in_yaml",
    """
      from pathlib import Path

      def beams():
          lines = Path(__file__).with_name("decode.yaml").read_text().splitlines()
          return int(next(line.split(": ")[1] for line in lines if line.startswith("beams")))

      @torch.no_grad()
      def decode(states):
    *     return states.repeat_interleave(beams(), 0).mean(1)
    """,
    "decode(torch.ones(2, 128, 512))",
    (Blame("temporary", "aten::repeat_interleave|aten::index_select", 4 * MIB),),
    files={
        "decode.yaml": """
          length: 32
        - beams: 2
        + beams: 16
        """
    },
)

# recursionpharma/gflownet#130
CAPACITY: Final = Regression(
    "capacity_of_replay",
    """
      from replay import Replay

      def play(steps):
          replay = Replay()
          for _ in range(steps):
    *         replay.push(torch.ones(256, 1024))
          return replay
    """,
    "play(8)",
    (Blame("temporary|input", "aten::ones", 5 * MIB),),
    files={
        "replay.py": """
          from collections import deque

          class Replay:
        -     def __init__(self, capacity=2):
        +     def __init__(self, capacity=64):
                  self.items = deque(maxlen=capacity)

              def push(self, item):
                  self.items.append(item)
        """
    },
)

# oxwhirl/pymarl#73: its logger
NOT_CLEARED: Final = Regression(
    "statistics_not_cleared",
    """
      from log import Logger

      @torch.no_grad()
      def train(net, steps):
          logger = Logger()
          for at in range(steps):
    *         logger.note("features", net(torch.ones(1024, 128)))
              logger.flush()
          return logger
    """,
    "train(nn.Linear(128, 256), 6)",
    (Blame("temporary", MATMUL, 4 * MIB),),
    files={
        "log.py": """
          class Logger:
              def __init__(self):
                  self.statistics = {}

              def note(self, name, value):
                  self.statistics.setdefault(name, []).append(value)

              def flush(self):
                  means = {n: float(v[-1].mean()) for n, v in self.statistics.items()}
        -         self.statistics.clear()
                  return means
        """
    },
)

# horovod/horovod#641
METRIC: Final = Regression(
    "metric_with_graph",
    """
      from metric import Metric

      def train(net, batches):
          metric = Metric()
          for x in batches:
    *         loss = net(x).sigmoid().mean()
              metric.update(loss)
          return metric
    """,
    "train(nn.Linear(256, 256), [torch.ones(1024, 256) for _ in range(4)])",
    (Blame(_KEPT, f"{MATMUL}|aten::sigmoid", 2 * MIB),),
    files={
        "metric.py": """
          class Metric:
              def __init__(self):
                  self.total, self.count = torch.tensor(0.0), 0

              def update(self, value):
        -         self.total += value.detach()
        +         self.total = self.total + value
                  self.count += 1
        """
    },
)

# pykeen/pykeen#419: a state of the best epoch
BEST_STATES: Final = Regression(
    "states_of_all_epochs",
    """
      from stopping import Stopper

      def train(net, epochs):
          stopper = Stopper()
          for _ in range(epochs):
    *         stopper.see(net)
          return stopper
    """,
    "train(nn.Linear(512, 512), 5)",
    (Blame("temporary|input", "aten::clone", 3 * MIB),),
    files={
        "stopping.py": """
          class Stopper:
              def __init__(self):
                  self.states = []

              def see(self, net):
        *         state = {n: t.clone() for n, t in net.state_dict().items()}
        -         self.states = [state]
        +         self.states.append(state)
        """
    },
)

# skorch-dev/skorch#218
MODE: Final = Regression(
    "mode_of_validation",
    """
      import modes

      def validate(net, batches):
          with modes.VALIDATION():
    *         return sum(net(x).tanh().mean() for x in batches)
    """,
    "validate(nn.Linear(256, 256), [torch.ones(1024, 256) for _ in range(4)])",
    (Blame(_KEPT, f"{MATMUL}|aten::tanh", 2 * MIB),),
    files={
        "modes.py": """
          TRAINING = torch.enable_grad
        - VALIDATION = torch.no_grad
        + VALIDATION = torch.enable_grad
        """
    },
)

# facebookresearch/fairchem#199
WRAPPED: Final = Regression(
    "wrapped_evaluation",
    """
      from wrapping import evaluation

      @evaluation
      def evaluate(net, batches):
    *     return sum(net(x).tanh().mean() for x in batches)
    """,
    "evaluate(nn.Linear(256, 256), [torch.ones(1024, 256) for _ in range(4)])",
    (Blame(_KEPT, f"{MATMUL}|aten::tanh", 2 * MIB),),
    files={
        "wrapping.py": """
          import functools

          def evaluation(function):
              @functools.wraps(function)
              def wrapped(net, *arguments):
                  net.eval()
        -         with torch.no_grad():
        -             return function(net, *arguments)
        +         return function(net, *arguments)
              return wrapped
        """
    },
)

# akanimax/msg-gan-v1#3: a generator that samples
SAMPLES: Final = Regression(
    "samples_with_graph",
    """
      from sampling import sampled

      def images(net, count):
    *     return [sampled(net, torch.ones(256, 128)).amax(1) for _ in range(count)]
    """,
    "images(nn.Linear(128, 1024), 5)",
    (Blame(_KEPT, f"{MATMUL}|aten::sigmoid", 3 * MIB),),
    files={
        "sampling.py": """
          def sampled(net, noise):
        -     return torch.sigmoid(net(noise).detach())
        +     return torch.sigmoid(net(noise))
        """
    },
)

# rusty1s/pytorch_scatter#84
BUCKETS: Final = Regression(
    "buckets_too_many",
    """
      from buckets import bucket

      @torch.no_grad()
      def pooled(features, places):
          index = bucket(places)
    *     out = torch.zeros(int(index.max()) + 1, features.shape[1])
          return out.index_add_(0, index, features)
    """,
    "pooled(torch.ones(256, 256), torch.arange(256))",
    (Blame("temporary|input", "aten::zeros", 3 * MIB),),
    files={
        "buckets.py": """
          SIDE = 16

          def bucket(places):
        -     return places % SIDE
        +     return places * SIDE
        """
    },
)

# huggingface/transformers#10722
PREDICTIONS: Final = Regression(
    "predictions_whole",
    """
      from collecting import REDUCED

      @torch.no_grad()
      def predict(net, batches):
    *     return [REDUCED(net(x)) for x in batches]
    """,
    "predict(nn.Linear(64, 512), [torch.ones(512, 64) for _ in range(6)])",
    (Blame("temporary", MATMUL, 4 * MIB),),
    files={
        "collecting.py": """
        - REDUCED = lambda logits: logits.argmax(-1)
        + REDUCED = lambda logits: logits
        """
    },
)

# huggingface/diffusers#10611: each nth block is checkpointed
EACH_NTH: Final = Regression(
    "each_nth_block",
    """
      from torch.utils.checkpoint import checkpoint

      from blocks import interval

      def train(net, x):
          for number, block in enumerate(net):
              if number % interval() == 0:
                  x = checkpoint(block, x, use_reentrant=False)
              else:
    *             x = block(x)
          x.sum().backward()
    """,
    "parts = [(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(4)]\n"
    "layers = [nn.Sequential(*part) for part in parts]\n"
    "train(nn.ModuleList(layers), torch.ones(1024, 128))",
    (Blame(_KEPT, f"{MATMUL}|aten::gelu", 6 * MIB),),
    files={
        "blocks.py": """
        - def interval(n=1):
        + def interval(n=4):
              return n
        """
    },
)

# embeddings-benchmark/mteb#1378
EMBEDDINGS: Final = Regression(
    "embeddings_with_gradients",
    """
      from models import Wrapper

      def embeddings(batches):
          wrapper = Wrapper()
    *     return [wrapper.encode(x) for x in batches]
    """,
    "embeddings([torch.ones(1024, 128) for _ in range(4)])",
    (Blame(_KEPT, f"{MATMUL}|aten::gelu|aten::amax", 3 * MIB),),
    files={
        "models.py": """
          class Wrapper:
              def __init__(self):
                  self.net = nn.Linear(128, 256)

        -     @torch.no_grad()
              def encode(self, x):
        *         return F.gelu(self.net(x)).amax(1)
        """
    },
)
