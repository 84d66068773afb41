"""Choosing the target's next token so that it depends on nothing but the text and the seed.

y = argmax(log p + g) with Gumbel noise g from a hash of (seed, request, output index, token id).
Plain and speculative decoding see the same noise at the same output index, so their texts are equal
token by token also at T > 0 (Gumbel-max trick; inverse-CDF sampling would flip far more often under
rounding). The hash is splitmix64 on integer tensors, equal on CPU and CUDA.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spectune.engine.uploads import on_device
from spectune.records import Request, Sampling


def _signed(value: int) -> int:
    """A 64-bit pattern as the signed integer that torch stores."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)
_BELOW_ONE = 1 - 2.0**-24  # largest float32 under 1; a uniform of 1 would rule its token out


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's own is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def splitmix64(x: Tensor) -> Tensor:
    """One splitmix64 output per int64 element (Steele, Lea and Flood 2014)."""
    x = x + _GOLDEN
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def request_key(request: Request) -> int:
    """64-bit key of a request: its seed and its name, never its arrival order."""
    text = f"{request.sampling.seed}:{request.request_id}".encode()
    return _signed(int.from_bytes(hashlib.sha256(text).digest()[:8], "little"))


def uniform(keys: Tensor, indices: Tensor, lane: Tensor) -> Tensor:
    """Uniform float32 in (0, 1) from keys, output indices and lane (broadcast together).

    53 bits before rounding, so that small values keep their relative precision.
    """
    stream = splitmix64(splitmix64(keys) + indices)
    bits = _shift(splitmix64(stream + lane), 11)
    value = ((bits.to(torch.float64) + 0.5) * 2.0**-53).to(torch.float32)
    return value.clamp_max_(_BELOW_ONE)


def gumbel(keys: Tensor, indices: Tensor, vocab_size: int) -> Tensor:
    """Gumbel noise [..., V] for keys [...] and output indices [...]."""
    tokens = torch.arange(vocab_size, device=keys.device)
    keys, indices = keys.unsqueeze(-1), indices.unsqueeze(-1)  # [..., 1]
    if keys.device.type != "cpu":
        return _gumbel_rows(keys, indices, tokens)
    # one row at a time stays in the CPU's cache: several times faster than all rows at once
    rows = [
        _gumbel_rows(key, index, tokens)
        for key, index in zip(keys.reshape(-1, 1), indices.reshape(-1, 1), strict=True)
    ]
    return torch.stack(rows).view(*keys.shape[:-1], vocab_size)


