"""vLLM behind the one door: a server for each arm, or servers that somebody else runs.

An idle server of the CPU build still wakes up and its threads are bound to cores: never two at a time.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spectune.backend.ceiling import known_ceiling
from spectune.backend.command_line import launcher
from spectune.backend.environments import detect_device
from spectune.backend.launched import LaunchedBackend
from spectune.backend.server import HOST, Server, ServerCommand, log_tail
from spectune.backend.server_api import engine_version
from spectune.backend.server_session import Address, ServerSession
from spectune.backend.vllm_command import (
    METHODS,
    VllmSettings,
    check_extra,
    check_version,
    common_environment,
    cpu_environment,
    program,
    server_arguments,
)
from spectune.backend.vllm_log import cache_tokens
from spectune.backend.vllm_model import (
    cache_gib,
    kv_bytes_per_token,
    quantization_scheme,
    weight_bytes,
)
from spectune.provenance import usable_core_ids
from spectune.records import (
    Capabilities,
    Fingerprint,
    Launch,
    Session,
    SpecConfig,
)


class VllmBackend(LaunchedBackend):
    """Servers of vLLM, one for each arm and start; eager on the CPU, where a start takes a third of the time."""

    engine = "vllm"

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        if self._server_cmd is None:
            check_version(self.environment.version)

    def _check_extra(self, words: Sequence[str]) -> None:
        check_extra(words)

    def _default_device(self) -> str:
        return detect_device()

    def _is_eager_by_default(self) -> bool:
        return self._is_cpu

    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="vllm",
            methods=tuple(method.value for method in METHODS),
            has_trees=False,
            has_rounds=False,
            has_boots=True,
            max_batch_size=self._max_num_seqs,
        )

    def command(self, launch: Launch, *, port: int, served_model: str) -> ServerCommand:
        """What `launch` starts."""
        config = launch.points[0].config
        settings = self.settings(config)
        arguments = server_arguments(
            settings, config, draft_path=self._draft_path, served_model=served_model, host=HOST, port=port
        )
        environment = common_environment(settings.model)
        if self._server_cmd is not None:
            argv = launcher(self._server_cmd, arguments, port)
        else:
            python = self.environment.python
            argv = [*program(python), *arguments]
            if self._is_cpu:
                environment |= self._cpu_environment(settings)
        return ServerCommand(argv=tuple(argv), port=port, served_model=served_model, environment=environment)

    def _cpu_environment(self, settings: VllmSettings) -> dict[str, str]:
        return cpu_environment(settings, self.environment.python, usable_core_ids(), own=os.environ)

    def _session(self, server: Server, config: SpecConfig) -> Session:
        self._is_simulated = bool(engine_version(server.url).get("is_simulated", False))
        return ServerSession(
            Address(
                url=server.url,
                served_model=server.command.served_model,
                kv_capacity_tokens=cache_tokens(log_tail(server.log)),
                notes=self._oom_notes(config),
                near_tie=self._near_tie,
            ),
            is_plain=config.is_off,
            check_alive=functools.partial(self._check_alive, server, config),
            ceiling=known_ceiling,
            trace_s=self._trace_s,
        )

    def fingerprint(self) -> Fingerprint:
        settings = self.settings(SpecConfig.off())
        return Fingerprint(
            backend="vllm",
            engine_version=self._engine_version,
            target=self._target_name,
            draft=self._draft_name,
            device=self._device,
            dtype=self._dtype,
            threads=self._num_threads,
            settings={
                "max_num_seqs": settings.max_num_seqs,
                "max_model_len": settings.max_model_len,
                "max_num_batched_tokens": settings.max_num_batched_tokens,
                "enforce_eager": settings.enforce_eager,
                "prefix_cache": False,
                **self._cpu_facts(settings),
                **(
                    {}
                    if self._is_cpu
                    else {"gpu_memory_utilization": settings.gpu_memory_utilization or "default"}
                ),
                "generation_config": "vllm",
                "draft_sampling": "greedy",
                "target_quantization": quantization_scheme(self.model_path),
                **self._draft_facts,
                "extra_server_args": " ".join(settings.extra),
                "tensor_parallel_size": self._tensor_parallel_size,
                "chat_template": self.template_digest or "none",
            },
            is_simulated=self._is_simulated,
            weight_bytes=weight_bytes(self.model_path),
            kv_bytes_per_token=kv_bytes_per_token(self.model_path),
        )

    def settings(self, config: SpecConfig) -> VllmSettings:
        """The engine settings of a start; equal in all arms unless one ran out of memory."""
        lowered = self._lowered(config)
        share = self._gpu_memory_utilization
        if share is None and lowered < 1:
            share = 0.9
        length = self._sequence_tokens
        return VllmSettings(
            model=str(self.model_path),
            dtype=self._dtype,
            max_num_seqs=self._max_num_seqs,
            max_model_len=length,
            enforce_eager=self._is_eager,
            gpu_memory_utilization=None if share is None else share * lowered,
            kv_cache_gib=max(1, int(cache_gib(self.model_path, self._max_num_seqs * length) * lowered)),
            extra=self._extra,
            chat_template=None if self._chat_template is None else str(self._chat_template),
        )

    @property
    def _num_threads(self) -> int:
        """Threads that decode, as far as we name them."""
        bound = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "")
        named = len(bound.split(",")) if bound.replace(",", "").isdigit() else len(usable_core_ids())
        return named if self._is_cpu else 1

    def _cpu_facts(self, settings: VllmSettings) -> dict[str, str]:
        """What decides how fast a CPU decodes; paths of this machine by their last part."""
        if not self._is_cpu or self._server_cmd is not None:
            return {}
        found = self._cpu_environment(settings)
        return {
            "cpu_threads_bind": found.get("VLLM_CPU_OMP_THREADS_BIND", "auto"),
            "kv_cache_gib": found["VLLM_CPU_KVCACHE_SPACE"],
            "preload": ",".join(Path(part).name for part in found.get("LD_PRELOAD", "").split(":")) or "none",
        }

    @property
    def _is_cpu(self) -> bool:
        return self._device == "cpu"
