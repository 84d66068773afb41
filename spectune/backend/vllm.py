"""vLLM behind the one door: a server for each arm, or servers that somebody else runs.

One server at a time: two would bind their threads to the same cores, and an idle one still wakes up.
So arms are starts in the order off, c1 … cn, off, and the next round of starts goes the other way.
"""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from spectune.backend.ceiling import known_ceiling
from spectune.backend.environments import Environment, detect_device, engines_dir, find_environment
from spectune.backend.heads import folder_digest, head_folder
from spectune.backend.prompts import encode_prompt, load_tokenizer
from spectune.backend.server import HOST, READY_TIMEOUT_S, Server, ServerCommand, free_port, log_tail, serve
from spectune.backend.server_api import engine_version
from spectune.backend.server_session import Address, ServerSession
from spectune.backend.vllm_command import (
    METHODS,
    VllmSettings,
    check_extra,
    check_version,
    common_environment,
    cpu_environment,
    launcher,
    program,
    server_arguments,
)
from spectune.backend.vllm_log import cache_tokens, log_name
from spectune.backend.vllm_model import (
    cache_gib,
    check_head,
    kv_bytes_per_token,
    model_limit,
    quantization_scheme,
    weight_bytes,
)
from spectune.errors import OutOfMemory, UsageError
from spectune.provenance import usable_core_ids
from spectune.records import (
    Capabilities,
    Fingerprint,
    Launch,
    Method,
    Point,
    Prompt,
    Session,
    SpecConfig,
)

if TYPE_CHECKING:
    from spectune.engine.tokenizer import Tokenizer

MAX_OOM_RETRIES = 2
OOM_FACTOR = 0.9


def _silent(text: str) -> None:
    del text


