"""Servers that somebody else runs, behind the one door: asked, never started, changed or stopped.

One address is one arm: what it was started with is found out, not chosen. With a second address that
serves the same model without speculation the two are measured in turn and compared.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from spectune.backend import server_api
from spectune.backend.answer import shorten
from spectune.backend.ceiling import known_ceiling
from spectune.backend.client import LOOPBACK, ClientOptions, Dialect, server_root
from spectune.backend.prometheus import ACCEPTED_PER_POSITION, DRAFTS
from spectune.backend.prompts import CONTEXT_FRAME, chat_messages, encode_prompt, load_tokenizer
from spectune.backend.server_session import SILENCE_S, Address, ServerSession
from spectune.backend.server_words import SGLANG_WORDS, VLLM_WORDS
from spectune.backend.sglang_info import config_of, sglang_info
from spectune.errors import EngineFailure, SpectuneError, UsageError
from spectune.records import (
    BlockResult,
    Capabilities,
    ChatAnswer,
    Fingerprint,
    Gap,
    Launch,
    Point,
    Prompt,
    Request,
    Sampling,
    Session,
    SpecConfig,
)

if TYPE_CHECKING:
    from spectune.engine.tokenizer import Tokenizer

MOCK = "mock"
SERVED = "served"
"""Method of a server that speculates and does not say how."""

_METHOD = re.compile(r"SpeculativeConfig\(method='?(\w+)|\"method\": ?\"(\w+)\"")


def _silent(text: str) -> None:
    del text


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What a running server tells about itself. `config` is what it speculates with."""

    url: str
    served_model: str
    version: str
    config: SpecConfig
    max_model_len: int | None
    is_simulated: bool = False
    is_sglang: bool = False

    @property
    def dialect(self) -> Dialect:
        return Dialect.SGLANG if self.is_sglang else Dialect.VLLM


