"""Kimi Delta Attention: Kimi Team, Kimi Linear, arXiv:2510.26692. Gated DeltaNet whose state decays by each
channel of its keys for itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from baton.layers.batch import Batch, StateRows
from baton.layers.cache_spec import State
from baton.layers.gated_delta_net import L2_EPS, delta_step
from baton.layers.parameters import Parameters
from baton.layers.recurrent import RecurrentModule
from baton.layers.short_convolution import ShortConvolution

CHUNK = 16
"""Tokens whose updates of a state become one triangular system: each pair of them has a decay a channel."""


class KimiDeltaAttention(RecurrentModule):
    """A layer whose state is, for each head, a matrix [dim, dim], and the last inputs of the convolutions."""

    def __init__(
        self,
        parameters: Parameters,
        index: int,
        hidden: int,
        heads: int,
        dim: int,
        window: int,
        eps: float,
    ) -> None:
        """`dim`: of each head; `window`: tokens that the convolutions see, the last of them its own."""
        self.index, self.heads, self.dim, self.eps = index, heads, dim, eps
        inner = heads * dim
        self.cache = State(((heads, dim, dim), (window - 1, 3 * inner)))
        self.input = parameters.linear({f"{part}_proj": inner for part in "qkv"}, hidden)
        self.convolutions = [ShortConvolution(parameters, f"{part}_conv1d", window, inner) for part in "qkv"]
        small = {"f_a_proj": dim, "g_a_proj": dim, "b_proj": heads}
        self.gates = parameters.linear(small, hidden, quantize=False)
        self.forget = parameters.linear({"f_b_proj": inner}, dim, quantize=False)
        self.gate = parameters.linear({"g_b_proj": inner}, dim, quantize=False)
        self.decay = parameters.empty(heads, dtype=torch.float32)
        self.decay_bias = parameters.empty(inner, dtype=torch.float32)
        parameters.add(
            "A_log",
            self.decay,
            shape=torch.Size([1, 1, heads, 1]),
            fill="ones",
            convert=lambda log: log.float().exp().flatten(),
        )
        parameters.add("dt_bias", self.decay_bias, fill="ones")
        self.norm = parameters.tensor("o_norm.weight", dim, fill="ones")
        self.output = parameters.linear({"o_proj": hidden}, inner)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        forget, gate, beta = torch.split(self.gates(x), [self.dim, self.dim, self.heads], -1)
        return torch.cat((self.input(x), self.forget(forget), self.gate(gate), beta), -1)

    def by_kernels(self, projected: torch.Tensor, batch: Batch, rows: StateRows) -> torch.Tensor:
        raise AssertionError("no attention with kernels computes latents beside states")

    def advance(
        self, projected: torch.Tensor, states: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        state, window = states
        inner = self.heads * self.dim
        *mixed, forget, gate, beta = torch.split(projected, [*[inner] * 5, self.heads], -1)
        pairs = zip(self.convolutions, mixed, window.chunk(3, -1), strict=True)
        convolved = [convolution(part, before) for convolution, part, before in pairs]
        q, k, v = (self._heads(F.silu(part).float()) for part, _ in convolved)
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS) for x in (q, k))
        decay = self._heads(F.softplus(forget.float() + self.decay_bias)) * -self.decay[:, None, None]
        beta = beta.float().sigmoid().transpose(1, 2)
        scan = _step if q.shape[2] == 1 else channel_delta_chunks
        out, state = scan(q * self.dim**-0.5, k, v, decay, beta, state)
        out = out.transpose(1, 2).to(projected.dtype)
        out = F.rms_norm(out, (self.dim,), self.norm, self.eps).flatten(2) * gate.float().sigmoid()
        return out.to(projected.dtype), (state, torch.cat([behind for _, behind in convolved], -1))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, tokens, heads * dim] -> [rows, heads, tokens, dim]"""
        return x.reshape(*x.shape[:2], self.heads, self.dim).transpose(1, 2)


def _step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each row; see `channel_delta_chunks`."""
    state.mul_(decay.exp().transpose(2, 3))
    return delta_step(q, k, v, torch.zeros_like(beta), beta, state)


def channel_delta_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 q, k, decay (logarithm) [rows, heads, tokens, key_dim], v [rows, heads, tokens, value_dim],
    beta [rows, heads, tokens], state [rows, heads, key_dim, value_dim] -> as v, state."""
    outs = []
    for start in range(0, q.shape[2], CHUNK):
        part = slice(start, start + CHUNK)
        q_, k_, v_, b_ = q[:, :, part], k[:, :, part], v[:, :, part], beta[:, :, part, None]
        passed = decay[:, :, part].cumsum(2)
        later = torch.ones(q_.shape[2], q_.shape[2], dtype=torch.bool, device=q.device).triu(1)
        between = (
            (passed.unsqueeze(3) - passed.unsqueeze(2)).masked_fill_(later[..., None], -torch.inf).exp_()
        )
        system = torch.einsum("rhid,rhjd,rhijd->rhij", k_ * b_, k_, between)
        since = passed.exp()
        right_side = (v_ - (k_ * since) @ state) * b_
        change = torch.linalg.solve_triangular(system, right_side, upper=False, unitriangular=True)
        seen = torch.einsum("rhid,rhjd,rhijd->rhij", q_, k_, between)
        outs.append((q_ * since) @ state + seen @ change)
        last = passed[:, :, -1:]
        state = state * last.exp().transpose(2, 3) + (k_ * (last - passed).exp()).transpose(2, 3) @ change
    return torch.cat(outs, 2), state
