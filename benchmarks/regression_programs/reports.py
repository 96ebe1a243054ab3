"""Regressions of public issue trackers, each with its report; the edit is in the module itself."""

from __future__ import annotations

from typing import Final

from benchmarks.regression_programs.case import ANY, MATMUL, MIB, Blame, Regression

_KEPT: Final = "temporary|activation|autograd detail"

# BatsResearch/labelmodels#4, pai4451/ML2021#2
RUNNING_LOSS: Final = Regression(
    "running_loss",
    """
      def train(net, batches):
          running = 0.0
          for x in batches:
    *         loss = net(x).square().mean()
    -         running += loss.item()
    +         running += loss
          return running
    """,
    "train(nn.Linear(256, 256), [torch.ones(1024, 256) for _ in range(4)])",
    (Blame(_KEPT, f"{MATMUL}|aten::square|aten::pow", 2 * MIB),),
)

# Quantinuum/lambeq#251
PREDICTION: Final = Regression(
    "prediction_with_graph",
    """
      def validate(net, batches):
          outputs = []
          for x in batches:
    *         y = net(x).square().sum(1)
    -         outputs.append(y.detach())
    +         outputs.append(y)
          return torch.cat(outputs)
    """,
    "validate(nn.Linear(256, 256), [torch.ones(1024, 256) for _ in range(4)])",
    (Blame(_KEPT, f"{MATMUL}|aten::square|aten::pow", 2 * MIB),),
)

# TRI-ML/packnet-sfm#51
STEP_OUTPUTS: Final = Regression(
    "losses_of_steps",
    """
      def step(net, x):
    *     loss = F.silu(net(x)).mean()
    -     return {"loss": loss.detach()}
    +     return {"loss": loss}

      def epoch(net, batches):
          return [step(net, x) for x in batches]
    """,
    "epoch(nn.Linear(256, 256), [torch.ones(1024, 256) for _ in range(4)])",
    (Blame(_KEPT, f"{MATMUL}|aten::silu", 2 * MIB),),
)

# pytorch/pytorch#1346
SECOND_ORDER: Final = Regression(
    "graph_of_gradients",
    """
      def step(net, x):
          loss = net(x).tanh().square().sum()
    -     loss.backward()
    +     loss.backward(create_graph=True)
          return [p.grad for p in net.parameters()]
    """,
    "step(nn.Linear(256, 256), torch.ones(1024, 256))",
    (Blame("temporary|activation|autograd detail|gradient", ANY, 2 * MIB),),
)

# meta-pytorch/opacus#176
HOOK_WITHOUT_GRAD: Final = Regression(
    "hook_without_gradients",
    """
      class Watched:
          def __init__(self, net):
              self.seen = []
              for layer in net:
                  layer.register_forward_hook(self.see)

          def see(self, layer, inputs, output):
    -         if torch.is_grad_enabled():
    -             self.seen.append(inputs[0])
    +         self.seen.append(inputs[0])

      @torch.no_grad()
      def evaluate():
          net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)])
          watched = Watched(net)
    *     net(torch.ones(1024, 256))
          return watched
    """,
    "evaluate()",
    (Blame("temporary", MATMUL, 3 * MIB),),
)

# karpathy/nanoGPT#533
CHECKPOINT_KEPT: Final = Regression(
    "state_kept_after_loading",
    """
      def resume(net):
    *     state = {name: torch.ones_like(p) for name, p in net.state_dict().items()}
          net.load_state_dict(state)
    -     del state
          F.silu(net(torch.ones(1024, 512))).sum().backward()
    """,
    "resume(nn.Linear(512, 1024))",
    (Blame("temporary|input", "aten::ones_like", 2 * MIB),),
)

# Parskatt/RoMaV2#50
LOADED_TWICE: Final = Regression(
    "loaded_twice",
    """
      def load(net, state):
    -     net.load_state_dict(state)
    +     net.load_state_dict({name: tensor.clone() for name, tensor in state.items()})
    """,
    "net = nn.Linear(1024, 1024)\nload(net, {n: t * 2 for n, t in net.state_dict().items()})",
    (Blame("temporary|input", "aten::clone", 4 * MIB),),
)