class AttachedBackend:
    """Measures at addresses.

    Args:
        base_url: the server to measure.
        baseline_url: the same model without speculation.
        model: name to ask for, if several are served, or a directory whose tokenizer is used.
        trace_s: arrivals of a recorded trace, seconds, for cells that replay it.
        chat_template: file of a chat template, for a directory's tokenizer.
    """

    def __init__(
        self,
        *,
        base_url: str,
        baseline_url: str | None = None,
        model: str | None = None,
        trace_s: Sequence[float] = (),
        chat_template: Path | None = None,
        progress: Callable[[str], None] = _silent,
    ) -> None:
        self._tokenizer_dir = Path(model) if model is not None and Path(model).is_dir() else None
        self._asked = model if self._tokenizer_dir is None else None
        self._base_url, self._baseline_url = base_url, baseline_url
        self._trace_s, self._chat_template = tuple(trace_s), chat_template
        if chat_template is not None and self._tokenizer_dir is None:
            raise UsageError(
                f"--chat-template {chat_template}: a running server applies its own template",
                hint="give --model the directory of the model: prompts are encoded here then",
            )
        self._say = progress

    @functools.cached_property
    def candidate(self) -> ServerFacts:
        """The server to measure."""
        return read_facts(self._base_url, self._asked)

    @functools.cached_property
    def baseline(self) -> ServerFacts | None:
        """The server without speculation: the second address, or the first if it does not speculate."""
        if self._baseline_url is None:
            return self.candidate if self.candidate.config.is_off else None
        if self.candidate.config.is_off:
            raise UsageError(
                f"--base-url {self._base_url} does not speculate, so --baseline-url has nothing to be compared with",
                hint="give the server that speculates as --base-url",
            )
        facts = read_facts(self._baseline_url, self._asked)
        if not facts.config.is_off:
            raise UsageError(
                f"--baseline-url {self._baseline_url} speculates ({facts.config.label})",
                hint="it has to serve the same model without speculation",
            )
        return facts

    def configs(self) -> tuple[SpecConfig, ...]:
        """The arms: plain decoding and what the server was started with."""
        return tuple(dict.fromkeys((SpecConfig.off(), self.candidate.config)))

    def capabilities(self) -> Capabilities:
        methods = dict.fromkeys(("off", self.candidate.config.method))
        return Capabilities(
            name="attached",
            methods=tuple(methods),
            has_trees=self.candidate.config.is_tree,
            has_rounds=False,
            has_boots=True,
        )

    def plan(self, points: Sequence[Point]) -> list[Launch]:
        """Nothing is started, so all points are one."""
        return [Launch(points=tuple(points), attach_url=self._base_url)] if points else []

    def open(self, launch: Launch) -> AbstractContextManager[Session]:
        return self._open()

    @contextmanager
    def _open(self) -> Iterator[Session]:
        sessions = {}
        for facts in (self.baseline, self.candidate):
            if facts is None:
                continue
            token = server_api.probe(facts.url, facts.served_model, timeout_s=120.0, dialect=facts.dialect)
            if not token.is_success:
                raise EngineFailure(f"{facts.url} gives no token: {token.error}")
            sessions[facts.config] = ServerSession(
                Address(url=facts.url, served_model=facts.served_model),
                is_plain=facts.config.is_off,
                check_alive=functools.partial(_check_alive, facts.url),
                resets_cache=True,
                ceiling=known_ceiling,
                trace_s=self._trace_s,
                options=ClientOptions(dialect=facts.dialect, silence_timeout_s=SILENCE_S),
                words=SGLANG_WORDS if facts.is_sglang else VLLM_WORDS,
            )
        yield _Attached(sessions)

    def fingerprint(self) -> Fingerprint:
        facts = self.candidate
        return Fingerprint(
            backend="attached",
            engine_version=facts.version,
            target=facts.served_model,
            draft=None,
            device="unknown: the server does not tell",
            dtype="unknown: the server does not tell",
            threads=1,
            is_simulated=facts.is_simulated,
            settings={
                "speculation": facts.config.label,
                "draft_sampling": "unknown: the server does not tell",
                "max_model_len": facts.max_model_len or "not told",
                "baseline": "none" if self.baseline is None else self.baseline.version,
            },
        )

    def encode(self, prompt: Prompt, context_text: str, context_tokens: int) -> tuple[int, ...]:
        """Ids under the server's own chat template, or under that of a local directory."""
        if self._tokenizer is not None:
            return encode_prompt(self._tokenizer, prompt, context_text, context_tokens)
        text = prompt.turns[0]
        if context_tokens:
            ids = self._tokenize({"prompt": context_text})[:context_tokens]
            context = self._ask("/detokenize", {"tokens": ids})["prompt"]
            text = CONTEXT_FRAME.format(context=context, prompt=text)
        return tuple(self._tokenize({"messages": chat_messages(prompt, text)}))

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer | None:
        if self._tokenizer_dir is None:
            return None
        return load_tokenizer(self._tokenizer_dir, self._chat_template)

    def _tokenize(self, what: dict[str, Any]) -> list[int]:
        told = self._ask("/tokenize", what)
        tokens = told.get("tokens")
        if not isinstance(tokens, list):
            raise UsageError(
                f"{self.candidate.url}/tokenize gives no tokens: {shorten(str(told))}",
                hint="give --model the directory of the model: its tokenizer is used then",
            )
        return [int(token) for token in tokens]

    def _ask(self, path: str, what: dict[str, Any]) -> dict[str, Any]:
        facts = self.candidate
        try:
            response = httpx.post(
                facts.url + path,
                json={"model": facts.served_model, **what},
                timeout=60,
                trust_env=httpx.URL(facts.url).host not in LOOPBACK,
            )
            response.raise_for_status()
            return dict(response.json())
        except (httpx.HTTPError, ValueError) as error:
            raise UsageError(
                f"{facts.url}{path} does not tokenize: {error}",
                hint="give --model the directory of the model: its tokenizer is used then",
            ) from error