class VllmBackend:
    """Servers of vLLM, one for each arm and start.

    Args:
        model: a Hugging Face directory or hub id; the default target if None.
        draft_model: folder of an EAGLE-3 head, name of a shipped one, or the small model of method
            draft_model.
        engine_python: interpreter that has vllm; the installed environment if None.
        server_cmd: the user's launcher instead, with the words {args} and {port}.
        max_num_seqs: most sequences that any arm decodes together, equal in all arms.
        max_model_len: most tokens of a sequence, prompt and output.
        is_eager: no compilation and no graphs; on the CPU (a start takes a third of the time) and not on
            others if None.
        log_dir: where the servers' logs go.
        trace_s: arrivals of a recorded trace, seconds, for cells that replay it.
        chat_template: file of a chat template that replaces the target's own, here and in the server.
        port: fixed port; a free one for every server if None.
    """

    def __init__(
        self,
        *,
        model: str | None = None,
        draft_model: str | None = None,
        device: str | None = None,
        dtype: str = "auto",
        engine_python: str | None = None,
        server_cmd: str | None = None,
        extra_server_args: Sequence[str] = (),
        max_num_seqs: int = 16,
        max_model_len: int = 2048,
        is_eager: bool | None = None,
        gpu_memory_utilization: float | None = None,
        ready_timeout_s: float = READY_TIMEOUT_S,
        port: int | None = None,
        log_dir: Path | None = None,
        trace_s: Sequence[float] = (),
        chat_template: Path | None = None,
        progress: Callable[[str], None] = _silent,
    ) -> None:
        check_extra(extra_server_args)
        self._model, self._draft_model = model, draft_model
        self._device = device or detect_device()
        self._dtype = "bfloat16" if dtype == "auto" else dtype
        self._engine_python, self._server_cmd = engine_python, server_cmd
        self._extra = tuple(extra_server_args)
        self._max_num_seqs, self._max_model_len = max_num_seqs, max_model_len
        self._is_eager = self._device == "cpu" if is_eager is None else is_eager
        self._gpu_memory_utilization = gpu_memory_utilization
        self._ready_timeout_s, self._port = ready_timeout_s, port
        self._log_dir = log_dir or engines_dir() / "logs"
        self._trace_s, self._chat_template = tuple(trace_s), chat_template
        self._say = progress
        self._is_simulated = False
        self._num_oom: dict[SpecConfig, int] = {}
        if server_cmd is None:
            check_version(self.environment.version)

    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="vllm",
            methods=tuple(method.value for method in METHODS),
            has_trees=False,
            has_rounds=False,
            has_boots=True,
            max_batch_size=self._max_num_seqs,
        )

    def plan(self, points: Sequence[Point]) -> list[Launch]:
        """One start for each arm and repeat: plain decoding first, every other round backwards."""
        launches = []
        for repeat in sorted({point.repeat for point in points}):
            own = [point for point in points if point.repeat == repeat]
            configs = list(dict.fromkeys(point.config for point in own))
            candidates = [config for config in configs if not config.is_off]
            off = [config for config in configs if config.is_off]
            for config in [*off, *(candidates if repeat % 2 == 0 else reversed(candidates))]:
                launches.append(Launch(points=tuple(point for point in own if point.config == config)))
        return launches

    def command(self, launch: Launch, *, port: int, served_model: str) -> ServerCommand:
        """What `launch` starts."""
        config = launch.points[0].config
        settings = self.settings(config)
        draft = str(head_folder(self._draft_model)) if self._draft_model is not None else None
        arguments = server_arguments(
            settings, config, draft_path=draft, served_model=served_model, host=HOST, port=port
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

    def open(self, launch: Launch) -> AbstractContextManager[Session]:
        return self._open(launch)

    @contextmanager
    def _open(self, launch: Launch) -> Iterator[Session]:
        config = launch.points[0].config
        if config.method == Method.EAGLE3 and self._draft_model is not None:
            check_head(head_folder(self._draft_model))
        with ExitStack() as stack:
            server = self._start(stack, launch)
            self._is_simulated = bool(engine_version(server.url).get("is_simulated", False))
            yield ServerSession(
                Address(
                    url=server.url,
                    served_model=server.command.served_model,
                    kv_capacity_tokens=cache_tokens(log_tail(server.log)),
                    notes=self._oom_notes(config),
                ),
                is_plain=config.is_off,
                check_alive=functools.partial(self._check_alive, server, config),
                ceiling=known_ceiling,
                trace_s=self._trace_s,
            )

    def _start(self, stack: ExitStack, launch: Launch) -> Server:
        """A ready server; one that has no memory to start is started again with a smaller share."""
        config = launch.points[0].config
        log = self._log_dir / f"{log_name(launch.points[0])}.log"
        while True:
            self._say(f"starting vllm for {config.label}")
            command = self.command(
                launch, port=self._port or free_port(), served_model=f"spectune-{secrets.token_hex(4)}"
            )
            try:
                return stack.enter_context(
                    serve(command, log=log, ready_timeout_s=self._ready_timeout_s, say=self._say)
                )
            except OutOfMemory as error:
                self._num_oom[config] = self._num_oom.get(config, 0) + 1
                if self._num_oom[config] > MAX_OOM_RETRIES:
                    raise
                self._say(f"{error.message}; once more with a smaller share of memory")

    def _check_alive(self, server: Server, config: SpecConfig) -> None:
        """Raise what ended the server; a death by memory lowers the share of its next start."""
        if server.is_healthy():
            return
        error = server.diagnosis().error("the server died under load")
        if isinstance(error, OutOfMemory):
            self._num_oom[config] = self._num_oom.get(config, 0) + 1
        raise error

    def _oom_notes(self, config: SpecConfig) -> tuple[str, ...]:
        count = self._num_oom.get(config, 0)
        return (f"memory share lowered {count} times after running out of memory",) if count else ()

    def fingerprint(self) -> Fingerprint:
        settings = self.settings(SpecConfig.off())
        return Fingerprint(
            backend="vllm",
            engine_version=self._engine_version,
            target=self._target_name,
            draft=None if self._draft_model is None else Path(self._draft_model).name,
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
                "generation_config": "vllm",
                "draft_sampling": "greedy",
                "target_quantization": quantization_scheme(self.model_path),
                **self._draft_facts,
                "extra_server_args": " ".join(settings.extra),
                "chat_template": self.template_digest or "none",
            },
            is_simulated=self._is_simulated,
            weight_bytes=weight_bytes(self.model_path),
            kv_bytes_per_token=kv_bytes_per_token(self.model_path),
        )

    def encode(self, prompt: Prompt, context_text: str, context_tokens: int) -> tuple[int, ...]:
        """Ids under the target's own chat template; a prompt that leaves no room is refused."""
        ids = encode_prompt(self.tokenizer, prompt, context_text, context_tokens)
        if len(ids) >= self.settings(SpecConfig.off()).max_model_len:
            raise UsageError(
                f"prompt {prompt.prompt_id} has {len(ids)} tokens, --max-model-len is {self._max_model_len}",
                hint="a larger --max-model-len",
            )
        return ids

    def settings(self, config: SpecConfig) -> VllmSettings:
        """The engine settings of a start; equal in all arms unless one ran out of memory."""
        lowered = OOM_FACTOR ** self._num_oom.get(config, 0)
        share = self._gpu_memory_utilization
        if share is None and lowered < 1:
            share = 0.9
        limit = model_limit(self.model_path)
        length = self._max_model_len if limit is None else min(self._max_model_len, limit)
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

    @functools.cached_property
    def environment(self) -> Environment:
        """The interpreter that serves."""
        return find_environment("vllm", self._engine_python)

    @functools.cached_property
    def model_path(self) -> Path:
        from spectune.engine.resolve import resolve_model

        return resolve_model(self._model, progress=self._say)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.model_path, self._chat_template)

    @property
    def template_digest(self) -> str | None:
        """Digest of the target's chat template."""
        return self.tokenizer.template_digest

    @functools.cached_property
    def head_context(self) -> int | None:
        """Longest context that the draft was made for; None where its files do not say."""
        return None if self._draft_model is None else model_limit(head_folder(self._draft_model))

    @functools.cached_property
    def _draft_facts(self) -> dict[str, str]:
        """What of the draft must be equal, and what explains its acceptance."""
        if self._draft_model is None:
            return {}
        folder = head_folder(self._draft_model)
        return {"draft_digest": folder_digest(folder), "draft_quantization": quantization_scheme(folder)}

    @property
    def _engine_version(self) -> str:
        if self._server_cmd is not None:
            return f"vllm of {self._server_cmd.split()[0]}"
        return f"{self.environment.package} {self.environment.version}"

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

    @property
    def _target_name(self) -> str:
        """Hub ids whole, paths by their last part: a folder of this machine identifies nothing elsewhere."""
        if self._model is None:
            return self.model_path.name
        return Path(self._model).name if Path(self._model).expanduser().exists() else self._model