# hao-ai-lab/FastVideo#1714
NOT_DRAINED: Final = Regression(
    "state_not_drained",
    """
      @torch.no_grad()
      def load(state):
          done = []
          for name in list(state):
    -         tensor = state.pop(name)
    +         tensor = state[name]
    *         done.append(tensor.half())
          return done

      def start():
    *     return load({str(i): torch.ones(1024, 256) for i in range(8)})
    """,
    "start()",
    (Blame("temporary|input", "aten::ones|aten::half|aten::to", 2 * MIB),),
)

# EnnyvanBeest/UnitMatch#151
TILED: Final = Regression(
    "tiled_differences",
    """
      def nearest(points, centres):
    -     rows = [(row - centres).square().sum(-1).argmin(-1) for row in points[:, None]]
    -     return torch.stack(rows)
    +     return (points[:, None] - centres[None]).square().sum(-1).argmin(-1)
    """,
    "nearest(torch.ones(256, 32), torch.ones(128, 32))",
    (Blame("temporary", "aten::sub|aten::square|aten::pow", 4 * MIB),),
)

# IFCA-Advanced-Computing/frouros#157
KERNEL_AT_ONCE: Final = Regression(
    "kernel_at_once",
    """
      def discrepancy(x, y):
          total = 0.0
    -     for part in x.split(32):
    -         total += torch.exp(-torch.cdist(part, y)).sum()
    +     total += torch.exp(-torch.cdist(x, y)).sum()
          return total / (len(x) * len(y))
    """,
    "discrepancy(torch.ones(1024, 8), torch.ones(1024, 8))",
    (Blame("temporary", "aten::cdist|aten::exp|aten::neg|aten::_cdist_forward", 4 * MIB),),
)

# gentaiscool/end2end-asr-pytorch#41
VALIDATION: Final = Regression(
    "validation_with_gradients",
    """
    - @torch.no_grad()
      def validate(net, batches):
          total = 0.0
          for x in batches:
    *         for layer in net:
    *             x = layer(x).tanh()
              total += x.mean()
          return total
    """,
    "net = nn.ModuleList([nn.Linear(256, 256) for _ in range(4)])\n"
    "validate(net, [torch.ones(512, 256) for _ in range(3)])",
    (Blame(_KEPT, ANY, 3 * MIB), Blame(_KEPT, f"{MATMUL}|aten::tanh", 3 * MIB)),
)

# ray-project/ray#7238
ADVANTAGES: Final = Regression(
    "advantages_with_graph",
    """
      def advantages(critic, observations, rewards):
          found = []
          for observation, reward in zip(observations, rewards):
    -         with torch.no_grad():
    -             value = critic(observation).relu().mean(1)
    +         value = critic(observation).relu().mean(1)
              found.append(reward - value)
          return found
    """,
    "o = [torch.ones(1024, 128) for _ in range(4)]\n"
    "advantages(nn.Linear(128, 256), o, [torch.ones(1024) for _ in o])",
    (Blame(_KEPT, f"{MATMUL}|aten::relu", 3 * MIB),),
)

# oxwhirl/pymarl#73
ACTIONS: Final = Regression(
    "actions_with_graph",
    """
      def episode(policy, steps):
          replay = []
          observation = torch.ones(512, 128)
          for _ in range(steps):
    *         action = policy(observation).sigmoid().amax(1)
    -         replay.append(action.detach())
    +         replay.append(action)
          return replay
    """,
    "episode(nn.Linear(128, 512), 5)",
    (Blame(_KEPT, f"{MATMUL}|aten::sigmoid|aten::amax", 3 * MIB),),
)

# Kaixhin/Rainbow#33
PRIORITIES: Final = Regression(
    "priorities_with_graph",
    """
      class Memory:
          def __init__(self):
              self.priorities = {}

          def update(self, indices, losses):
              for index, loss in zip(indices, losses):
    -             self.priorities[index] = float(loss)
    +             self.priorities[index] = loss

      def learn(net, memory):
          for start in range(0, 32, 8):
    *         losses = F.softplus(net(torch.ones(8, 64, 256))).mean((1, 2))
              memory.update(range(start, start + 8), losses)
          return memory
    """,
    "learn(nn.Linear(256, 256), Memory())",
    (Blame(_KEPT, f"{MATMUL}|aten::softplus", 2 * MIB),),
)

