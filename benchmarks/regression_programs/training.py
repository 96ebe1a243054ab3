"""Regressions of a training step: optimizers, hooks, checkpointing, autocast."""

from __future__ import annotations

from typing import Final

from benchmarks.regression_programs.case import CAST, MATMUL, MIB, Blame, Regression

_ZEROS: Final = "aten::zeros_like|aten::empty_like|aten::zeros|aten::empty"

#: Four weights of 1 MiB, and a step whose activations are small.
_WEIGHTS: Final = "nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))"


def _step(before: str, after: str) -> str:
    """A training step with the optimizer that an edit replaces by another one."""
    return f"""
      def make(model):
    -     return torch.optim.{before}
    +     return torch.optim.{after}

      def train(model, x):
          optimizer = make(model)
    *     model(x).sum().backward()
    *     optimizer.step()
    """


MOMENTUM: Final = Regression(
    "momentum",
    _step("SGD(model.parameters(), 0.1)", "SGD(model.parameters(), 0.1, momentum=0.9)"),
    f"train({_WEIGHTS}, torch.ones(1, 512))",
    (Blame("optimizer state", "aten::clone", 4 * MIB),),
)

AMSGRAD: Final = Regression(
    "amsgrad",
    _step("Adam(model.parameters())", "Adam(model.parameters(), amsgrad=True)"),
    f"train({_WEIGHTS}, torch.ones(1, 512))",
    (Blame("optimizer state", _ZEROS, 4 * MIB),),
)

FOREACH: Final = Regression(
    "foreach",
    _step("Adam(model.parameters())", "Adam(model.parameters(), foreach=True)"),
    f"train({_WEIGHTS}, torch.ones(1, 512))",
    # The roots of all second moments at once, 4 MiB; the same line made 3 MiB of scratch before.
    (Blame("temporary", "aten::_foreach_sqrt|aten::sqrt", MIB),),
)

MASTER_WEIGHTS: Final = Regression(
    "master_weights",
    """
      class SGD(torch.optim.Optimizer):
          def __init__(self, params):
              super().__init__(params, {})

          @torch.no_grad()
          def step(self):
              for p in self.param_groups[0]["params"]:
    -             p.sub_(0.1 * p.grad)
    +             state = self.state[p]
    +             if not state:
    +                 state["master"] = p.detach().float()
    +             state["master"].sub_(0.1 * p.grad.float())
    +             p.copy_(state["master"])
    """,
    """
    model(torch.ones(1, 512, dtype=torch.bfloat16)).sum().backward()
    SGD(model.parameters()).step()
    """,
    (Blame("optimizer state", CAST, 4 * MIB),),
    fixtures=f"""
    @pytest.fixture
    def model():
        return {_WEIGHTS}.bfloat16()
    """,
    uses="model",
)

EXTRA_STATE: Final = Regression(
    "extra_state",
    """
      class Averaged(torch.optim.SGD):
          @torch.no_grad()
          def step(self):
              super().step()
              for p in self.param_groups[0]["params"]:
                  state = self.state[p]
    +             average = state.setdefault("average", torch.zeros_like(p))
    +             average.lerp_(p, 0.1)
                  state["step"] = state.get("step", 0) + 1
    """,
    f"""
    model = {_WEIGHTS}
    model(torch.ones(1, 512)).sum().backward()
    Averaged(model.parameters(), 0.1).step()
    """,
    (Blame("optimizer state", _ZEROS, 4 * MIB),),
)

EMA: Final = Regression(
    "moving_average",
    """
      import copy

      def prepare(model):
    +     average = copy.deepcopy(model).requires_grad_(False)
          model(torch.ones(1, 512)).sum().backward()
    -     return model
    +     return average
    """,
    "prepare(model)",
    (Blame("parameter", "aten::clone", 4 * MIB),),
    fixtures=f"""
    @pytest.fixture
    def model():
        return {_WEIGHTS}
    """,
    uses="model",
)

AVERAGED_MODEL: Final = Regression(
    "averaged_model",
    """
      from torch.optim.swa_utils import AveragedModel

      def evaluate(model, x):
    +     model = AveragedModel(model)
          with torch.no_grad():
              return model(x).sum().item()
    """,
    f"evaluate({_WEIGHTS}, torch.ones(1, 512))",
    (Blame("parameter", "aten::clone", 4 * MIB),),
)

