"""Regressions of attention: its weights, its mask, its keys and values."""

from __future__ import annotations

from typing import Final

from benchmarks.regression_programs.case import (
    CAST,
    COPY,
    MATMUL,
    MIB,
    SOFTMAX,
    Blame,
    Regression,
)

_REPEAT: Final = "aten::repeat_interleave|aten::index_select|aten::clone"

NAIVE: Final = Regression(
    "naive_attention",
    """
      class Attention(nn.Module):
          def __init__(self, width=64, heads=4):
              super().__init__()
              self.heads = heads
              self.qkv = nn.Linear(width, 3 * width)
              self.proj = nn.Linear(width, width)

          def forward(self, x):
              b, t, c = x.shape
              split = self.qkv(x).view(b, t, 3, self.heads, c // self.heads)
              q, k, v = split.permute(2, 0, 3, 1, 4)
    -         y = F.scaled_dot_product_attention(q, k, v)
    +         scores = q @ k.transpose(-2, -1) / (c // self.heads) ** 0.5
    +         y = scores.softmax(-1) @ v
              return self.proj(y.transpose(1, 2).reshape(b, t, c))
    """,
    "Attention()(torch.ones(2, 512, 64)).sum().backward()",
    # In the backward of softmax its result, the gradient of it and the one it makes are there. The
    # gradient of the scores is the division's: `scores` itself is a local variable, and stays.
    (
        Blame("activation", SOFTMAX, 8 * MIB),
        Blame("temporary", f"{MATMUL}|aten::div|aten::_softmax_backward_data", 8 * MIB),
    ),
)

FLOAT32_SCORES: Final = Regression(
    "float32_scores",
    """
      @torch.no_grad()
      def attend(q, k, v):
    -     scores = q @ k.transpose(-2, -1)
    +     scores = (q @ k.transpose(-2, -1)).float()
          weights = scores.softmax(-1).to(v.dtype)
          return weights @ v
    """,
    """
    q, k, v = torch.ones(3, 4, 512, 32, dtype=torch.bfloat16)
    attend(q, k, v)
    """,
    # At the end the scores and the softmax are in float32, beside the copy in bfloat16: 4 + 4 + 2
    # where 2 + 2 were before.
    (
        Blame("temporary", CAST, 4 * MIB),
        Blame("temporary", SOFTMAX, 2 * MIB),
    ),
)

MASK_PER_HEAD: Final = Regression(
    "mask_per_head",
    """
      @torch.no_grad()
      def attend(q, k, v):
          b, h, t, _ = q.shape
          mask = torch.full((t, t), float("-inf")).triu(1)
    +     mask = mask.expand(b, h, t, t).contiguous()
          return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    """,
    """
    q, k, v = torch.ones(3, 2, 8, 256, 16)
    attend(q, k, v)
    """,
    (Blame("temporary", COPY, 4 * MIB),),
)

FLOAT_MASK_BUFFER: Final = Regression(
    "float_mask_buffer",
    """
      class Causal(nn.Module):
          def __init__(self, longest=1024):
              super().__init__()
    -         self.register_buffer("mask", torch.ones(longest, longest, dtype=torch.bool))
    +         self.register_buffer("mask", torch.ones(longest, longest))

          def forward(self, scores):
              t = scores.shape[-1]
              return scores.masked_fill(self.mask[:t, :t] == 0, 0.0)
    """,
    "Causal()(torch.ones(64, 64))",
    (Blame("buffer", "aten::ones|aten::empty|aten::fill_", 3 * MIB),),
)

POSITIONS_REPEATED: Final = Regression(
    "positions_repeated",
    """
      @torch.no_grad()
      def embed(x, positions):
    -     return x + positions.expand_as(x)
    +     return x + positions.repeat(x.shape[0], 1, 1)
    """,
    "embed(torch.ones(32, 128, 256), torch.ones(128, 256))",
    (Blame("temporary", "aten::repeat", 4 * MIB),),
)

