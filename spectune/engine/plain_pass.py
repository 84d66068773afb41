"""The target's layers in operators of torch: one function for exact and for padded columns.

In: ids, positions, committed lengths on the device, the number of columns to read. Out: final hidden
states and features. Nothing in `run` waits for the device, allocates by a value on it or branches on
one, so that a pass can be captured in a graph (engine/graphs).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spectune.engine.attention import additive_mask, grouped_attention, visible_columns
from spectune.engine.checkpoint import TargetConfig
from spectune.engine.kv_cache import KVCache, SlotView
from spectune.engine.linear import Linear
from spectune.engine.rope import Rope
from spectune.engine.uploads import on_device


class _Layer:
    """Weights of one decoder layer; q, k, v and gate, up are merged."""

    def __init__(self, config: TargetConfig, weights: dict[str, Tensor], prefix: str) -> None:
        attention = prefix + "self_attn."
        names = ("q_proj", "k_proj", "v_proj")
        bias = None
        if attention + "q_proj.bias" in weights:
            bias = torch.cat([weights[f"{attention}{name}.bias"] for name in names])
        self.qkv = Linear(torch.cat([weights[f"{attention}{name}.weight"] for name in names]), bias)
        self.out = Linear(weights[attention + "o_proj.weight"], weights.get(attention + "o_proj.bias"))
        gate_up = [prefix + f"mlp.{name}_proj" for name in ("gate", "up")]
        inner_bias = None
        if gate_up[0] + ".bias" in weights:
            inner_bias = torch.cat([weights[f"{name}.bias"] for name in gate_up])
        self.gate_up = Linear(torch.cat([weights[f"{name}.weight"] for name in gate_up]), inner_bias)
        self.down = Linear(
            weights[prefix + "mlp.down_proj.weight"], weights.get(prefix + "mlp.down_proj.bias")
        )
        self.input_norm = weights[prefix + "input_layernorm.weight"]
        self.post_norm = weights[prefix + "post_attention_layernorm.weight"]
        self.query_norm = weights.get(attention + "q_norm.weight") if config.qk_norm else None
        self.key_norm = weights.get(attention + "k_norm.weight") if config.qk_norm else None

    @property
    def num_bytes(self) -> int:
        return sum(linear.num_bytes for linear in (self.qkv, self.out, self.gate_up, self.down))


class PlainPass:
    """All layers, the output head and the pass over them; weights are on the device, in its dtype."""

    def __init__(
        self, config: TargetConfig, weights: dict[str, Tensor], rope: Rope, aux_layer_ids: tuple[int, ...]
    ) -> None:
        self.config, self.rope, self.aux_layer_ids = config, rope, aux_layer_ids
        self.embed_weight = weights["model.embed_tokens.weight"]  # [V, H]
        self.norm_weight = weights["model.norm.weight"]  # [H]
        self.head = Linear(weights.get("lm_head.weight", self.embed_weight))
        self.layers = [_Layer(config, weights, f"model.layers.{i}.") for i in range(config.num_layers)]

    @property
    def weight_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self.layers) + self.head.num_bytes

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: KVCache,
        slots: SlotView,
        lengths: list[int],
        ancestors: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Read no more columns than there are; arguments and results as in `Target.forward`."""
        num_tokens = ids.shape[1]
        # one token after rows of one length sees every column that is read
        sees_all = num_tokens == 1 and min(lengths) == max(lengths) and self.config.sliding_window is None
        return self.run(
            ids,
            positions,
            cache,
            slots,
            on_device(lengths, ids.device),
            ancestors,
            num_columns=max(lengths) + num_tokens,
            sees_all=sees_all,
        )

    def run(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: KVCache,
        slots: SlotView,
        lengths: Tensor,
        ancestors: Tensor | None,
        *,
        num_columns: int,
        sees_all: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The pass over ids, positions [B, T] and lengths [B], all on the device.

        Args:
            ancestors: [B, T, T] bool, self included; None means a chain.
            num_columns: columns to read, at least the longest row's lengths[b] + T; what lies past a
                row's own is hidden by the mask.
            sees_all: no mask is needed, since every token sees all `num_columns`.

        Returns:
            Final hidden states [B, T, H] and features [B, T, 3H].
        """
        columns = lengths.unsqueeze(1) + torch.arange(ids.shape[1], device=ids.device)
        rows = cache.flat(slots.index, columns)
        mask = None if sees_all else self._mask(lengths, ancestors, ids.shape[1], num_columns)
        cos, signed_sin = self.rope.at(positions)
        x = F.embedding(ids, self.embed_weight)  # [B, T, H]
        features = []
        for index, layer in enumerate(self.layers):
            if index in self.aux_layer_ids:
                features.append(x)
            x = x + self._attend(layer, index, x, cos, signed_sin, cache, rows, slots, num_columns, mask)
            x = x + self._feed_forward(layer, x)
        hidden = self._norm(x, self.norm_weight)
        return hidden, torch.cat(features, -1)  # [B, T, H], [B, T, 3H]

    def _mask(self, lengths: Tensor, ancestors: Tensor | None, num_tokens: int, num_columns: int) -> Tensor:
        """Additive mask [B, 1, G·T, S]."""
        if ancestors is None:
            triangle = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=lengths.device).tril()
            ancestors = triangle.expand(lengths.shape[0], -1, -1)
        visible = visible_columns(lengths, ancestors, num_columns)
        if self.config.sliding_window is not None:
            depth = ancestors.sum(-1) - 1  # [B, T]
            position = lengths.unsqueeze(1) + depth
            oldest = (position - self.config.sliding_window + 1).unsqueeze(2)
            visible = visible & (torch.arange(num_columns, device=lengths.device) >= oldest)
        groups = self.config.num_heads // self.config.num_kv_heads
        return additive_mask(visible, groups, self.embed_weight.dtype)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)

    def _attend(
        self,
        layer: _Layer,
        index: int,
        x: Tensor,
        cos: Tensor,
        signed_sin: Tensor,
        cache: KVCache,
        rows: Tensor,
        slots: SlotView,
        num_columns: int,
        mask: Tensor | None,
    ) -> Tensor:
        """Self-attention block [B, T, H]: store this pass's keys and values, then attend."""
        config = self.config
        batch, num_tokens, _ = x.shape
        qkv = layer.qkv(self._norm(x, layer.input_norm))
        heads = qkv.view(batch, num_tokens, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        rotated = heads[:, :, : config.num_heads + config.num_kv_heads]
        if layer.query_norm is not None and layer.key_norm is not None:
            rotated = torch.cat(
                [
                    self._norm(rotated[:, :, : config.num_heads], layer.query_norm),
                    self._norm(rotated[:, :, config.num_heads :], layer.key_norm),
                ],
                2,
            )
        rotated = self.rope.rotate(rotated, cos, signed_sin)
        keys = rotated[:, :, config.num_heads :]
        values = heads[:, :, config.num_heads + config.num_kv_heads :]
        cache.write(index, rows, torch.stack([keys, values], 2))
        all_keys, all_values = cache.read(index, slots, num_columns)
        query = rotated[:, :, : config.num_heads].contiguous()
        return layer.out(grouped_attention(query, all_keys, all_values, mask))

    def _feed_forward(self, layer: _Layer, x: Tensor) -> Tensor:
        gate, up = layer.gate_up(self._norm(x, layer.post_norm)).chunk(2, -1)
        return layer.down(F.silu(gate) * up)
