"""The target model of the Llama family (Llama, SmolLM2, Qwen2, Qwen3, Mistral), one file by flags.

In: token ids, positions, a KV cache. Out: final hidden states and the three residual streams that
an EAGLE-3 head reads. It knows nothing of drafts, trees, sampling or time. The pass is the plain one
(engine/plain_pass); where the CPU allows, its fast twin (engine/cpu) stands in for it, and on CUDA short
passes are replayed from graphs (engine/graphs).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spectune.engine.checkpoint import TargetConfig, load_checkpoint
from spectune.engine.graphs import MAX_STATIC_TOKENS, StaticPasses
from spectune.engine.kv_cache import Cache, KVCache, SlotView
from spectune.engine.linear import can_prepack
from spectune.engine.plain_pass import PlainPass
from spectune.engine.rope import Rope
from spectune.engine.sampling import Draw
from spectune.errors import UsageError

if TYPE_CHECKING:
    from spectune.engine.cpu.twin import TargetTwin

KERNELS = ("auto", "plain")

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto` is bf16 on CUDA and on CPUs with AVX512 (natively or widened) or bf16 products, fp32 elsewhere.

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


class Target:
    """A loaded target. `aux_layer_ids` count the layers run before each captured residual stream.

    Args:
        kernels: `auto` takes the compiled twin where this CPU and these shapes have one, and graphs
            on CUDA; `plain` never does.
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
        self._aux_layer_ids = aux_layer_ids or default_aux_layers(config.num_layers)
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
        self.plain: PlainPass | None = None
        self.static: StaticPasses | None = None
        if self.twin is None:
            self.plain = PlainPass(config, weights, self.rope, self.aux_layer_ids)
            if kernels == "auto" and device.type == "cuda":
                self.static = StaticPasses(self.plain)

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """Layers run before each captured stream. Set before the first pass: captured graphs keep theirs."""
        return self._aux_layer_ids

    @aux_layer_ids.setter
    def aux_layer_ids(self, ids: tuple[int, ...]) -> None:
        self._aux_layer_ids = ids
        if self.plain is not None:
            self.plain.aux_layer_ids = ids

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
        assert self.plain is not None
        return self.plain.weight_bytes

    @property
    def kernels(self) -> str:
        """What runs the passes: `compiled` (the CPU twin), `graphs` (CUDA) or `plain`."""
        if self.twin is not None:
            return "compiled"
        return "plain" if self.static is None else "graphs"

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
        assert self.plain is not None
        assert isinstance(cache, KVCache)
        if self.static is not None and ids.shape[1] <= MAX_STATIC_TOKENS:
            return self.static.of(cache).forward(ids, positions, cache, slots, lengths, ancestors)
        return self.plain.forward(ids, positions, cache, slots, lengths, ancestors)

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., V] of final hidden states [..., H]."""
        if self.twin is not None:
            return self.twin.logits(hidden)
        assert self.plain is not None
        return self.plain.head(hidden)

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
