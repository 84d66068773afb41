"""Serving engines in environments of their own: made, found, listed and removed; never imported here.

Their torch builds exclude each other and ours, so each gets a virtual environment under the user's
cache and is spoken to over HTTP. A marker file is written last: an environment without one is
half-made and is made again.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from spectune.backend.recipes import PARSER, Recipe, engine_names, package_names, recipe_for
from spectune.errors import BackendMissing, RunError, UsageError

MARKER = "spectune-engine.json"
# Read by the engine's own interpreter; prints package and version of the first that is there.
_INSPECT = """
import json, sys
from importlib import metadata
for name in sys.argv[1:]:
    try:
        print(json.dumps([name, metadata.version(name)]))
        break
    except metadata.PackageNotFoundError:
        pass
else:
    print("null")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """An interpreter that holds an engine."""

    engine: str
    python: str
    package: str
    version: str
    is_ours: bool
    is_parser: bool = False


Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


def engines_dir() -> Path:
    """Where environments live: SPECTUNE_CACHE, else XDG_CACHE_HOME/spectune, else ~/.cache/spectune."""
    own = os.environ.get("SPECTUNE_CACHE")
    if own:
        return Path(own).expanduser() / "engines"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "spectune" / "engines"


def detect_device() -> str:
    """`cuda` where a driver answers, else `cpu`."""
    if shutil.which("nvidia-smi") is None:
        return "cpu"
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return "cuda" if done.returncode == 0 and "GPU" in done.stdout else "cpu"


def installed(root: Path | None = None) -> list[Environment]:
    """Finished environments under `root` (default: the cache)."""
    found = []
    for marker in sorted((root or engines_dir()).glob(f"*/{MARKER}")):
        try:
            found.append(Environment(**json.loads(marker.read_text(encoding="utf-8"))))
        except (ValueError, TypeError):
            continue  # half-written: made again by the next install
    return found


def find_environment(engine: str, engine_python: str | None = None, root: Path | None = None) -> Environment:
    """The interpreter to serve `engine` with: the given one, the installed one, or the one we run in.

    Raises UsageError for a given interpreter without the engine, BackendMissing where there is none.
    """
    packages = package_names(engine)
    if engine_python is not None:
        return inspect_python(engine, engine_python, packages)
    own = [
        environment
        for environment in installed(root)
        if environment.engine == engine and not environment.is_parser
    ]
    for environment in own:
        if Path(environment.python).exists():
            return environment
    try:
        return inspect_python(engine, sys.executable, packages)
    except UsageError as error:
        raise BackendMissing(
            f"engine {engine} is not installed",
            hint=f"spectune engines install {engine}, or --engine-python PATH of an environment that has it",
        ) from error


def find_parser(engine: str, root: Path | None = None) -> Environment:
    """The environment that has the engine's own parser: one made for it, or one that serves.

    Raises BackendMissing where there is neither.
    """
    own = [environment for environment in installed(root) if environment.engine == engine]
    for environment in sorted(own, key=lambda environment: not environment.is_parser):
        if Path(environment.python).exists():
            return environment
    raise BackendMissing(
        f"the argument parser of {engine} is not installed",
        hint=f"spectune engines install {engine} --{PARSER}-only",
    )


def inspect_python(engine: str, python: str, packages: Sequence[str]) -> Environment:
    """What an interpreter holds; UsageError if it does not run or lacks the engine."""
    path = str(Path(python).expanduser().absolute())  # the link itself: resolving it leaves the venv
    try:
        done = subprocess.run(
            [path, "-I", "-c", _INSPECT, *packages], capture_output=True, text=True, timeout=60, check=True
        )
        found = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise UsageError(f"--engine-python {python} does not run: {error}") from error
    if found is None:
        raise UsageError(
            f"--engine-python {python} has no {' or '.join(packages)}",
            hint=f"spectune engines install {engine}",
        )
    return Environment(engine=engine, python=path, package=found[0], version=found[1], is_ours=False)


