"""`--device cuda` on a machine whose torch sees no CUDA device: bad input, told before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.toys import save_target

COMMANDS = {
    "sweep": ["--num-prompts", "2", "--batch-size", "1", "--method", "ngram"],
    "trace": ["--num-prompts", "2", "--method", "ngram"],
    "train eagle3": [],
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_device_is_bad_input(spectune: Callable[..., Any], tmp_path: Path, command: str) -> None:
    """Exit code 2, and the way out."""
    target = save_target(tmp_path / "target")

    answer = spectune(
        *command.split(),
        "--model",
        str(target),
        "--device",
        "cuda",
        "--output-dir",
        "run",
        *COMMANDS[command],
    )

    assert 2 == answer.code
    assert "--device cuda: this torch sees no CUDA device" in answer.err
    assert "use --device cpu" in answer.err
