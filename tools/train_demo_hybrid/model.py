"""The ``qwen35`` architecture in PyTorch, for training: gated delta net layers, gated full attention, one MTP block.

Shapes: ``[B, T, ...]``; heads before positions inside attention and the delta net.
Source: Yang, Kautz, Hatamizadeh 2024 (gated delta networks; the chunked form); Qwen team (Qwen3-Next, Qwen3.5);
    DeepSeek-AI 2024 (multi-token prediction). Names of parameters are those of the GGUF tensors.
Holds: ``Config``, ``Model``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 64


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes; ``n_layers`` counts the trunk, layer i attends fully where ``(i + 1) % interval == 0``."""

    n_vocab: int
    n_embd: int = 320
    n_layers: int = 8
    interval: int = 4
    n_ff: int = 896
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 64
    n_rot: int = 16
    rope_base: float = 1e6
    rope_sections: tuple[int, int, int] = (3, 3, 2)
    n_key_heads: int = 4
    n_value_heads: int = 4
    delta_dim: int = 64
    conv_width: int = 4
    eps: float = 1e-6
    n_ctx: int = 32768

    @property
    def channels(self) -> int:
        return self.delta_dim * (2 * self.n_key_heads + self.n_value_heads)

    def is_full(self, layer: int) -> bool:
        return (layer + 1) % self.interval == 0


@torch.compile(dynamic=True)
def _rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Computed in float32 whatever the input is; the result has the input's type."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide if weight is None else wide * weight.float()).to(x.dtype)


@torch.compile(dynamic=True)
def mixed_channels(u: Tensor, taps: Tensor) -> Tensor:
    """SiLU of the causal depthwise convolution of ``u`` ``[B, T, C]`` with ``taps`` ``[C, W]``; float32."""
    width = taps.shape[1]
    padded = F.pad(u.float(), (0, 0, width - 1, 0))
    t = u.shape[1]
    total = padded[:, :t] * taps[:, 0]
    for j in range(1, width):
        total = total + padded[:, j : j + t] * taps[:, j]
    return F.silu(total)


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return _rms(x, self.weight, self.eps)


def linear(k: int, n: int) -> nn.Linear:
    layer = nn.Linear(k, n, bias=False)
    nn.init.normal_(layer.weight, std=k**-0.5)
    return layer