CLIP_BY_CAT: Final = Regression(
    "clip_by_cat",
    """
      def clip(parameters, largest):
          gradients = [p.grad for p in parameters]
    -     norm = torch.stack([g.norm() for g in gradients]).norm()
    +     norm = torch.cat([g.flatten() for g in gradients]).norm()
          for g in gradients:
              g.mul_(torch.clamp(largest / norm, max=1.0))
    """,
    f"""
    model = {_WEIGHTS}
    model(torch.ones(1, 512)).sum().backward()
    clip(model.parameters(), 1.0)
    """,
    (Blame("temporary", "aten::cat", 4 * MIB),),
)

CLIP_COPIES: Final = Regression(
    "clip_copies",
    """
      def clip(parameters, largest):
    -     gradients = [p.grad for p in parameters]
    +     gradients = [p.grad.float() for p in parameters]
          return min(1.0, largest / torch.stack([g.norm() for g in gradients]).norm().item())
    """,
    f"""
    model = {_WEIGHTS}.bfloat16()
    model(torch.ones(1, 512, dtype=torch.bfloat16)).sum().backward()
    clip(model.parameters(), 1.0)
    """,
    # Copies of gradients, and no gradients of anything.
    (Blame("temporary", CAST, 4 * MIB),),
)

ZEROED: Final = Regression(
    "gradients_zeroed",
    """
      class Model(nn.Module):
          def __init__(self):
              super().__init__()
              self.up = nn.Linear(512, 1024, bias=False)
              self.down = nn.Linear(1024, 512, bias=False)

          def forward(self, x):
    *         return self.down(torch.tanh(self.up(x)))

      def train(model, x, steps):
          optimizer = torch.optim.SGD(model.parameters(), 0.1)
          for _ in range(steps):
    -         optimizer.zero_grad()
    +         optimizer.zero_grad(set_to_none=False)
    *         model(x).sum().backward()
              optimizer.step()
    """,
    "train(Model(), torch.ones(2048, 512), 2)",
    # Where memory peaks, in the backward of tanh, the second layer has its gradient; that of the
    # first one is there now, too.
    (Blame("gradient", MATMUL, 2 * MIB),),
)

GRADIENT_HOOK: Final = Regression(
    "gradient_hook",
    """
      def watch(model):
          seen = []
          for p in model.parameters():
    -         p.register_hook(lambda g: seen.append(g.norm()))
    +         p.register_hook(lambda g: seen.append(g.clone()))
          return seen
    """,
    f"""
    model = {_WEIGHTS}
    seen = watch(model)
    model(torch.ones(1, 512)).sum().backward()
    """,
    # They are made between two nodes of the backward pass, where a hook may also make what it hands
    # on in the gradient's place.
    (Blame("temporary|autograd detail", "aten::clone", 4 * MIB),),
)

GRADIENT_HISTORY: Final = Regression(
    "gradient_history",
    """
      class Watch:
          def __init__(self):
              self.history = []

          def note(self, model):
              for p in model.parameters():
    -             self.history.append(p.grad.norm().item())
    +             self.history.append(p.grad)

          def train(self, model, x):
              model.zero_grad()
    *         model(x).sum().backward()
              self.note(model)
    """,
    f"""
    model = {_WEIGHTS}
    for _ in range(2):
        watch.train(model, torch.ones(1, 512))
    """,
    # 4 MiB of the first step are there beside those of the second; all 8 MiB are left behind.
    (
        Blame("gradient", MATMUL, 4 * MIB),
        Blame("gradient", MATMUL, 8 * MIB),
    ),
    fixtures="""
    @pytest.fixture
    def watch():
        return Watch()
    """,
    uses="watch",
    holder="'watch'.history",
)

FORWARD_HOOKS: Final = Regression(
    "forward_hooks",
    """
      FEATURES = {}

      def watch(model):
          for name, layer in model.named_children():
              def note(module, inputs, output, name=name):
    -             FEATURES[name] = output.mean().item()
    +             FEATURES[name] = output

              layer.register_forward_hook(note)

      @torch.no_grad()
      def run(model, x):
    *     return model(x).sum().item()
    """,
    """
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)))
    watch(model)
    run(model, torch.ones(2048, 128))
    """,
    # Six outputs of 1 MiB, of which two were there at a time.
    (Blame("temporary", MATMUL, 4 * MIB), Blame("temporary", MATMUL, 6 * MIB)),
    holder="forward_hooks.FEATURES",
)