def holds_module(python: str, module: str) -> bool:
    """Whether an interpreter finds a module, which is not imported."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    done = subprocess.run([python, "-I", "-c", code, module], capture_output=True, timeout=60, check=False)
    return done.returncode == 0


def install(
    engine: str,
    *,
    device: str | None = None,
    python: str | None = None,
    root: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
    run: Run | None = None,
) -> Environment:
    """Make the environment of `engine`, or return the finished one.

    Args:
        python: base interpreter of the new environment (default: the one we run in).
        run: runs a command and returns its CompletedProcess; for tests.

    Raises RunError with the end of pip's log if a step fails.
    """
    recipe = recipe_for(engine, device or detect_device())
    base = root or engines_dir()
    folder = base / recipe.folder
    run = run or _run_logged(_log(base, recipe))
    with _locked(base / f"{recipe.folder}.lock"):
        for environment in installed(base):
            same = environment.version.split("+")[0] == recipe.requirement.split("==")[1]
            same = same and environment.is_parser == (recipe.device == PARSER)
            if environment.engine == engine and same and Path(environment.python).exists():
                say(f"{environment.package} {environment.version} is installed in {folder}")
                return environment
        if folder.exists():
            shutil.rmtree(folder)
        interpreter = python or sys.executable
        say(f"making {folder} with {interpreter}")
        _step(run, [interpreter, "-m", "venv", str(folder)], "the environment cannot be made", base)
        venv_python = str(folder / "bin" / "python")
        _fill(recipe, venv_python, run, say, base)
        environment = inspect_python(engine, venv_python, recipe.packages)
        environment = replace(environment, is_ours=True, is_parser=recipe.device == PARSER)
        marker = folder / f".{MARKER}.tmp"
        marker.write_text(json.dumps(asdict(environment), indent=1) + "\n", encoding="utf-8")
        marker.replace(folder / MARKER)
    say(f"{environment.package} {environment.version} is ready")
    return environment


def remove(engine: str, root: Path | None = None, *, parser_only: bool = False) -> Path:
    """Delete the environment that spectune made; UsageError if there is none."""
    base = root or engines_dir()
    folder = base / (f"{engine}-{PARSER}" if parser_only else engine)
    if engine not in engine_names() or not folder.is_dir():
        raise UsageError(f"engine {engine} is not installed under {base}", hint="spectune engines list")
    with _locked(base / f"{folder.name}.lock"):
        shutil.rmtree(folder)
    return folder


def _fill(recipe: Recipe, python: str, run: Run, say: Callable[[str], None], base: Path) -> None:
    pip = [python, "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    if recipe.beside:
        pip.append("--no-compile")  # a fraction of it is ever imported
    for requirement in recipe.before:
        say(f"installing {requirement}")
        if run([*pip, "--no-deps", requirement]).returncode == 0:
            continue
        if recipe.index_url is None:
            raise RunError(f"{requirement} cannot be installed", hint=f"see {_log(base, recipe)}")
        say(f"installing {requirement} from {recipe.index_url}")
        arguments = [*pip, "--no-deps", "--index-url", recipe.index_url, requirement]
        _step(run, arguments, f"{requirement} cannot be installed", base)
    say(f"installing {recipe.requirement}: some minutes")
    if recipe.beside:
        _step(run, [*pip, *recipe.beside], f"what {recipe.engine} imports cannot be installed", base)
    own = [*pip, "--no-deps", recipe.requirement] if recipe.beside else [*pip, recipe.requirement]
    _step(run, own, f"{recipe.requirement} cannot be installed", base)
    if recipe.unwanted:
        arguments = [python, "-m", "pip", "uninstall", "--yes", *recipe.unwanted]
        _step(run, arguments, f"{', '.join(recipe.unwanted)} cannot be removed", base)
    say(f"checking that {recipe.engine} loads")
    _step(
        run, [python, "-I", "-c", recipe.check], f"{recipe.requirement} is installed but does not load", base
    )


def _log(base: Path, recipe: Recipe) -> Path:
    return base / f"{recipe.folder}.log"


def _step(run: Run, command: Sequence[str], failure: str, base: Path) -> None:
    done = run(command)
    if done.returncode == 0:
        return
    lines = [line for line in (done.stdout or "").splitlines() if line.strip() and "WARNING" not in line]
    told = "; ".join(line.strip() for line in lines[-3:])
    hint = f"the whole log is in {base}"
    if "libnuma" in (done.stdout or ""):
        hint = "install the system library libnuma1 (numactl)"
    raise RunError(f"{failure}: {told or f'exit code {done.returncode}'}", hint=hint)


def _run_logged(log: Path) -> Run:
    """Runs a command, its output appended to `log`."""

    def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            list(command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            check=False,
        )
        with log.open("a", encoding="utf-8") as stream:
            stream.write(f"$ {' '.join(command)}\n{done.stdout}\n")
        return done

    return run


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Two installs at once would fill one folder twice: the second waits and finds it done."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        stream = file.open("w")
    except OSError as error:
        raise UsageError(f"{file.parent} cannot be written: {error.strerror}") from error
    with stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