ROTARY_IN_FLOAT64: Final = Regression(
    "rotary_in_float64",
    """
      def tables(t, d):
    -     steps = torch.arange(0, d, 2)
    +     steps = torch.arange(0, d, 2, dtype=torch.float64)
          angles = torch.outer(torch.arange(t), 1.0 / 10000 ** (steps / d))
          return angles.cos().repeat(1, 2)

      @torch.no_grad()
      def rotate(x):
          cos = tables(*x.shape[-2:])
    *     return x * cos
    """,
    "rotate(torch.ones(16, 8, 128, 64))",
    # A product of two types makes a copy of the narrower operand (8 MiB, and may be named itself),
    # and its result is twice as wide.
    (Blame("temporary", "aten::mul", 12 * MIB), Blame("temporary", CAST, 8 * MIB)),
)

WEIGHTS_KEPT: Final = Regression(
    "weights_kept",
    """
      class Attention(nn.Module):
          def __init__(self):
              super().__init__()
              self.query = nn.Linear(64, 64)
              self.last = None

          @torch.no_grad()
          def forward(self, x):
    *         weights = (self.query(x) @ x.transpose(-2, -1)).softmax(-1)
    +         self.last = weights
              return weights @ x
    """,
    "attention(torch.ones(4, 512, 64))",
    (Blame("temporary", SOFTMAX, 4 * MIB),),
    fixtures="""
    @pytest.fixture
    def attention():
        return Attention()
    """,
    uses="attention",
    holder="attention",
)

CHUNKS: Final = Regression(
    "attention_chunks",
    """
    - CHUNK = 128
    + CHUNK = 1024

      @torch.no_grad()
      def attend(q, k, v):
          out = torch.empty_like(q)
          for start in range(0, q.shape[-2], CHUNK):
              some = slice(start, start + CHUNK)
    *         weights = (q[:, some] @ k.transpose(-2, -1)).softmax(-1)
    *         out[:, some] = weights @ v
              del weights
          return out
    """,
    """
    q, k, v = torch.ones(3, 2, 1024, 32)
    attend(q, k, v)
    """,
    # Scores and weights are there together, each 8 MiB where it was 1.
    (Blame("temporary", f"{MATMUL}|{SOFTMAX}", 7 * MIB),),
)

GROUPED_KEYS: Final = Regression(
    "grouped_keys",
    """
      @torch.no_grad()
      def scores(q, k):
          b, groups, t, d = k.shape
          share = q.shape[1] // groups
          q = q.view(b, groups, share * t, d)
    -     return (q @ k.transpose(-2, -1)).sum(-1)
    +     k = k.repeat_interleave(share, dim=1)
    +     return (q.view(b, groups * share, t, d) * k).sum(-1).view(b, groups, share * t)
    """,
    "scores(torch.ones(2, 16, 64, 256), torch.ones(2, 2, 64, 256))",
    # 8 times the keys, and a product of the same size.
    (Blame("temporary", f"{_REPEAT}|aten::mul", 2 * MIB),),
)

BEAMS: Final = Regression(
    "beams",
    """
      @torch.no_grad()
      def spread(state, beams):
    -     state = state.unsqueeze(1).expand(-1, beams, -1)
    +     state = state.repeat_interleave(beams, dim=0)
          return state.sum(-1)
    """,
    "spread(torch.ones(256, 512), 8)",
    (Blame("temporary", _REPEAT, 4 * MIB),),
)

CONTEXT: Final = Regression(
    "context_by_scores",
    """
      class Linear(nn.Module):
          def __init__(self):
              super().__init__()
              self.qkv = nn.Linear(32, 96)
              self.up, self.down = nn.Linear(32, 172), nn.Linear(172, 32)

          def forward(self, x):
              q, k, v = self.qkv(x).chunk(3, -1)
    -         context = torch.einsum("bnd,bne->bde", k, v)
    -         mixed = torch.einsum("bnd,bde->bne", q, context)
    +         scores = torch.einsum("bnd,bmd->bnm", q, k)
    +         mixed = torch.einsum("bnm,bme->bne", scores, v)
              return x + self.down(F.gelu(self.up(x + mixed)))
    """,
    "nn.Sequential(Linear(), Linear())(torch.ones(2, 512, 32)).sum().backward()",
    # Two layers keep scores of 2 MiB; the same operator has made contexts of 8 KiB before.
    (Blame("activation", MATMUL, 4 * MIB),),
)