FEATURE_COPIES: Final = Regression(
    "feature_copies",
    """
      class Probe:
          def __init__(self, model):
              self.seen = []
              for layer in model:
                  layer.register_forward_hook(self.note)

          def note(self, module, inputs, output):
    -         self.seen.append(output.mean().item())
    +         self.seen.append(output.detach().clone())
    """,
    """
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
    probe = Probe(model)
    with torch.no_grad():
        model(torch.ones(2048, 128))
    """,
    (Blame("temporary", "aten::clone", 4 * MIB),),
)

BACKWARD_HOOKS: Final = Regression(
    "backward_hooks",
    """
      GRADIENTS = []

      def watch(model):
          def note(module, inputs, outputs):
    -         GRADIENTS.append(outputs[0].norm().item())
    +         GRADIENTS.append(outputs[0])

          for layer in model:
              layer.register_full_backward_hook(note)

      def train(model, x):
    *     out = model(x)
    *     out.sum().backward()
    """,
    """
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(6)))
    watch(model)
    train(model, torch.ones(8192, 32))
    """,
    # Of the last layer's output the gradient is one number, expanded; those of the other five are
    # products of 1 MiB. The total peaks where it did, so that only what is left behind has grown.
    (Blame("autograd detail", MATMUL, 5 * MIB),),
    holder="backward_hooks.GRADIENTS",
)

_BLOCKS: Final = """
      from torch.utils.checkpoint import checkpoint, checkpoint_sequential

      class Block(nn.Module):
          def __init__(self, width=64):
              super().__init__()
              self.up = nn.Linear(width, 4 * width)
              self.down = nn.Linear(4 * width, width)

          def forward(self, x):
    *         return x + self.down(torch.tanh(self.up(x)))
"""

ONE_BLOCK: Final = Regression(
    "one_block",
    f"""{_BLOCKS}
      class Model(nn.Module):
          def __init__(self):
              super().__init__()
              self.blocks = nn.ModuleList(Block() for _ in range(4))

          def forward(self, x):
              for number, block in enumerate(self.blocks):
    -             x = checkpoint(block, x, use_reentrant=False)
    +             kept = number == 0
    +             x = block(x) if kept else checkpoint(block, x, use_reentrant=False)
              return x
    """,
    "Model()(torch.ones(1024, 64)).sum().backward()",
    # The wide tanh of the first block, beside that of the one that is run again.
    (Blame("activation", "aten::tanh", MIB),),
)

SEGMENTS: Final = Regression(
    "segments",
    f"""{_BLOCKS}
      class Model(nn.Module):
          def __init__(self):
              super().__init__()
              self.blocks = nn.Sequential(*(Block() for _ in range(8)))

          def forward(self, x):
    -         return checkpoint_sequential(self.blocks, 8, x, use_reentrant=False)
    +         return checkpoint_sequential(self.blocks, 1, x, use_reentrant=False)
    """,
    "Model()(torch.ones(1024, 64)).sum().backward()",
    # All eight wide tanh where one was there: the last segment is never run again.
    (Blame("activation", "aten::tanh", 7 * MIB),),
)

RECOMPUTED: Final = Regression(
    "nothing_recomputed",
    """
      class Swish(torch.autograd.Function):
          @staticmethod
          def forward(ctx, x):
    *         gate = torch.sigmoid(x)
    -         ctx.save_for_backward(x)
    +         ctx.save_for_backward(x, gate)
              return x * gate

          @staticmethod
          def backward(ctx, grad):
    -         (x,) = ctx.saved_tensors
    -         gate = torch.sigmoid(x)
    +         x, gate = ctx.saved_tensors
              return grad * gate * (1 + x * (1 - gate))

      def train(layers, x):
          for layer in layers:
              x = Swish.apply(layer(x))
          x.sum().backward()
    """,
    "train(nn.ModuleList(nn.Linear(64, 64) for _ in range(8)), torch.ones(2048, 64))",
    # 512 KiB for each of eight layers, in whose backward one was made at a time before.
    (Blame("activation", "aten::sigmoid|Swish", 4 * MIB),),
)