# huggingface/transformers#25487
ATTENTIONS: Final = Regression(
    "attentions_returned",
    """
      @torch.no_grad()
      def encode(x, layers=6):
          attentions = []
          for _ in range(layers):
    *         weights = torch.softmax(x @ x.transpose(-1, -2), -1)
    -         attentions.append(weights.mean())
    +         attentions.append(weights)
              x = weights @ x
          return x, attentions
    """,
    "encode(torch.ones(4, 256, 32))",
    (Blame("temporary", f"{MATMUL}|aten::softmax", 4 * MIB),),
)

# Biohub/esm#173
HIDDEN: Final = Regression(
    "hidden_of_all_layers",
    """
      @torch.no_grad()
      def embed(net, x):
          hidden = []
          for layer in net:
    *         x = layer(x)
    -         hidden = [x]
    +         hidden.append(x)
          return torch.stack([h.mean() for h in hidden]), x
    """,
    "embed(nn.ModuleList([nn.Linear(256, 256) for _ in range(8)]), torch.ones(1024, 256))",
    (Blame("temporary", MATMUL, 5 * MIB),),
)

# yixinL7/BRIO#10
REPEATED: Final = Regression(
    "repeated_for_candidates",
    """
      @torch.no_grad()
      def score(states, queries):
          candidates = queries.shape[1]
    -     states = states.unsqueeze(1).expand(-1, candidates, -1, -1)
    +     states = states.unsqueeze(1).repeat_interleave(candidates, 1)
          return (states * queries[:, :, None]).sum(-1).amax(-1)
    """,
    "score(torch.ones(2, 128, 256), torch.ones(2, 16, 256))",
    (Blame("temporary", "aten::repeat_interleave|aten::index_select", 4 * MIB),),
)

# pytorch/pytorch#13882
ONE_HOT: Final = Regression(
    "chosen_by_one_hot",
    """
      def policy_loss(logits, actions, rewards):
          logs = logits.log_softmax(-1)
    -     chosen = logs.gather(1, actions[:, None])[:, 0]
    +     chosen = (logs * F.one_hot(actions, logs.shape[1])).sum(1)
          return -(chosen * rewards).sum()
    """,
    "x = torch.ones(256, 2048, requires_grad=True)\n"
    "policy_loss(x, torch.zeros(256, dtype=torch.long), torch.ones(256)).backward()",
    (
        Blame(
            "temporary|activation|autograd detail", "aten::one_hot|aten::mul|aten::zeros", 4 * MIB
        ),
    ),
)

# rasbt/LLMs-from-scratch#705
PREALLOCATED: Final = Regression(
    "cache_of_full_length",
    """
      @torch.no_grad()
      def generate(net, steps):
    -     cache = torch.zeros(0, 256)
    +     cache = torch.zeros(4096, 256)
          x = torch.ones(1, 256)
          for at in range(steps):
              x = net(x)
    -         cache = torch.cat([cache, x])
    +         cache[at] = x[0]
          return cache
    """,
    "generate(nn.Linear(256, 256), 8)",
    (Blame("temporary|input", "aten::zeros", 4 * MIB),),
)

# LibreYOLO/libreyolo#546
PROBE: Final = Regression(
    "probe_repeated",
    """
      class Pool(nn.Module):
          def __init__(self, width=1024):
              super().__init__()
              self.probe = nn.Parameter(torch.ones(1, 8, width))

          @torch.no_grad()
          def forward(self, x):
    -         probe = self.probe.expand(len(x), -1, -1)
    +         probe = self.probe.repeat(len(x), 1, 1)
              return (probe * x[:, None, :]).sum(-1)
    """,
    "Pool()(torch.ones(128, 1024))",
    (Blame("temporary", "aten::repeat", 4 * MIB),),
)
