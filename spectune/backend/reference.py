"""The reference engine behind the one door: real decoding in this process.

Knows how to load a target and its drafters and to decode a block; knows nothing of arms, cells or
statistics.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from spectune.backend.heads import folder_digest, head_folder
from spectune.backend.prompts import encode_prompt
from spectune.draft.checkpoint import load_head
from spectune.draft.eagle3 import Eagle3Drafter
from spectune.draft.ngram import NgramDrafter
from spectune.engine.bandwidth import read_bandwidth_bytes_per_s
from spectune.engine.cpu.jit import tell_compiling
from spectune.engine.drafter import Drafter
from spectune.engine.resolve import resolve_model
from spectune.engine.scheduler import CacheRoom, Engine
from spectune.engine.stolen import StolenTime
from spectune.engine.target import Target
from spectune.engine.target_config import read_json
from spectune.engine.tokenizer import Tokenizer
from spectune.engine.trace import replay_text
from spectune.engine.verify import ForcedAcceptance
from spectune.errors import UsageError
from spectune.records import (
    NEAR_TIE,
    BlockResult,
    Capabilities,
    Fingerprint,
    Gap,
    Launch,
    Method,
    Point,
    Prompt,
    Request,
    RoundRecord,
    Session,
    SpecConfig,
)
from spectune.store.trace_file import Trace


def _silent(text: str) -> None:
    del text


class ReferenceBackend:
    """spectune's own engine.

    Args:
        model: a Hugging Face directory, a GGUF file or a hub id; the default target if None.
        draft_model: folder of an EAGLE-3 head or name of a shipped one; without it method eagle3 is not
            offered.
        device: cpu or cuda.
        dtype: auto, bfloat16, float16 or float32.
        load_format: `dummy` runs the shape of a model with random weights (costs only).
        quantization: `int8` rounds the target's weights to 8 bits (CPU; computes in float32).
        kernels: `auto` takes compiled passes on CPUs and captured graphs on CUDA, `plain` the operators of
            torch alone.
        prefill_chunk: prompt tokens per prefill pass.
        chat_template: file of a chat template that replaces the target's own.
        progress: called with a sentence when something slow starts.
    """

    def __init__(
        self,
        *,
        model: str | None = None,
        draft_model: str | None = None,
        device: str = "cpu",
        dtype: str = "auto",
        load_format: str = "auto",
        quantization: str | None = None,
        kernels: str = "auto",
        prefill_chunk: int = 512,
        chat_template: Path | None = None,
        progress: Callable[[str], None] = _silent,
    ) -> None:
        self._model, self._draft_model = model, draft_model
        self._device, self._dtype, self._load_format = device, dtype, load_format
        self._quantization, self._kernels = quantization, kernels
        if quantization is not None and dtype == "auto":
            self._dtype = "float32"
        self._prefill_chunk, self._chat_template = prefill_chunk, chat_template
        self._say = progress
        self._stolen = StolenTime()

    def capabilities(self) -> Capabilities:
        methods = [Method.OFF.value, Method.NGRAM.value]
        if self._draft_model is not None:
            methods.append(Method.EAGLE3.value)
        return Capabilities(
            name="reference",
            methods=tuple(methods),
            has_trees=True,
            has_rounds=True,
            has_keyed_sampling=True,
        )

    def plan(self, points: Sequence[Point]) -> list[Launch]:
        """One process serves every point: nothing needs a restart."""
        return [Launch(points=tuple(points))] if points else []

    def open(self, launch: Launch) -> AbstractContextManager[Session]:
        return self._open(launch)

    @contextmanager
    def _open(self, launch: Launch) -> Iterator[Session]:
        asked = any(point.config.method == Method.EAGLE3 for point in launch.points)
        if asked or self._draft_model is not None:
            self.drafter(Method.EAGLE3)  # a wrong head stops here, before anything is measured
        yield _ReferenceSession(self)

    def fingerprint(self) -> Fingerprint:
        target, config = self.target, self.target.config
        head = self.drafter(Method.EAGLE3) if self._draft_model is not None else None
        draft = {} if head is None else {"draft_digest": self._draft_digest}
        kv_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * target.dtype.itemsize
        return Fingerprint(
            backend="reference",
            engine_version=f"spectune {metadata.version('spectune')}, torch {torch.__version__}",
            target=self._target_name,
            draft=None if self._draft_model is None else Path(self._draft_model).name,
            device=_device_name(target.device),
            dtype=str(target.dtype).removeprefix("torch."),
            threads=torch.get_num_threads(),
            settings={
                "prefill_chunk": self._prefill_chunk,
                "prefix_cache": False,
                "load_format": self._load_format,
                "quantization": self._quantization or "none",
                "kernels": target.kernels,
                "chat_template": self.template_digest or "none",
                "vocab_size": config.vocab_size,
                **draft,
            },
            weight_bytes=target.weight_bytes,
            draft_weight_bytes=None if head is None else head.weight_bytes,
            kv_bytes_per_token=kv_bytes,
            read_bandwidth_bytes_per_s=self._read_bandwidth_bytes_per_s,
        )

    def encode(self, prompt: Prompt, context_text: str, context_tokens: int) -> tuple[int, ...]:
        """Chat-templated ids of the prompt's first turn, after `context_tokens` of real text."""
        return encode_prompt(self.tokenizer, prompt, context_text, context_tokens)

    @functools.cached_property
    def model_path(self) -> Path:
        return resolve_model(self._model, progress=self._say)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        own = Tokenizer.from_dir(self.model_path)
        return own if self._chat_template is None else own.with_template(self._chat_template)

    @functools.cached_property
    def head_context(self) -> int | None:
        """Longest context that the head was made for; None where its config does not say."""
        if self._draft_model is None:
            return None
        config = read_json(head_folder(self._draft_model) / "config.json")
        longest = config.get("max_position_embeddings")
        return longest if isinstance(longest, int) else None

    @property
    def template_digest(self) -> str | None:
        """Digest of the target's chat template."""
        return self.tokenizer.template_digest

    @functools.cached_property
    def _draft_digest(self) -> str:
        """Digest of a head's files: another head may lie in the same folder tomorrow."""
        assert self._draft_model is not None
        return folder_digest(head_folder(self._draft_model))

    @functools.cached_property
    def _read_bandwidth_bytes_per_s(self) -> float:
        """Measured once: it takes a while, and it must not change within a run."""
        return read_bandwidth_bytes_per_s(self.target.device, self.target.weight_bytes)

    @functools.cached_property
    def target(self) -> Target:
        tell_compiling(self._say)
        return Target.load(
            self.model_path,
            device=self._device,
            dtype=self._dtype,
            load_format=self._load_format,
            kernels=self._kernels,
            quantization=self._quantization,
        )

    @functools.cached_property
    def _eagle3(self) -> Eagle3Drafter:
        if self._draft_model is None:
            raise UsageError("method eagle3 needs --draft-model", hint="give the folder of an EAGLE-3 head")
        head = load_head(head_folder(self._draft_model), self.target.config)
        ids = head.config.aux_layer_ids
        if ids is not None:
            self.target.aux_layer_ids = tuple(ids)
        return Eagle3Drafter(head, self.target)

    def drafter(self, method: str) -> Drafter | None:
        """The drafter of a method; None for off."""
        if method == Method.OFF:
            return None
        if method == Method.EAGLE3:
            return self._eagle3
        if method == Method.NGRAM:
            return NgramDrafter(self.target.device)
        raise UsageError(f"--method {method} is unknown to the reference engine", hint="eagle3, ngram")

    def record_trace(
        self,
        requests: Sequence[Request],
        configs: Sequence[SpecConfig],
        about: Mapping[str, Mapping[str, Any]],
        *,
        parts_dir: Path,
        batch_size: int = 16,
        on_part: Callable[[int, int], None] | None = None,
    ) -> Trace:
        """One plain run of the requests with the drafts of all configurations along it; finished parts in
        `parts_dir` are kept."""
        from spectune.backend.reference_trace import reference_trace

        return reference_trace(
            self,
            self._draft_model,
            requests,
            configs,
            about,
            parts_dir=parts_dir,
            batch_size=batch_size,
            on_part=on_part,
        )

    @property
    def _target_name(self) -> str:
        """Hub ids whole, paths by their last part: a folder of this machine identifies nothing elsewhere."""
        if self._model is None:
            name = self.model_path.name
        else:
            name = Path(self._model).name if Path(self._model).expanduser().exists() else self._model
        return f"{name} (random weights)" if self._load_format == "dummy" else name

    def engine(self, config: SpecConfig, batch_size: int, *, cache_room: CacheRoom | None = None) -> Engine:
        """An engine of `batch_size` slots with the drafter that `config` needs."""
        drafter = self.drafter(config.method)  # before the target: a missing head costs no loading
        return Engine(
            self.target,
            self.tokenizer,
            drafter=drafter,
            batch_size=batch_size,
            prefill_chunk=self._prefill_chunk,
            stolen=self._stolen,
            cache_room=cache_room,
        )


