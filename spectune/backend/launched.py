"""Servers that we start, one for each arm and start: what is the same whatever the engine.

One server at a time: two would take each other's cores or memory. So arms are starts in the order off,
c1 … cn, off, and the next round of starts goes the other way.
"""

from __future__ import annotations

import abc
import functools
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from spectune.backend.ceiling import known_ceiling
from spectune.backend.environments import Environment, engines_dir, find_environment
from spectune.backend.extra_args import extra_value
from spectune.backend.heads import folder_digest, head_folder
from spectune.backend.prompts import encode_prompt, load_tokenizer
from spectune.backend.server import READY_TIMEOUT_S, Server, ServerCommand, free_port, serve
from spectune.backend.vllm_log import log_name
from spectune.backend.vllm_model import check_head, model_limit, quantization_scheme
from spectune.errors import OutOfMemory, UsageError
from spectune.records import NEAR_TIE, Launch, Method, Point, Prompt, Session, SpecConfig

if TYPE_CHECKING:
    from spectune.engine.tokenizer import Tokenizer

MAX_OOM_RETRIES = 2
OOM_FACTOR = 0.9


def silent(text: str) -> None:
    """Tells nobody."""
    del text


TENSOR_PARALLEL = ("tensor-parallel-size", "tp-size", "tp")


class LaunchedBackend(abc.ABC):
    """Starts servers of one engine; the engine's own module says how, and reads them.

    Args:
        model: a Hugging Face directory or hub id; the default target if None.
        draft_model: folder of an EAGLE-3 head, name of a shipped one, or the small model of method
            draft_model.
        device: the engine's own choice if None.
        dtype: bfloat16 for "auto".
        engine_python: interpreter that has the engine; the installed environment if None.
        server_cmd: the user's launcher instead, with the words {args} and {port}.
        extra_server_args: words for the server that no arm may change.
        max_num_seqs: most sequences that any arm decodes together, equal in all arms and always written:
            an engine's own limit may be another one as soon as it speculates.
        max_model_len: most tokens of a sequence, prompt and output.
        is_eager: no compilation and no graphs; the engine's own choice for the device if None.
        gpu_memory_utilization: share of the device's memory for weights and cache.
        log_dir: where the servers' logs go.
        trace_s: arrivals of a recorded trace, seconds, for cells that replay it.
        chat_template: file of a chat template that replaces the target's own, here and in the server.
        port: fixed port; a free one for every server if None.
    """

    engine: ClassVar[str]

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
        progress: Callable[[str], None] = silent,
    ) -> None:
        self._check_extra(extra_server_args)
        self._model, self._draft_model = model, draft_model
        self._device = device or self._default_device()
        self._dtype = "bfloat16" if dtype == "auto" else dtype
        self._engine_python, self._server_cmd = engine_python, server_cmd
        self._extra = tuple(extra_server_args)
        self._max_num_seqs, self._max_model_len = max_num_seqs, max_model_len
        self._is_eager = self._is_eager_by_default() if is_eager is None else is_eager
        self._gpu_memory_utilization = gpu_memory_utilization
        self._ready_timeout_s, self._port = ready_timeout_s, port
        self._log_dir = log_dir or engines_dir() / "logs"
        self._trace_s, self._chat_template = tuple(trace_s), chat_template
        self._say = progress
        self._is_simulated = False
        self._num_oom: dict[SpecConfig, int] = {}

    @abc.abstractmethod
    def _check_extra(self, words: Sequence[str]) -> None:
        """Refuse words for the server that an arm sets itself, with UsageError."""

    @abc.abstractmethod
    def _default_device(self) -> str:
        """Where the engine runs if nobody says."""

    def _is_eager_by_default(self) -> bool:
        """Whether the engine starts without compilation and graphs on the device if nobody says."""
        return False

    @abc.abstractmethod
    def command(self, launch: Launch, *, port: int, served_model: str) -> ServerCommand:
        """What `launch` starts."""

    @abc.abstractmethod
    def _session(self, server: Server, config: SpecConfig) -> Session:
        """A session on a server that is ready."""

    def _prepare(self, launch: Launch) -> None:
        """Files that the command names, written before it runs."""
        del launch

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

    def open(self, launch: Launch) -> AbstractContextManager[Session]:
        return self._open(launch)

    @contextmanager
    def _open(self, launch: Launch) -> Iterator[Session]:
        config = launch.points[0].config
        if config.method == Method.EAGLE3 and self._draft_model is not None:
            check_head(head_folder(self._draft_model))
        for size in sorted({point.cell.batch_size for point in launch.points}):
            known_ceiling(size)  # measured before a server is up, because idle ones spin; kept
        with ExitStack() as stack:
            yield self._session(self._start(stack, launch), config)

    def _start(self, stack: ExitStack, launch: Launch) -> Server:
        """A ready server; one that has no memory to start is started again with a smaller share."""
        config = launch.points[0].config
        log = self._log_dir / f"{log_name(launch.points[0])}.log"
        while True:
            self._say(f"starting {self.engine} for {config.label}")
            self._prepare(launch)
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
        if not count:
            return ()
        return (
            f"memory share lowered {count} times after running out of memory, to {self._lowered(config):.2f} of "
            "what was asked for",
        )

    @property
    def _near_tie(self) -> float:
        """Gap of two logits that rounding in the servers' number format may turn over."""
        return NEAR_TIE.get(self._dtype, NEAR_TIE["bfloat16"])

    def _lowered(self, config: SpecConfig) -> float:
        """Factor on the share of memory of the next start."""
        return float(OOM_FACTOR ** self._num_oom.get(config, 0))

    def encode(self, prompt: Prompt, context_text: str, context_tokens: int) -> tuple[int, ...]:
        """Ids under the target's own chat template; a prompt that leaves no room is refused."""
        ids = encode_prompt(self.tokenizer, prompt, context_text, context_tokens)
        if len(ids) >= self._sequence_tokens:
            raise UsageError(
                f"prompt {prompt.prompt_id} has {len(ids)} tokens, --max-model-len is {self._max_model_len}",
                hint="a larger --max-model-len",
            )
        return ids

    @property
    def _sequence_tokens(self) -> int:
        """Most tokens of a sequence: what was asked for, or the model's own limit below it."""
        limit = model_limit(self.model_path)
        return self._max_model_len if limit is None else min(self._max_model_len, limit)

    @functools.cached_property
    def environment(self) -> Environment:
        """The interpreter that serves."""
        return find_environment(self.engine, self._engine_python)

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

    @property
    def _draft_path(self) -> str | None:
        return None if self._draft_model is None else str(head_folder(self._draft_model))

    @property
    def _draft_name(self) -> str | None:
        return None if self._draft_model is None else Path(self._draft_model).name

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
            return f"{self.engine} of {self._server_cmd.split()[0]}"
        return f"{self.environment.package} {self.environment.version}"

    @property
    def _tensor_parallel_size(self) -> int:
        """Devices that one copy of the model is spread over: a policy holds for this number alone."""
        told = extra_value(self._extra, *TENSOR_PARALLEL) or "1"
        if not told.isdigit() or int(told) < 1:
            raise UsageError(f"--extra-server-args: {told} is not a number of devices to be spread over")
        return int(told)

    @property
    def _target_name(self) -> str:
        """Hub ids whole, paths by their last part: a folder of this machine identifies nothing elsewhere."""
        if self._model is None:
            return self.model_path.name
        return Path(self._model).name if Path(self._model).expanduser().exists() else self._model
