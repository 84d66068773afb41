"""SGLang behind the one door: a server for each arm, trees included, read by counts and not by rates.

What a server resolved its arguments to is read back before it is measured: a server that runs another
configuration than it was started with is not measured.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spectune.backend.ceiling import known_ceiling
from spectune.backend.client import ClientOptions, Dialect
from spectune.backend.command_line import launcher
from spectune.backend.extra_args import extra_value
from spectune.backend.launched import LaunchedBackend
from spectune.backend.server import HOST, Server, ServerCommand
from spectune.backend.server_api import server_info
from spectune.backend.server_session import SILENCE_S, Address
from spectune.backend.server_words import SGLANG_WORDS
from spectune.backend.sglang_acceptance import resolved_settings
from spectune.backend.sglang_command import (
    SglangSettings,
    adaptive_document,
    check_extra,
    check_version,
    common_environment,
    flag_name,
    forced_acceptance,
    forced_length,
    program,
    server_arguments,
)
from spectune.backend.sglang_session import SglangSession
from spectune.backend.sglang_support import ALGORITHMS, unsupported
from spectune.backend.vllm_log import log_name
from spectune.backend.vllm_model import kv_bytes_per_token, quantization_scheme, weight_bytes
from spectune.errors import BackendMissing, EngineFailure, InfeasibleConfig
from spectune.records import Capabilities, Fingerprint, Launch, Method, Session, SpecConfig

RESOLVED = (
    "attention_backend",
    "page_size",
    "dtype",
    "max_running_requests",
    "context_length",
    "chunked_prefill_size",
    "disable_radix_cache",
    "disable_cuda_graph",
    "disable_overlap_schedule",
    "mem_fraction_static",
    "sampling_defaults",
    "tp_size",
)
"""Settings that a server tells and that two comparable runs share."""


class SglangBackend(LaunchedBackend):
    """Servers of SGLang, one for each arm and start."""

    engine = "sglang"

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._told_version: str | None = None
        self._resolved: dict[str, Any] = {}

    def _check_extra(self, words: Sequence[str]) -> None:
        check_extra(words)

    def _default_device(self) -> str:
        return "cuda"  # no CPU build of its kernels

    def capabilities(self) -> Capabilities:
        return Capabilities(
            name=self.engine,
            methods=(Method.OFF.value, *ALGORITHMS),
            has_trees=True,
            has_rounds=False,
            has_boots=True,
            max_batch_size=self._max_num_seqs,
        )

    def unsupported(self, config: SpecConfig) -> str | None:
        """Why a configuration cannot run with these settings, or None; such a point is never launched."""
        page = extra_value(self._extra, "page-size", name_of=flag_name)
        return unsupported(
            config,
            attention_backend=extra_value(self._extra, "attention-backend", name_of=flag_name),
            page_size=int(page) if page is not None and page.isdecimal() else None,
            has_dp_attention=any(flag_name(word) == "enable-dp-attention" for word in self._extra),
        )

    def command(self, launch: Launch, *, port: int, served_model: str) -> ServerCommand:
        """What `launch` starts."""
        config = launch.points[0].config
        if (reason := self.unsupported(config)) is not None:
            raise InfeasibleConfig(f"{config.label}: {reason}")
        settings = self.settings(config)
        adaptive = self._adaptive_file(launch) if self._adaptive(config) is not None else None
        arguments = server_arguments(
            settings,
            config,
            draft_path=self._draft_path,
            served_model=served_model,
            host=HOST,
            port=port,
            adaptive_path=None if adaptive is None else str(adaptive),
        )
        if self._server_cmd is not None:
            argv = launcher(self._server_cmd, arguments, port)
        else:
            argv = [*program(self._python), *arguments]
        return ServerCommand(
            argv=tuple(argv),
            port=port,
            served_model=served_model,
            environment={**common_environment(settings.model), **self._forced},
            dialect=Dialect.SGLANG,
        )

    @property
    def _python(self) -> str:
        """The interpreter, or the word for one: a command can be shown where nothing can be started."""
        try:
            return self.environment.python
        except BackendMissing:
            return "python"

    @property
    def _forced(self) -> dict[str, str]:
        """Variables of forced acceptance, where the user has set them: every arm gets the same."""
        length = forced_length(os.environ)
        return {} if length is None else forced_acceptance(length)

    def _prepare(self, launch: Launch) -> None:
        if self._server_cmd is None:
            check_version(self.environment.version)
        document = self._adaptive(launch.points[0].config)
        if document is None:
            return
        file = self._adaptive_file(launch)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(document) + "\n", encoding="utf-8")

    def _adaptive(self, config: SpecConfig) -> dict[str, Any] | None:
        return adaptive_document(config, self._max_num_seqs)

    def _adaptive_file(self, launch: Launch) -> Path:
        return (self._log_dir / f"{log_name(launch.points[0])}.adaptive.json").absolute()

    def _session(self, server: Server, config: SpecConfig) -> Session:
        info = server_info(server.url)
        self._is_simulated = bool(info.get("is_simulated", False))
        self._told_version = str(info["version"]) if "version" in info else None
        check_resolved(info, self.settings(config), config)
        self._resolved = resolved_settings(info, RESOLVED)
        return SglangSession(
            Address(
                url=server.url,
                served_model=server.command.served_model,
                kv_capacity_tokens=token_capacity(info),
                notes=(*self._oom_notes(config), *_adaptive_notes(config), *_forced_notes(config)),
                near_tie=self._near_tie,
            ),
            is_plain=config.is_off,
            check_alive=functools.partial(self._check_alive, server, config),
            options=ClientOptions(dialect=Dialect.SGLANG, silence_timeout_s=SILENCE_S),
            ceiling=known_ceiling,
            trace_s=self._trace_s,
            words=SGLANG_WORDS,
            resets_cache=True,
        )

    def fingerprint(self) -> Fingerprint:
        """What must be equal; once a server has run, with what it resolved its arguments to."""
        settings = self.settings(SpecConfig.off())
        resolved = {f"resolved_{name}": _plain(value) for name, value in self._resolved.items()}
        return Fingerprint(
            backend=self.engine,
            engine_version=self._engine_version,
            target=self._target_name,
            draft=self._draft_name,
            device=self._device,
            dtype=self._dtype,
            threads=1,
            settings={
                "max_running_requests": settings.max_running_requests,
                "context_length": settings.context_length,
                "chunked_prefill_size": settings.chunked_prefill_size,
                "disable_cuda_graph": settings.disable_cuda_graph,
                "tensor_parallel_size": self._tensor_parallel_size,
                "prefix_cache": False,
                "sampling_defaults": "openai",
                "forced_acceptance_length": forced_length(os.environ) or "none",
                "draft_sampling": "greedy",
                "target_quantization": quantization_scheme(self.model_path),
                **self._draft_facts,
                "extra_server_args": " ".join(settings.extra),
                "chat_template": self.template_digest or "none",
                **resolved,
            },
            is_simulated=self._is_simulated,
            weight_bytes=weight_bytes(self.model_path),
            kv_bytes_per_token=kv_bytes_per_token(self.model_path),
        )

    def settings(self, config: SpecConfig) -> SglangSettings:
        """The engine settings of a start; equal in all arms unless one ran out of memory."""
        lowered = self._lowered(config)
        share = self._gpu_memory_utilization
        if share is None and lowered < 1:
            share = 0.85
        return SglangSettings(
            model=str(self.model_path),
            dtype=self._dtype,
            device=self._device,
            max_running_requests=self._max_num_seqs,
            context_length=self._sequence_tokens,
            disable_cuda_graph=self._is_eager,
            mem_fraction_static=None if share is None else share * lowered,
            chat_template=None if self._chat_template is None else str(self._chat_template),
            extra=self._extra,
        )


def check_resolved(info: Mapping[str, Any], settings: SglangSettings, config: SpecConfig) -> None:
    """EngineFailure where a server runs other numbers than it was started with; names both."""
    asked: dict[str, Any] = {"max_running_requests": settings.max_running_requests}
    if config.is_off:
        asked["speculative_algorithm"] = None
    else:
        asked |= {
            "speculative_algorithm": ALGORITHMS[config.method],
            "speculative_num_steps": config.num_steps,
            "speculative_eagle_topk": config.topk,
            "speculative_num_draft_tokens": config.num_draft_tokens,
        }
    for name, value in asked.items():
        if name in info and info[name] != value:
            raise EngineFailure(
                f"the server was started for {config.label} with {name} {value!r} and runs with {info[name]!r}",
                hint="its log says why; leave out of --extra-server-args what changes it",
            )
    for state in info.get("internal_states") or ():
        admitted = state.get("effective_max_running_requests_per_dp") if isinstance(state, Mapping) else None
        if isinstance(admitted, int) and admitted < settings.max_running_requests:
            raise EngineFailure(
                f"the server admits {admitted} requests at once, {settings.max_running_requests} were asked for: "
                "its memory holds no more",
                hint=f"--max-num-seqs {admitted} at most, or more memory for the cache",
            )


def token_capacity(info: Mapping[str, Any]) -> int | None:
    """Tokens that the cache holds, from /server_info; None where it does not say."""
    for state in info.get("internal_states") or ():
        usage = state.get("memory_usage") if isinstance(state, Mapping) else None
        capacity = usage.get("token_capacity") if isinstance(usage, Mapping) else None
        if isinstance(capacity, int):
            return capacity
    return None


def _adaptive_notes(config: SpecConfig) -> tuple[str, ...]:
    if config.option("adaptive") is None:
        return ()
    return (
        "the server changes its depth while it serves: requests tell how many drafts were accepted, not how "
        "many were made, so rates per draft are not known",
    )


def _forced_notes(config: SpecConfig) -> tuple[str, ...]:
    length = forced_length(os.environ)
    if length is None or config.is_off:
        return ()
    return (
        f"acceptance is forced to {length:g} tokens a round: times are real, texts and acceptance are not",
    )


def _plain(value: Any) -> str | int | float | bool:
    return value if isinstance(value, str | int | float | bool) else str(value)
