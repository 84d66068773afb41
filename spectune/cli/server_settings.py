"""The settings of serving engines: which one, how it is started, or where it runs already."""

from __future__ import annotations

from dataclasses import dataclass

from spectune.cli.options import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Everything that only a serving engine can be told."""

    engine_python: str | None = setting(
        None,
        "--engine-python",
        section="server",
        help="Interpreter of an environment that has the engine; the one of `spectune engines install` if "
        "not given.",
    )
    server_cmd: str | None = setting(
        None,
        "--server-cmd",
        section="server",
        help="Your own launcher, for example 'docker run --net host IMAGE {args}'; {port} is the port.",
    )
    extra_server_args: str | None = setting(
        None,
        "--extra-server-args",
        section="server",
        help="Further arguments of the engine, the same for every arm, as one string.",
    )
    base_url: str | None = setting(
        None,
        "--base-url",
        section="server",
        help="Measure a server that is running already; nothing is started or stopped.",
    )
    baseline_url: str | None = setting(
        None,
        "--baseline-url",
        section="server",
        help="With --base-url: the same model served without speculation, measured in turn with it.",
    )
    max_num_seqs: int | None = setting(
        None,
        "--max-num-seqs",
        section="server",
        kind=int,
        minimum=1,
        help="Most sequences the engine decodes together, equal in all arms (16, or the largest batch size).",
    )
    max_model_len: int | None = setting(
        None,
        "--max-model-len",
        section="server",
        kind=int,
        minimum=16,
        help="Most tokens of a sequence, equal in all arms (2048 beyond the context).",
    )
    enforce_eager: bool | None = setting(
        None,
        "--enforce-eager",
        section="server",
        kind=bool,
        help="No compilation, no graphs (the default on the CPU: a start takes a third of the time).",
    )
    gpu_memory_utilization: float | None = setting(
        None,
        "--gpu-memory-utilization",
        section="server",
        kind=float,
        minimum=0.01,
        maximum=1,
        help="Share of the device's memory that the engine takes.",
    )
    server_ready_timeout: float = setting(
        900.0,
        "--server-ready-timeout",
        section="server",
        minimum=1,
        help="Seconds until a starting server has to give its first token.",
    )
    port: int | None = setting(
        None,
        "--port",
        section="server",
        kind=int,
        minimum=1,
        maximum=65535,
        help="Fixed port of the servers.",
    )
    production: bool = setting(
        False,
        "--production",
        section="server",
        help="Also start each method's longest chain as production runs it (prefix cache on and warm, prefill "
        "in chunks), and say what that changes.",
    )
    standby: bool = setting(
        True,
        "--standby",
        section="server",
        help="Also measure what an engine with a draft model costs while it drafts nothing.",
    )