class _ReferenceSession:
    """Engines by batch size and method: their one cache is made once and used by all blocks."""

    def __init__(self, backend: ReferenceBackend) -> None:
        self._backend = backend
        self._engines: dict[tuple[int, str], Engine] = {}
        self._cache_room = CacheRoom()

    def run(self, point: Point, requests: Sequence[Request]) -> BlockResult:
        return self._engine(point).generate(requests, point.config)

    def replay(
        self, point: Point, requests: Sequence[Request], texts: Mapping[str, Sequence[int]]
    ) -> BlockResult:
        """The block along given output ids: what the drafter would have had accepted."""
        return replay_text(self._engine(point), requests, dict(texts), point.config)

    def time_rounds(
        self,
        point: Point,
        requests: Sequence[Request],
        configs: Sequence[SpecConfig],
        kept: Sequence[int],
    ) -> tuple[RoundRecord, ...]:
        """One round of all requests for each configuration, with forced acceptance: what rounds cost."""
        drafting = [config for config in configs if not config.is_off]
        largest = drafting and SpecConfig(
            method=drafting[0].method,
            num_steps=max(config.num_steps for config in drafting),
            topk=max(config.topk for config in drafting),
            num_draft_tokens=max(config.num_draft_tokens for config in drafting),
            options=drafting[0].options,
        )
        # plain rounds keep nothing by themselves: without drafts nothing has to be forced
        forced = _Kept(0.0, kept) if drafting else None
        block = self._engine(point).generate(
            requests, chooser=_InTurn(configs), forced=forced, scratch=largest or None
        )
        return tuple(turn for turn in block.rounds if turn.kind == "decode")[: len(configs)]

    def _engine(self, point: Point) -> Engine:
        config, batch_size = point.config, point.cell.batch_size
        if any(size != batch_size for size, _ in self._engines):
            self._engines.clear()  # one batch size at a time holds the memory
            self._cache_room = CacheRoom()
        key = (batch_size, config.method)
        if key not in self._engines:
            self._engines[key] = self._backend.engine(config, batch_size, cache_room=self._cache_room)
        return self._engines[key]

    def gap(self, request: Request, output_ids: Sequence[int], index: int) -> Gap | None:
        if index < 1:
            return None  # the first token comes from prefill, which no arm changes
        engine = self._backend.engine(SpecConfig.off(), 1)
        text: dict[str, Sequence[int]] = {request.request_id: output_ids[: index + 1]}
        engine.generate([request], forced_text=text, wants_margins=True)
        value = engine.margins[request.request_id][index - 1]
        return Gap(value=value, tolerance=NEAR_TIE[str(self._backend.target.dtype).removeprefix("torch.")])


class _InTurn:
    """Chooses given configurations one after the other, then plain decoding."""

    def __init__(self, configs: Sequence[SpecConfig]) -> None:
        self._left = deque(configs)

    def choose(self, *, batch_size: int, context_tokens: int, acceptance_ema: float | None) -> SpecConfig:
        return self._left.popleft() if self._left else SpecConfig.off()


@dataclass(frozen=True, slots=True)
class _Kept(ForcedAcceptance):
    """Keeps a given number of drafts in each step."""

    counts: Sequence[int]

    def count(self, step: int, limit: int) -> int:
        return min(self.counts[step], limit) if step < len(self.counts) else 0


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "cpu"
