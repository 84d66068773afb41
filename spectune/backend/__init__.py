"""ONE DOOR to every engine: a registry of lazy creators, so that `--help` loads no engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spectune.errors import BackendMissing, UsageError
from spectune.records import Backend


def _reference(**options: Any) -> Backend:
    try:
        from spectune.backend.reference import ReferenceBackend
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] == "spectune":
            raise
        raise BackendMissing(
            f"backend reference needs the package {error.name}",
            hint="pip install 'spectune[engine]'",
        ) from error
    backend: Backend = ReferenceBackend(**options)
    return backend


def _simulated(**options: Any) -> Backend:
    from spectune.backend.simulated import SimulatedBackend

    return SimulatedBackend(**options)


def _vllm(**options: Any) -> Backend:
    from spectune.backend.vllm import VllmBackend

    return VllmBackend(**options)


def _sglang(**options: Any) -> Backend:
    from spectune.backend.sglang import SglangBackend

    return SglangBackend(**options)


def _attached(**options: Any) -> Backend:
    from spectune.backend.attached import AttachedBackend

    return AttachedBackend(**options)


_CREATORS: dict[str, Callable[..., Backend]] = {
    "reference": _reference,
    "simulated": _simulated,
    "vllm": _vllm,
    "sglang": _sglang,
    "attached": _attached,
}


def backend_names() -> tuple[str, ...]:
    """Names that `create_backend` knows."""
    return tuple(_CREATORS)


def create_backend(name: str, **options: Any) -> Backend:
    """The backend `name` with its own options; unknown names and unknown options are usage errors."""
    creator = _CREATORS.get(name)
    if creator is None:
        raise UsageError(f"--backend {name} is not known", hint=f"one of: {', '.join(backend_names())}")
    try:
        return creator(**options)
    except TypeError as error:
        if ".__init__() got an unexpected keyword argument" in str(error):
            raise UsageError(f"--backend {name}: {error}") from error
        raise
