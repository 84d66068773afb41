"""Run by the interpreter of an SGLang environment: asks SGLang's own code and prints what it says.

    python sglang_probe.py < {"arguments": [[...], ...], "policies": [...]}

Reads one JSON object on stdin, prints one on the last line of stdout. Imports nothing of spectune: it
lives in another environment. The kernels cannot be had on a machine without a GPU and are the one thing
that is stood in for: calling one raises. The resolution of arguments and the adaptive policy call none.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

FIELDS = (
    "model_path", "served_model_name", "device", "dtype", "attention_backend", "page_size", "context_length",
    "max_running_requests", "disable_radix_cache", "chunked_prefill_size", "enable_metrics", "random_seed",
    "speculative_algorithm", "speculative_draft_model_path", "speculative_num_steps",
    "speculative_eagle_topk", "speculative_num_draft_tokens", "speculative_adaptive",
    "speculative_adaptive_config", "speculative_ngram_max_bfs_breadth", "disable_overlap_schedule",
    "disable_cuda_graph", "sampling_defaults", "mem_fraction_static", "tp_size",
)  # fmt: skip
"""Resolved settings that are told back."""


def main() -> None:
    """Answer what stdin asks."""
    asked: dict[str, Any] = json.load(sys.stdin)
    load()
    told = {
        "version": importlib.import_module("sglang.version").__version__,
        "arguments": [resolve(words) for words in asked.get("arguments", ())],
        "policies": [run_policy(policy) for policy in asked.get("policies", ())],
    }
    print(f"\n{json.dumps(told)}")


def load() -> None:
    """Import the package with everything that resolving arguments needs."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    _stand_in_for_kernels()
    importlib.import_module("sglang.srt.arg_groups.pipeline")
    importlib.import_module("sglang.srt.server_args")


def resolve(words: list[str]) -> dict[str, Any]:
    """What SGLang makes of a command line: `resolved` fields and captured batch sizes, or `error`."""
    server_args = importlib.import_module("sglang.srt.server_args")
    try:
        found = server_args.prepare_server_args(list(words))
        found.resolve_once()
        values = found.resolved_dict()
    except SystemExit as error:
        return {"error": f"exit code {error.code}: the parser refuses the arguments"}
    except Exception as error:  # whatever SGLang raises is its answer
        return {"error": f"{type(error).__name__}: {error}"}
    graphs = values.get("cuda_graph_config") or {}
    return {
        "resolved": {name: values[name] for name in FIELDS if name in values},
        "captured": (graphs.get("decode") or {}).get("bs"),
    }


def run_policy(asked: dict[str, Any]) -> dict[str, Any]:
    """Steps that SGLang's adaptive policy runs, before each event and after all of them.

    `asked`: config (the adaptive JSON), initial_steps, captured (batch sizes or null), events (pairs of
    a batch size and the drafts that each of its requests had accepted; an empty list is a look only).
    """
    module = importlib.import_module("sglang.srt.speculative.adaptive_spec_params")
    with _file(asked["config"]) as path:
        try:
            policy = module.AdaptiveSpeculativeParams(asked["initial_steps"], path)
        except Exception as error:  # whatever SGLang raises is its answer
            return {"error": f"{type(error).__name__}: {error}"}
        policy.set_cuda_graph_bs(asked.get("captured"))
        steps, switches = [], []
        for batch_size, accepted in asked["events"]:
            steps.append(policy.get_steps_for_batch(batch_size))
            switches.append(policy.on_verify_complete(accepted, batch_size))
    return {"steps": steps, "switches": switches, "candidate_steps": policy.candidate_steps}


@contextmanager
def _file(document: Any) -> Iterator[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as stream:
        json.dump(document, stream)
    try:
        yield stream.name
    finally:
        os.unlink(stream.name)


def _stand_in_for_kernels() -> None:
    """`sgl_kernel` where it is not installed, and the operators that torchvision's own build declares."""
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):
        _declare_operators()
    if importlib.util.find_spec("sgl_kernel") is None:
        kernels = _Kernels("sgl_kernel")
        kernels.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None, is_package=True)
        sys.modules["sgl_kernel"] = kernels


def _declare_operators() -> None:
    """A torchvision whose build does not fit this torch loads once its operators are declared."""
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    torch = importlib.import_module("torch")
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    sys.modules["_spectune_torchvision_operators"] = types.ModuleType("_spectune_torchvision_operators")
    sys.modules["_spectune_torchvision_operators"].library = library  # type: ignore[attr-defined]  # kept alive


class _Kernels(types.ModuleType):
    """A package of functions that cannot run here."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []  # what makes a module a package

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(f"sgl_kernel.{name} cannot run on this machine: the kernels are not installed")

        return kernel


if __name__ == "__main__":
    main()
