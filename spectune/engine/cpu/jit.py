"""One decorator for compiled loops: no GIL, numbers as the hardware adds them, kept on disk.

The folder of compiled code is named after the sources and numba's version, so an upgrade never runs
the loops of an older one.

A process only runs what it loaded from there. Code that was compiled in the same process may call other
copies of the small loops, which add in another order: the last bits of the first run would not be those of
all later ones, and its texts and acceptance neither. So another process compiles what is missing.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numba

from spectune.engine.default_target import default_cache_dir

# No NaN or infinity flags: a broken weight must still show as NaN.
_FASTMATH = {"reassoc", "contract", "nsz", "arcp"}


@functools.cache
def _compiled_dir() -> Path:
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return default_cache_dir() / "kernels" / digest.hexdigest()[:12]


def kernel(function: Callable[..., Any]) -> Any:
    """Compile at first call with its argument types, or load what an earlier process compiled."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(_compiled_dir())  # read once, while the decorator runs
    try:
        made = numba.njit(nogil=True, cache=True, fastmath=_FASTMATH, error_model="numpy")(function)
    finally:
        numba.config.CACHE_DIR = before
    if _COMPILES not in os.environ:
        _load_only(made)
    return made


_COMPILES = "SPECTUNE_COMPILES"  # set in the process that compiles for others


def _load_only(dispatcher: Any) -> None:
    """Have another process compile what is not on disk when it is looked for there.

    Where that does not work, numba finds nothing and compiles here after all.
    """
    function, load = dispatcher.py_func, dispatcher._cache.load_overload

    def load_or_ask(signature: Any, context: Any) -> Any:
        found = load(signature, context)
        if found is None:
            with contextlib.suppress(OSError):
                _compiler.ask(function.__module__, function.__qualname__, tuple(signature))
            found = load(signature, context)
        return found

    dispatcher._cache.load_overload = load_or_ask


class _Compiler:
    """The process that compiles for this one; it starts when it is first asked and ends with this one."""

    def __init__(self) -> None:
        self.say: Callable[[str], None] = lambda text: None
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # a fork has the pipes of its parent, and must not use them

    def ask(self, module: str, name: str, signature: tuple[Any, ...]) -> None:
        """Compile a kernel for argument types; returns when it is on disk, or cannot be.

        Raises OSError where no process can be started.
        """
        request = pickle.dumps((module, name, signature))
        with self._lock:
            if self._process is None or self._owner != os.getpid():
                self._start()
            assert self._process is not None
            requests, answers = self._process.stdin, self._process.stdout
            assert requests is not None
            assert answers is not None
            try:
                requests.write(request)
                requests.flush()
                is_answered = bool(answers.readline())
            except OSError:
                is_answered = False
            if not is_answered:
                self._end()

    def close(self) -> None:
        """End the process, if this one started it."""
        with self._lock:
            if self._owner == os.getpid():
                self._end()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from {__name__} import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, _COMPILES: "1"},
            start_new_session=True,  # an interrupt is this process's to handle
        )
        if not self._owner:
            self.say("compiling the passes of the engine for this CPU, once for all runs: some minutes")
            atexit.register(self.close)
        self._owner = os.getpid()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()  # what it has written is whole: files are renamed into place
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        process.wait()


_compiler = _Compiler()


def tell_compiling(say: Callable[[str], None]) -> None:
    """Call `say` with a sentence when the first kernel turns out not to be on disk."""
    _compiler.say = say


def serve(requests: BinaryIO | None = None) -> None:
    """Compile what is asked for on standard input until it ends; a line for each, when it is done."""
    requests = requests or sys.stdin.buffer
    while True:
        try:
            module, name, signature = pickle.load(requests)
        except EOFError:
            return
        answer = "done"
        try:
            getattr(importlib.import_module(module), name).compile(signature)
        except Exception as error:  # the process that asked compiles it itself and meets the same error
            answer = type(error).__name__
        print(answer, flush=True)
