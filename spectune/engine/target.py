"""The target model of the Llama family (Llama, SmolLM2, Qwen2, Qwen3, Mistral), one file by flags.

In: token ids, positions, a KV cache. Out: final hidden states and the three residual streams that
an EAGLE-3 head reads. It knows nothing of drafts, trees, sampling or time. The pass written here is the
plain one; where the CPU allows, its fast twin (engine/cpu) stands in for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from spectune.engine.attention import additive_mask, grouped_attention, visible_columns
from spectune.engine.checkpoint import TargetConfig, load_checkpoint
from spectune.engine.kv_cache import Cache, KVCache, SlotView
from spectune.engine.linear import Linear, can_prepack
from spectune.engine.rope import Rope
from spectune.engine.sampling import Draw
from spectune.errors import UsageError

if TYPE_CHECKING:
    from spectune.engine.cpu.twin import TargetTwin

KERNELS = ("auto", "plain")

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto` is bf16 on CUDA and on CPUs with native bf16 products, fp32 elsewhere.

    Raises UsageError for a name outside auto, bfloat16, float16, float32.
    """
    if dtype == "auto":
        fast = device.type == "cuda" or _cpu_has_bf16()
        return torch.bfloat16 if fast else torch.float32
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype} is unknown", hint=f"use auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def resolve_device(device: str) -> torch.device:
    """The torch device; raises UsageError where CUDA is asked for and absent."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"--device {device}: this torch sees no CUDA device", hint="use --device cpu")
    if device != "cpu" and not device.startswith("cuda"):
        raise UsageError(f"--device {device} is unknown", hint="use cpu or cuda")
    return torch.device(device)


def _cpu_has_bf16() -> bool:
    check = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return bool(check()) if check is not None and can_prepack(torch.bfloat16) else False


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's captured streams: number of layers run before each capture (2, L//2, L-3)."""
    return (2, num_layers // 2, num_layers - 3)


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


class Target:
    """A loaded target. `aux_layer_ids` count the layers run before each captured residual stream.

    Args:
        kernels: `auto` takes the compiled twin where this machine and these shapes have one, `plain`
            never does.
        quantization: `int8` rounds the weights of layers and output head to 8 bits (one scale an
            output); only the compiled twin has it. Lossless relative to itself, another model than
            the unrounded one.
    """

    def __init__(
        self,
        config: TargetConfig,
        weights: dict[str, Tensor],
        *,
        device: torch.device,
        dtype: torch.dtype,
        path: Path | None = None,
        is_dummy: bool = False,
        aux_layer_ids: tuple[int, ...] | None = None,
        kernels: str = "auto",
        quantization: str | None = None,
    ) -> None:
        if kernels not in KERNELS:
            raise UsageError(f"--kernels {kernels} is unknown", hint=f"use {', '.join(KERNELS)}")
        self.config = config
        self.device, self.dtype = device, dtype
        self.path, self.is_dummy, self.quantization = path, is_dummy, quantization
        self.aux_layer_ids = aux_layer_ids or default_aux_layers(config.num_layers)
        weights = {name: tensor.to(device, dtype) for name, tensor in weights.items()}
        self.embed_weight = weights["model.embed_tokens.weight"]  # [V, H]
        self.lm_head_weight = weights.get("lm_head.weight", self.embed_weight)  # [V, H]
        self.norm_weight = weights["model.norm.weight"]  # [H]
        self.rope = Rope(config.head_dim, config.rope_theta, config.rope_scaling, device=device, dtype=dtype)
        self.twin: TargetTwin | None = None
        if kernels == "auto" and device.type == "cpu":
            from spectune.engine.cpu.build import target_twin

            self.twin = target_twin(config, weights, dtype, quantize=quantization == "int8")
        if quantization is not None and (quantization != "int8" or self.twin is None):
            raise UsageError(
                f"--quantization {quantization} is not to be had here",
                hint="int8 runs on CPUs with --kernels auto and --dtype float32",
            )
        self.head: Linear | None = None
        self.layers: list[_Layer] = []
        if self.twin is None:
            self.head = Linear(self.lm_head_weight)
            self.layers = [
                _Layer(config, weights, f"model.layers.{index}.") for index in range(config.num_layers)
            ]

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        load_format: str = "auto",
        aux_layer_ids: tuple[int, ...] | None = None,
        kernels: str = "auto",
        quantization: str | None = None,
    ) -> Target:
        """Load a Hugging Face directory; `load_format="dummy"` gives random weights of its shape."""
        where = resolve_device(device)
        config, weights = load_checkpoint(Path(path), load_format)
        return cls(
            config,
            weights,
            device=where,
            dtype=resolve_dtype(dtype, where),
            path=Path(path),
            is_dummy=load_format == "dummy",
            aux_layer_ids=aux_layer_ids,
            kernels=kernels,
            quantization=quantization,
        )

    def state_dict_hf(self) -> dict[str, Tensor]:
        """The weights under their Hugging Face names, read again from disk."""
        assert self.path is not None, "a target made in memory has no file to read"
        return load_checkpoint(self.path, "dummy" if self.is_dummy else "auto")[1]

    @property
    def weight_bytes(self) -> int:
        """Bytes that one decode pass streams: layers and output head (the embedding is a lookup)."""
        if self.twin is not None:
            return self.twin.weight_bytes
        assert self.head is not None
        return sum(layer.num_bytes for layer in self.layers) + self.head.num_bytes

    def new_cache(self, num_slots: int, max_len: int) -> Cache:
        """A cache for `num_slots` rows of at most `max_len` columns."""
        self.rope.reserve(max_len)
        config = self.config
        if self.twin is not None:
            return self.twin.new_cache(config.num_layers, num_slots, max_len)
        return KVCache(
            num_layers=config.num_layers,
            num_slots=num_slots,
            max_len=max_len,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            device=self.device,
            dtype=self.dtype,
        )

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: Cache,
        slots: SlotView,
        lengths: list[int],
        ancestors: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Score T new tokens a row after each row's committed prefix.

        Args:
            ids, positions: [B, T]; token t of row b is stored at column lengths[b] + t.
            lengths: committed columns of each row, on the host.
            ancestors: [B, T, T] bool, self included; None means a chain (lower triangle).

        Returns:
            Final hidden states [B, T, H] after the last norm, and features [B, T, 3H].
        """
        if self.twin is not None:
            return self.twin.forward(
                ids, positions, cache, slots.index, lengths, ancestors, self.rope.tables(), self.aux_layer_ids
            )
        assert isinstance(cache, KVCache)
        num_tokens = ids.shape[1]
        num_columns = max(lengths) + num_tokens
        device_lengths = torch.tensor(lengths, dtype=torch.int64, device=self.device)
        columns = device_lengths.unsqueeze(1) + torch.arange(num_tokens, device=self.device)
        rows = cache.flat(slots.index, columns)
        mask = self._mask(device_lengths, lengths, ancestors, num_tokens, num_columns)
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

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., V] of final hidden states [..., H]."""
        if self.twin is not None:
            return self.twin.logits(hidden)
        assert self.head is not None
        return self.head(hidden)

    def best(self, hidden: Tensor) -> Tensor:
        """Most likely next tokens [...] of final hidden states [..., H], the first of equals."""
        if self.twin is not None:
            return self.twin.best(hidden)
        return self.logits(hidden).max(-1).indices

    @property
    def draw(self) -> Draw | None:
        """Compiled keyed draw of tokens, where this target has a twin (see sampling.choose)."""
        return None if self.twin is None else self.twin.draw

    @contextmanager
    def own_threads(self) -> Iterator[None]:
        """While the twin's threads work, torch keeps to one: its idle ones spin on their cores."""
        before = torch.get_num_threads()
        if self.twin is not None:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    @torch.inference_mode()
    def forward_text(self, ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Teacher-forced pass over right-padded text ids [B, T]; see `forward` for what it returns."""
        num_rows, num_tokens = ids.shape
        cache = self.new_cache(num_rows, num_tokens)
        positions = torch.arange(num_tokens, device=self.device).expand(num_rows, -1)
        slots = SlotView(range(num_rows), self.device)
        return self.forward(ids.to(self.device), positions, cache, slots, [0] * num_rows, None)

    def _mask(
        self,
        device_lengths: Tensor,
        lengths: list[int],
        ancestors: Tensor | None,
        num_tokens: int,
        num_columns: int,
    ) -> Tensor | None:
        if num_tokens == 1 and min(lengths) == max(lengths) and self.config.sliding_window is None:
            return None
        if ancestors is None:
            triangle = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=self.device).tril()
            ancestors = triangle.expand(len(lengths), -1, -1)
        visible = visible_columns(device_lengths, ancestors, num_columns)
        if self.config.sliding_window is not None:
            depth = ancestors.sum(-1) - 1  # [B, T]
            position = device_lengths.unsqueeze(1) + depth
            oldest = (position - self.config.sliding_window + 1).unsqueeze(2)
            visible = visible & (torch.arange(num_columns, device=self.device) >= oldest)
        groups = self.config.num_heads // self.config.num_kv_heads
        return additive_mask(visible, groups, self.dtype)

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