def rope_table(config: Config, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[n, n_rot / 2]``; angles in float64."""
    pairs = torch.arange(config.n_rot // 2, dtype=torch.float64, device=device)
    frequency = config.rope_base ** (-2 * pairs / config.n_rot)
    angle = torch.arange(n, dtype=torch.float64, device=device)[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, table: tuple[Tensor, Tensor], n_rot: int) -> Tensor:
    """``x`` ``[B, H, T, D]``: pairs (i, i + n_rot / 2)."""
    cos, sin = (part.to(x.dtype) for part in table)
    half = n_rot // 2
    a, b, rest = x[..., :half], x[..., half:n_rot], x[..., n_rot:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.attn_q = linear(c.n_embd, 2 * c.n_heads * c.head_dim)
        self.attn_k = linear(c.n_embd, c.n_kv_heads * c.head_dim)
        self.attn_v = linear(c.n_embd, c.n_kv_heads * c.head_dim)
        self.attn_output = linear(c.n_heads * c.head_dim, c.n_embd)
        self.attn_q_norm = Norm(c.head_dim, c.eps)
        self.attn_k_norm = Norm(c.head_dim, c.eps)

    def forward(self, h: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        c = self.c
        b, t, _ = h.shape
        q, gate = self.attn_q(h).view(b, t, c.n_heads, 2, c.head_dim).unbind(3)
        k = self.attn_k(h).view(b, t, c.n_kv_heads, c.head_dim)
        v = self.attn_v(h).view(b, t, c.n_kv_heads, c.head_dim).transpose(1, 2)
        q = rotate(self.attn_q_norm(q).transpose(1, 2), table, c.n_rot)
        k = rotate(self.attn_k_norm(k).transpose(1, 2), table, c.n_rot)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        o = o.transpose(1, 2) * torch.sigmoid(gate)
        out: Tensor = self.attn_output(o.reshape(b, t, -1))
        return out


@torch.compile(dynamic=True)
def decays(glog: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of log decay in a chunk: between rows (zero above the diagonal), from its start, to its end, over all of it."""
    g = glog.cumsum(-1)
    i = torch.arange(CHUNK, device=g.device)
    between = torch.where(i[:, None] >= i, (g[..., :, None] - g[..., None, :]).clamp(max=0.0).exp(), 0.0)
    last = g[..., -1:]
    return between, g.exp()[..., None], (last - g).exp()[..., None], last.exp()[..., None]


def inside_chunks(
    q: Tensor, k: Tensor, v: Tensor, glog: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What does not depend on the incoming state; ``q k v`` ``[B, H, N, CHUNK, D]``."""
    between, grown, left, keep = decays(glog)
    beta = beta[..., None]
    a = ((beta * k) @ k.transpose(-1, -2) * between).tril(-1)
    eye = torch.eye(CHUNK, dtype=q.dtype, device=q.device)
    right = torch.cat((beta * v, beta * grown * k), dim=-1)
    solved = torch.linalg.solve_triangular(eye + a, right, upper=False, unitriangular=True)
    u, w = solved.split(v.shape[-1], dim=-1)
    return u, w, (q @ k.transpose(-1, -2)) * between, grown * q, left * k, keep


def chunked_delta(q: Tensor, k: Tensor, v: Tensor, glog: Tensor, beta: Tensor) -> Tensor:
    """Gated delta rule from a zero state, chunk by chunk; float32, ``[B, H, T, D]``; ``glog``, ``beta`` ``[B, H, T]``.

    Inside a chunk with cumulated decay G: ``(I + A) U = beta (V - e^G K M)``, ``A`` the strictly lower part of
    ``beta K K^T e^(Gi - Gj)``; outputs ``e^G Q M + lower(Q K^T e^(Gi - Gj)) U``, next state
    ``e^Gn M + (e^(Gn - G) K)^T U``.
    """
    b, h, t, d = q.shape
    pad = -t % CHUNK
    if pad:
        q, k, v = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v))
        glog, beta = F.pad(glog, (0, pad)), F.pad(beta, (0, pad))
    n = (t + pad) // CHUNK
    q, k, v = (x.reshape(b, h, n, CHUNK, d) for x in (q, k, v))
    u, w, scores, queries, keys, keep = inside_chunks(
        q, k, v, glog.reshape(b, h, n, CHUNK), beta.reshape(b, h, n, CHUNK)
    )
    state = q.new_zeros(b, h, d, d)
    outputs = []
    for i in range(n):
        fresh = u[:, :, i] - w[:, :, i] @ state
        outputs.append(queries[:, :, i] @ state + scores[:, :, i] @ fresh)
        state = keep[:, :, i] * state + keys[:, :, i].transpose(-1, -2) @ fresh
    return torch.stack(outputs, 2).reshape(b, h, n * CHUNK, d)[:, :, :t]


class DeltaNet(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        inner = c.n_value_heads * c.delta_dim
        self.attn_qkv = linear(c.n_embd, c.channels)
        self.attn_gate = linear(c.n_embd, inner)
        self.ssm_beta = linear(c.n_embd, c.n_value_heads)
        self.ssm_alpha = linear(c.n_embd, c.n_value_heads)
        self.ssm_conv1d = nn.Parameter(torch.randn(c.channels, c.conv_width) * c.conv_width**-0.5)
        self.ssm_dt = nn.Parameter(torch.linspace(-6.0, -1.0, c.n_value_heads))
        self.a_log = nn.Parameter(torch.linspace(0.0, 1.5, c.n_value_heads))
        self.ssm_norm = Norm(c.delta_dim, c.eps)
        self.ssm_out = linear(inner, c.n_embd)

    def forward(self, h: Tensor) -> Tensor:
        c = self.c
        b, t, _ = h.shape
        mixed = mixed_channels(self.attn_qkv(h), self.ssm_conv1d)
        sizes = [c.n_key_heads * c.delta_dim] * 2 + [c.n_value_heads * c.delta_dim]
        q, k, v = (part.view(b, t, -1, c.delta_dim).transpose(1, 2) for part in mixed.split(sizes, -1))
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + c.eps) for x in (q, k))
        if c.n_value_heads != c.n_key_heads:
            # Value head p goes with key head p % n_key_heads.
            q, k = (x.repeat(1, c.n_value_heads // c.n_key_heads, 1, 1) for x in (q, k))
        beta = torch.sigmoid(self.ssm_beta(h).float()).transpose(1, 2)
        glog = (-self.a_log.exp() * F.softplus(self.ssm_alpha(h).float() + self.ssm_dt)).transpose(1, 2)
        with torch.autocast(h.device.type, enabled=False):
            o = chunked_delta(q * c.delta_dim**-0.5, k, v, glog, beta)
        o = self.ssm_norm(o.transpose(1, 2)) * F.silu(self.attn_gate(h).float()).view(b, t, c.n_value_heads, -1)
        out: Tensor = self.ssm_out(o.reshape(b, t, -1).to(h.dtype))
        return out


class Block(nn.Module):
    def __init__(self, c: Config, is_full: bool) -> None:
        super().__init__()
        self.is_full = is_full
        self.attn_norm = Norm(c.n_embd, c.eps)
        self.mixer = Attention(c) if is_full else DeltaNet(c)
        self.post_attention_norm = Norm(c.n_embd, c.eps)
        self.ffn_gate = linear(c.n_embd, c.n_ff)
        self.ffn_up = linear(c.n_embd, c.n_ff)
        self.ffn_down = linear(c.n_ff, c.n_embd)

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        h = self.attn_norm(x)
        x = x + (self.mixer(h, table) if self.is_full else self.mixer(h))
        h = self.post_attention_norm(x)
        out: Tensor = x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))
        return out


class Mtp(nn.Module):
    """Row p: token p and the trunk's normed hidden row p - 1 (zero at the start); predicts token p + 1."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.enorm, self.hnorm = Norm(c.n_embd, c.eps), Norm(c.n_embd, c.eps)
        self.eh_proj = linear(2 * c.n_embd, c.n_embd)
        self.block = Block(c, is_full=True)
        self.shared_head_norm = Norm(c.n_embd, c.eps)

    def forward(self, embedded: Tensor, hidden: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        out: Tensor = self.shared_head_norm(self.block(x, table))
        return out


class Model(nn.Module):
    """Trunk, tied head and MTP block."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.c = config
        self.token_embd = nn.Embedding(config.n_vocab, config.n_embd)
        nn.init.normal_(self.token_embd.weight, std=config.n_embd**-0.5)
        self.blocks = nn.ModuleList(Block(config, config.is_full(i)) for i in range(config.n_layers))
        self.output_norm = Norm(config.n_embd, config.eps)
        self.mtp = Mtp(config)

    def trunk(self, tokens: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """Normed hidden rows ``[B, T, n_embd]``."""
        x = self.token_embd(tokens)
        for block in self.blocks:
            x = block(x, table)
        out: Tensor = self.output_norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.token_embd.weight.to(hidden.dtype))

    def shifted(self, hidden: Tensor) -> Tensor:
        """Row p gets the hidden row of p - 1, the first one zero."""
        return F.pad(hidden[:, :-1], (0, 0, 1, 0))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden rows of the trunk and of the MTP block."""
        table = rope_table(self.c, tokens.shape[1], tokens.device)
        hidden = self.trunk(tokens, table)
        return hidden, self.mtp(self.token_embd(tokens), self.shifted(hidden), table)