class _Attached:
    """Sends each point to the server that runs its configuration."""

    def __init__(self, sessions: dict[SpecConfig, ServerSession]) -> None:
        self._sessions = sessions

    def run(self, point: Point, requests: Sequence[Request]) -> BlockResult:
        return self._of(point).run(point, requests)

    def stream(self, point: Point, requests: Sequence[Request], fillers: Sequence[Request]) -> BlockResult:
        return self._of(point).stream(point, requests, fillers)

    def converse(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[ChatAnswer]:
        """The first server answers: both serve the same model, and greedy answers do not depend on drafts."""
        return next(iter(self._sessions.values())).converse(prompts, sampling)

    def gap(self, request: Request, output_ids: Sequence[int], index: int) -> Gap | None:
        """Whichever server: it is the target's own choice."""
        return next(iter(self._sessions.values())).gap(request, output_ids, index)

    def _of(self, point: Point) -> ServerSession:
        session = self._sessions.get(point.config)
        if session is None:
            raise EngineFailure(
                "no server without speculation was given, so there is nothing to compare with",
                hint="--baseline-url of the same model served without speculation",
            )
        return session


def read_facts(base_url: str, model: str | None) -> ServerFacts:
    """Name, version and speculation of a running server; UsageError where it cannot be reached."""
    url = server_root(base_url)
    try:
        name = server_api.check_served_model(url, model)
    except EngineFailure as error:
        raise UsageError(f"--base-url {base_url}: {error.message}", hint="is the server up?") from error
    if (info := sglang_info(url)) is not None:
        is_simulated = bool(info.get("is_simulated", False))
        return ServerFacts(
            url=url,
            served_model=name,
            version=f"{MOCK if is_simulated else 'sglang'} {info.get('version', 'of unknown version')}",
            config=config_of(info),
            max_model_len=_max_model_len(url, name),
            is_simulated=is_simulated,
            is_sglang=True,
        )
    return ServerFacts(
        url=url,
        served_model=name,
        version=_version(url),
        is_simulated=_version(url).startswith(MOCK),
        config=_config(url),
        max_model_len=_max_model_len(url, name),
    )


def _version(url: str) -> str:
    try:
        told = server_api.engine_version(url)
    except SpectuneError:
        return "not told"
    kind = MOCK if told.get("is_simulated") else "vllm"
    return f"{kind} {told.get('version', 'of unknown version')}"


def _config(url: str) -> SpecConfig:
    """Off, or a chain as long as the server counts positions for; the method where it is told."""
    counters = server_api.scrape(url)
    # one engine serves one model, and names it by its first served name, whatever it was asked for
    if counters.total(DRAFTS) is None:
        if not any(found.startswith("vllm:") for found, _ in counters.values):
            raise EngineFailure(
                f"{url}/metrics tells nothing of vllm, so whether it speculates is not known",
                hint="let it keep statistics (vLLM's disable-log-stats off), and give the engine's address, not a gateway's",
            )
        return SpecConfig.off()
    positions = {dict(own).get("position") for own in counters.series(ACCEPTED_PER_POSITION)}
    if not positions:
        raise EngineFailure(f"{url} counts drafts, but no positions: the length of its drafts is unknown")
    return SpecConfig.chain(_method(url) or SERVED, len(positions))


def _method(url: str) -> str | None:
    """From /server_info, which vLLM has in its development mode only."""
    try:
        response = httpx.get(f"{url}/server_info", timeout=10, trust_env=False)
    except httpx.HTTPError:
        return None
    found = _METHOD.search(response.text) if response.status_code == httpx.codes.OK else None
    return None if found is None else found[1] or found[2]


def _max_model_len(url: str, name: str) -> int | None:
    response = httpx.get(f"{url}/v1/models", timeout=10, trust_env=False)
    for row in response.json().get("data", []):
        if row.get("id") == name and isinstance(row.get("max_model_len"), int):
            return int(row["max_model_len"])
    return None


def _check_alive(url: str) -> None:
    if not server_api.is_healthy(url):
        raise EngineFailure(f"the server at {url} does not answer any more")