AUTOCAST: Final = Regression(
    "autocast",
    """
      def train(layers, x):
    -     with torch.autocast("cpu", dtype=torch.bfloat16):
    +     with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
              for layer in layers:
    *             x = torch.tanh(layer(x))
          x.sum().backward()
    """,
    "train(nn.ModuleList(nn.Linear(64, 64) for _ in range(8)), torch.ones(4096, 64))",
    # 1 MiB for each of eight layers, where it was half of that.
    (Blame("activation", "aten::tanh", 4 * MIB),),
)

MICRO_BATCHES: Final = Regression(
    "micro_batches",
    f"""{_BLOCKS}
    - SIZE = 512
    + SIZE = 2048

      def train(model, x):
          for part in x.split(SIZE):
              model(part).mean().backward()
    """,
    "train(nn.Sequential(*(Block() for _ in range(4))), torch.ones(2048, 64))",
    # 512 KiB of tanh in each of four blocks becomes 2 MiB.
    (Blame("activation", "aten::tanh", 6 * MIB),),
)

_JOB: Final = """
      import contextlib

      import torch.distributed as dist

      @contextlib.contextmanager
      def job():
          dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
          try:
              yield
          finally:
              dist.destroy_process_group()
"""

SHARDS_KEPT: Final = Regression(
    "shards_kept",
    f"""{_JOB}
      from torch.distributed.device_mesh import init_device_mesh
      from torch.distributed.fsdp import fully_shard

      def train(net, x):
          with job():
              mesh = init_device_mesh("cpu", (1,))
              for layer in net:
    -             fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    +             fully_shard(layer, mesh=mesh, reshard_after_forward=False)
              fully_shard(net, mesh=mesh)
    *         net(x).sum()
    """,
    """
    layers = (nn.Linear(512, 512, bias=False) for _ in range(4))
    train(nn.Sequential(*layers), torch.ones(8, 512))
    """,
    # The gathered weights of the layers that are over, which wait for a backward pass.
    (Blame("parameter", "aten::empty|aten::new_zeros|c10d::_allgather_base_", 2 * MIB),),
)

FUSED: Final = Regression(
    "fused",
    """
      def train(net, steps):
    -     optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    +     optimizer = torch.optim.AdamW(net.parameters())
          for _ in range(steps):
              net(torch.ones(8, 512)).sum().backward()
    *         optimizer.step()
              optimizer.zero_grad()
    """,
    "train(nn.Linear(512, 1024, bias=False), 2)",
    # Two numbers of scratch for each parameter, which the fused kernel has in registers.
    (Blame("temporary", "aten::sqrt|aten::div|aten::add|aten::mul", 2 * MIB),),
)

CONTEXT_ATTRIBUTE: Final = Regression(
    "context_attribute",
    """
      class Swish(torch.autograd.Function):
          @staticmethod
          def forward(ctx, x):
    *         s = torch.sigmoid(x)
              ctx.save_for_backward(x)
    +         ctx.s = s
              return x * s

          @staticmethod
          def backward(ctx, gradient):
              (x,) = ctx.saved_tensors
              s = torch.sigmoid(x)
              return gradient * (s + x * s * (1 - s))

      def run(x):
          for _ in range(4):
              x = Swish.apply(x)
          x.sum().backward()
    """,
    "run(torch.ones(512, 512, requires_grad=True))",
    # Four are kept, where one was there at a time.
    (Blame("activation", "aten::sigmoid", 4 * MIB), Blame("activation", "aten::sigmoid", 3 * MIB)),
)

SELECTED: Final = Regression(
    "selected",
    """
      from torch.utils.checkpoint import CheckpointPolicy, checkpoint
      from torch.utils.checkpoint import create_selective_checkpoint_contexts

      SAVED = [
          torch.ops.aten.addmm.default,
    +     torch.ops.aten.tanh.default,
      ]

      def policy(context, operator, *arguments, **options):
          policies = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE
          return policies[operator in SAVED]

      def run(layers, x):
          for layer in layers:
    *         x = checkpoint(lambda y, layer=layer: torch.tanh(layer(y)).sin(), x,
                  use_reentrant=False,
                  context_fn=lambda: create_selective_checkpoint_contexts(policy))
          x.sum().backward()
    """,
    "run([nn.Linear(256, 256) for _ in range(4)], torch.ones(1024, 256))",
    # What tanh made in each of four, where it was recomputed in one at a time.
    (Blame("activation", "aten::tanh", 3 * MIB), Blame("activation", "aten::tanh", 4 * MIB)),
)
