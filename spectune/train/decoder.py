"""One token for many rows: the target's decode pass with everything between the products compiled.

At a hundred rows a pass of single torch operators spends most of its time outside the matrix products
(attention over short queries, norms, rotations). Here those are numba loops, one call a layer and
thread; the products stay oneDNN's. Same arithmetic as `Target.forward` up to bf16 rounding, same cache.

n rows, H hidden, D head size.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spectune.engine.linear import Linear
from spectune.engine.rope import inverse_frequencies

if TYPE_CHECKING:
    from spectune.engine.kv_cache import KVCache
    from spectune.engine.target import Target


def can_decode(target: Target) -> bool:
    """Whether the compiled pass exists for this target: bf16 on a CPU, plain Llama attention, numba."""
    config = target.config
    return (
        target.device.type == "cpu"
        and target.dtype == torch.bfloat16
        and target.path is not None
        and not config.qk_norm
        and config.sliding_window is None
        and config.head_dim % 2 == 0
        and importlib.util.find_spec("numba") is not None
    )


class WideDecoder:
    """Decode passes over `cache`, whose keys and values prefill passes of the target also write."""

    def __init__(self, target: Target, cache: KVCache, weights: dict[str, Tensor]) -> None:
        """weights: the target's, under their Hugging Face names."""
        config = target.config
        self.target, self.config = target, config
        self._kernels = kernels()
        self._data = cache.data.view(torch.int16).numpy()
        weights = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
        self._layers = [_Layer(weights, f"model.layers.{i}.") for i in range(config.num_layers)]
        self._norm = _floats(target.norm_weight)
        angles = torch.outer(
            torch.arange(cache.max_len, dtype=torch.float64),
            inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling),
        )
        self._cos, self._sin = angles.cos().float().numpy(), angles.sin().float().numpy()
        self._num_threads = max(1, torch.get_num_threads())
        self._pool = ThreadPoolExecutor(self._num_threads)

    def forward(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Feed one token to each of the first n slots. ids, lengths: int64 [n]

        Returns final hidden states [n, H] after the last norm and features [n, 3H], bf16.
        """
        config, count = self.config, ids.shape[0]
        add_norm, attend, gate = self._kernels
        parts = self._parts(count)
        steps = lengths.numpy()
        x = F.embedding(ids, self.target.embed_weight)  # [n, H]
        residual = x.view(torch.int16).numpy()
        normed, mixed = torch.empty_like(x), x.new_empty(count, config.num_heads * config.head_dim)
        normed_bits, mixed_bits = normed.view(torch.int16).numpy(), mixed.view(torch.int16).numpy()
        inner = x.new_empty(count, config.intermediate_size)
        inner_bits = inner.view(torch.int16).numpy()
        delta, features = residual[:, :0], []
        for index, layer in enumerate(self._layers):
            self._each(parts, add_norm, residual, delta, layer.input_norm, normed_bits, config.rms_norm_eps)
            if index in self.target.aux_layer_ids:
                features.append(x.clone())
            qkv = layer.qkv(normed).view(torch.int16).numpy()
            keys, values = self._data[index]
            self._each(parts, attend, qkv, self._cos, self._sin, steps, keys, values, mixed_bits)
            delta = layer.out(mixed).view(torch.int16).numpy()
            self._each(parts, add_norm, residual, delta, layer.post_norm, normed_bits, config.rms_norm_eps)
            both = layer.gate_up(normed).view(torch.int16).numpy()
            self._each(parts, gate, both, inner_bits)
            delta = layer.down(inner).view(torch.int16).numpy()
        self._each(parts, add_norm, residual, delta, self._norm, normed_bits, config.rms_norm_eps)
        return normed, torch.cat(features, -1)

    def _parts(self, count: int) -> list[tuple[int, int]]:
        """Row ranges of the threads."""
        step = -(-count // self._num_threads)
        return [(low, min(count, low + step)) for low in range(0, count, step)]

    def _each(self, parts: Sequence[tuple[int, int]], kernel: Callable[..., None], *args: Any) -> None:
        """Run a kernel on every range, the first in this thread."""
        others = [self._pool.submit(kernel, low, high, *args) for low, high in parts[1:]]
        kernel(*parts[0], *args)
        for other in others:
            other.result()


class _Layer:
    def __init__(self, weights: dict[str, Tensor], prefix: str) -> None:
        def joined(names: Sequence[str], kind: str) -> Tensor | None:
            found = [weights.get(f"{prefix}{name}.{kind}") for name in names]
            return torch.cat(found) if all(part is not None for part in found) else None  # type: ignore[arg-type]

        def linear(*names: str) -> Linear:
            weight = joined(names, "weight")
            assert weight is not None
            return Linear(weight, joined(names, "bias"))

        self.qkv = linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.out = linear("self_attn.o_proj")
        self.gate_up = linear("mlp.gate_proj", "mlp.up_proj")
        self.down = linear("mlp.down_proj")
        self.input_norm = _floats(weights[prefix + "input_layernorm.weight"])
        self.post_norm = _floats(weights[prefix + "post_attention_layernorm.weight"])


def _floats(weight: Tensor) -> Any:
    return weight.float().contiguous().numpy()


@functools.cache
def kernels() -> tuple[Callable[..., None], Callable[..., None], Callable[..., None]]:
    """(add_norm, attend, gate), compiled by numba on first use. bf16 travels as int16 bits."""
    import numpy as np
    from llvmlite import ir
    from numba import njit, types
    from numba.extending import intrinsic

    @intrinsic
    def bits_to_float(context, bits):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            return builder.bitcast(args[0], ir.FloatType())

        return types.float32(types.uint32), generate

    @intrinsic
    def float_to_bits(context, value):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            return builder.bitcast(args[0], ir.IntType(32))

        return types.uint32(types.float32), generate

    @njit(inline="always")
    def widen(half):  # type: ignore[no-untyped-def]
        return bits_to_float(np.uint32(np.uint16(half)) << np.uint32(16))

    @njit(inline="always")
    def narrow(value):  # type: ignore[no-untyped-def]
        bits = float_to_bits(np.float32(value))
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        return np.int16(np.uint16(rounded >> np.uint32(16)))

    @njit(inline="always")
    def exp(value):  # type: ignore[no-untyped-def]
        """2^(n + f) from the exponent bits and a polynomial in f, 1e-6 relative: compilers vectorise it."""
        power = max(np.float32(-126), min(np.float32(126), value * np.float32(1.4426950408889634)))
        whole = np.floor(power)
        part = power - whole
        series = np.float32(0.0018775767)
        series = series * part + np.float32(0.0089893397)
        series = series * part + np.float32(0.0558263180)
        series = series * part + np.float32(0.2401536460)
        series = series * part + np.float32(0.6931530732)
        series = series * part + np.float32(0.9999999402)
        return bits_to_float(np.uint32(np.int32(whole) + np.int32(127)) << np.uint32(23)) * series

    @njit(nogil=True, fastmath=True, error_model="numpy")
    def gate(low, high, gate_up, out):  # type: ignore[no-untyped-def]
        """out = silu(gate) · up. gate_up: [n, 2I]; out: [n, I]"""
        width = out.shape[1]
        for row in range(low, high):
            for i in range(width):
                value = widen(gate_up[row, i])
                value = value / (np.float32(1) + exp(-value))
                out[row, i] = narrow(value * widen(gate_up[row, width + i]))

    @njit(nogil=True, fastmath=True, error_model="numpy")
    def add_norm(low, high, residual, delta, weight, out, eps):  # type: ignore[no-untyped-def]
        """residual += delta (rounded to bf16); out = residual / rms(residual) · weight."""
        width = residual.shape[1]
        adds = delta.shape[1] == width
        for row in range(low, high):
            total = np.float32(0)
            if adds:
                for i in range(width):
                    residual[row, i] = narrow(widen(residual[row, i]) + widen(delta[row, i]))
            for i in range(width):
                value = widen(residual[row, i])
                total += value * value
            scale = np.float32(1) / np.sqrt(total / np.float32(width) + np.float32(eps))
            for i in range(width):
                out[row, i] = narrow(widen(residual[row, i]) * scale * weight[i])

    @njit(nogil=True, fastmath=True, error_model="numpy")
    def attend(low, high, qkv, cos, sin, lengths, keys, values, out):  # type: ignore[no-untyped-def]
        """Rotate, store the new key and value at each row's length, attend over length + 1 columns.

        qkv: [n, (heads + 2 kv)·D]; keys, values: [slots, kv, columns, D]; out: [n, heads·D]
        """
        num_kv, dim = keys.shape[1], keys.shape[3]
        half = dim // 2
        group = out.shape[1] // dim // num_kv
        query = np.empty((group, dim), np.float32)
        mixed = np.empty((group, dim), np.float32)
        scores = np.empty((group, keys.shape[2]), np.float32)
        softness = np.float32(1) / np.sqrt(np.float32(dim))
        for row in range(low, high):
            here = lengths[row]
            for kv in range(num_kv):
                first = (group * num_kv + kv) * dim
                for i in range(half):
                    a, b = widen(qkv[row, first + i]), widen(qkv[row, first + half + i])
                    keys[row, kv, here, i] = narrow(a * cos[here, i] - b * sin[here, i])
                    keys[row, kv, here, half + i] = narrow(b * cos[here, i] + a * sin[here, i])
                first += num_kv * dim
                for i in range(dim):
                    values[row, kv, here, i] = qkv[row, first + i]
                for g in range(group):
                    first = (kv * group + g) * dim
                    for i in range(half):
                        a, b = widen(qkv[row, first + i]), widen(qkv[row, first + half + i])
                        query[g, i] = (a * cos[here, i] - b * sin[here, i]) * softness
                        query[g, half + i] = (b * cos[here, i] + a * sin[here, i]) * softness
                    for i in range(dim):
                        mixed[g, i] = np.float32(0)
                for column in range(here + 1):
                    for g in range(group):
                        total = np.float32(0)
                        for i in range(dim):
                            total += query[g, i] * widen(keys[row, kv, column, i])
                        scores[g, column] = total
                for g in range(group):
                    top = scores[g, 0]
                    for column in range(1, here + 1):
                        top = max(top, scores[g, column])
                    total = np.float32(0)
                    for column in range(here + 1):
                        weight = exp(scores[g, column] - top)
                        scores[g, column] = weight
                        total += weight
                    for column in range(here + 1):
                        scores[g, column] /= total
                for column in range(here + 1):
                    for g in range(group):
                        weight = scores[g, column]
                        for i in range(dim):
                            mixed[g, i] += weight * widen(values[row, kv, column, i])
                for g in range(group):
                    first = (kv * group + g) * dim
                    for i in range(dim):
                        out[row, first + i] = narrow(mixed[g, i])

    return add_norm, attend, gate