def _gumbel_rows(keys: Tensor, indices: Tensor, tokens: Tensor) -> Tensor:
    u = uniform(keys, indices, tokens)
    return u.neg_().log1p_().neg_().log_().neg_()  # -log(-log(1 - u))


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling settings of the rows of a batch, as tensors [B]; what decides a branch is on the host.

    noisy: [n] numbers of the rows at T > 0, None if all are.
    """

    is_greedy: bool
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    keys: Tensor
    noisy: Tensor | None
    has_ranks: bool  # top-k or top-p in any row
    has_min_p: bool

    @classmethod
    def of(cls, requests: Sequence[Request], device: torch.device) -> RowSampling:
        rows: list[Sampling] = [request.sampling for request in requests]

        def floats(name: str) -> Tensor:
            return on_device([getattr(row, name) for row in rows], device, torch.float32)

        noisy = [index for index, row in enumerate(rows) if row.temperature > 0]

        return cls(
            is_greedy=all(row.is_greedy for row in rows),
            temperature=floats("temperature"),
            top_k=on_device([row.top_k for row in rows], device),
            top_p=floats("top_p"),
            min_p=floats("min_p"),
            keys=on_device([request_key(r) for r in requests], device),
            noisy=None if len(noisy) == len(rows) else on_device(noisy, device),
            has_ranks=any(row.top_k > 0 or row.top_p < 1 for row in rows),
            has_min_p=any(row.min_p > 0 for row in rows),
        )


def warp(logits: Tensor, rows: RowSampling) -> Tensor:
    """Unnormalised log-probabilities [B, T, V] after temperature, top-k, top-p, min-p, in that order.

    Tokens outside a filter get -inf. Rows at T = 0 are left as they are (their argmax is taken).
    """
    logits = logits.float()
    scale = torch.where(rows.temperature > 0, rows.temperature, 1.0).view(-1, 1, 1)
    logits = logits / scale
    if rows.has_ranks:
        logits = _filter_sorted(logits, rows)
    if rows.has_min_p:
        floor = logits.max(-1, keepdim=True).values + rows.min_p.clamp_min(1e-30).log().view(-1, 1, 1)
        logits = logits.masked_fill(logits < floor, float("-inf"))
    return logits


def _filter_sorted(logits: Tensor, rows: RowSampling) -> Tensor:
    """Top-k, then the smallest set whose mass reaches top-p (the token that crosses is kept)."""
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    top_k = torch.where(rows.top_k > 0, rows.top_k, logits.shape[-1]).view(-1, 1, 1)
    ranked = ranked.masked_fill(rank >= top_k, float("-inf"))
    mass = ranked.softmax(-1)
    before = mass.cumsum(-1) - mass
    # a rounded sum may reach 1 before the tail does: rows at top-p 1 keep theirs
    top_p = torch.where(rows.top_p < 1, rows.top_p, float("inf")).view(-1, 1, 1)
    ranked = ranked.masked_fill((before >= top_p) & (rank > 0), float("-inf"))
    return torch.full_like(logits, float("-inf")).scatter(-1, order, ranked)


Draw = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Span:
    """What the host knows of a round's output indices [B, T]: how many in a row hold them all, counted
    from the root's; `is_chain` where they are exactly those, in order."""

    num_indices: int
    is_chain: bool


def choose(
    logits: Tensor,
    rows: RowSampling,
    indices: Tensor,
    *,
    draw: Draw | None = None,
    span: Span | None = None,
) -> Tensor:
    """The target's own tokens [B, T] at output indices [B, T] for logits [B, T, V].

    `draw` is the compiled twin of adding the noise and taking the best (`Target.draw`); without a
    `span` it is read from the indices, for which the host waits.
    """
    if not rows.is_greedy and draw is not None:
        keys = rows.keys.unsqueeze(1).expand_as(indices)
        noisy = (rows.temperature > 0).unsqueeze(1).expand_as(indices)
        return draw(warp(logits, rows), keys, indices, noisy)
    scores = logits if rows.is_greedy else perturbed(logits, rows, indices, span)
    return scores.max(-1).indices  # the first of equals, as argmax, but fast in bf16 on CPUs


def perturbed(logits: Tensor, rows: RowSampling, indices: Tensor, span: Span | None = None) -> Tensor:
    """log p + g [B, T, V]: its argmax is the sample; its top-2 gap says how near a tie it was."""
    warped = warp(logits, rows)
    if rows.noisy is None:
        warped += _noise_by_index(rows.keys, indices, logits.shape[-1], span)
    else:
        noise = _noise_by_index(rows.keys[rows.noisy], indices[rows.noisy], logits.shape[-1], span)
        warped[rows.noisy] += noise
    return warped


def _noise_by_index(keys: Tensor, indices: Tensor, vocab_size: int, span: Span | None) -> Tensor:
    """Noise [B, T, V] for keys [B] and indices [B, T]; tree nodes of one depth share theirs."""
    first = indices.amin(1, keepdim=True)
    offsets = indices - first
    if span is None:
        count = int(offsets.max()) + 1
        in_order = torch.arange(count, device=indices.device)
        span = Span(count, offsets.shape[1] == count and bool((offsets == in_order).all()))
    wanted = first + torch.arange(span.num_indices, device=indices.device)  # [B, depths]
    noise = gumbel(keys.unsqueeze(1).expand_as(wanted), wanted, vocab_size)
    if span.is_chain:
        return noise  # one node a depth, in order
    return noise.gather(1, offsets.unsqueeze(2).expand(-1, -1, vocab_size))
