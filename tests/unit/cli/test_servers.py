"""Settings of serving engines: what the engine's environment cannot run is left out with the reason."""

from __future__ import annotations

import pytest

from spectune.backend import environments
from spectune.backend.environments import Environment
from spectune.cli.servers import without_absent_methods
from spectune.cli.sweep_options import SweepOptions
from spectune.records import SpecConfig

OFF, NGRAM, SUFFIX = SpecConfig.off(), SpecConfig.chain("ngram", 3), SpecConfig.chain("suffix", 8)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """An environment of vLLM; the modules that it holds can be added."""
    held: set[str] = set()
    found = Environment(
        engine="vllm", python="/env/bin/python", package="vllm", version="0.33.0", is_ours=False
    )
    monkeypatch.setattr(environments, "find_environment", lambda *_: found)
    monkeypatch.setattr(environments, "holds_module", lambda _, module: module in held)
    return held


def test_suffix_without_its_package_is_pruned_with_what_to_install(engine: set[str]) -> None:
    """The other arms stay; the reason names interpreter and package."""
    kept, pruned = without_absent_methods(SweepOptions(backend="vllm"), (OFF, NGRAM, SUFFIX))

    assert kept == (OFF, NGRAM)
    assert [label for label, _ in pruned] == ["suffix K=8"]
    assert "/env/bin/python -m pip install arctic-inference" in pruned[0][1]


def test_suffix_with_its_package_is_run(engine: set[str]) -> None:
    """Nothing is left out where the module is found."""
    engine.add("arctic_inference")

    assert without_absent_methods(SweepOptions(backend="vllm"), (OFF, SUFFIX)) == ((OFF, SUFFIX), ())


@pytest.mark.parametrize(
    "options",
    [SweepOptions(backend="vllm", server_cmd="x {args}"), SweepOptions(backend="simulated")],
    ids=["launcher", "no server"],
)
def test_environments_that_cannot_be_looked_into_are_believed(
    options: SweepOptions, engine: set[str]
) -> None:
    """A container may hold anything: its start tells."""
    assert without_absent_methods(options, (OFF, SUFFIX)) == ((OFF, SUFFIX), ())
