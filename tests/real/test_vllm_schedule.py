"""Our evaluator of a schedule by batch size against vLLM's own, run in vLLM's environment."""

from __future__ import annotations

import json
import os
import random
import subprocess
from typing import Any

import pytest

from spectune.backend.environments import find_environment
from spectune.errors import SpectuneError, UsageError
from spectune.policy.emit_vllm import vllm_lookup

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

# The module is loaded from its file: importing the package would start the whole engine.
PROGRAM = """
import importlib.util, json, sys
from importlib.util import find_spec
from pathlib import Path
folder = Path(find_spec("vllm").origin).parent
spec = importlib.util.spec_from_file_location("dynamic", folder / "v1/spec_decode/dynamic/utils.py")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
answers = []
for case in json.load(sys.stdin):
    try:
        answers.append(module.build_dynamic_sd_schedule_lookup(case["schedule"], case["top"], case["depth"])[1:])
    except ValueError:
        answers.append(None)
print(json.dumps(answers))
"""


def random_case(chance: random.Random) -> dict[str, Any]:
    """A schedule that is mostly sound: gaps, tails, values above the maximum, any order of entries."""
    start, entries = 1, []
    for _ in range(chance.randint(1, 5)):
        start += chance.choice([0, 0, 0, 1, 5]) if entries else chance.choice([0] * 9 + [1])
        end = start + chance.randint(0, 9)
        entries.append([start, end, chance.randint(0, 6)])
        start = end + chance.choice([1] * 9 + [0])
    chance.shuffle(entries)
    if chance.random() < 0.05:
        entries[0][2] = -1
    if chance.random() < 0.05:
        entries[0][:2] = entries[0][1::-1]
    return {"schedule": entries, "top": chance.randint(1, 60), "depth": chance.randint(1, 5)}


def ours(case: dict[str, Any]) -> list[int] | None:
    try:
        return [
            vllm_lookup(case["schedule"], size, num_speculative_tokens=case["depth"])
            for size in range(1, case["top"] + 1)
        ]
    except UsageError:
        return None


def test_evaluator_equals_vllm_on_random_schedules() -> None:
    """For 2,000 random tables both give the same K at every batch size, and refuse the same ones."""
    try:
        environment = find_environment("vllm", os.environ.get("SPECTUNE_VLLM_PYTHON"))
    except SpectuneError as error:
        pytest.skip(f"no vLLM here: {error.message}; SPECTUNE_VLLM_PYTHON names an interpreter that has it")
    chance = random.Random(8)
    cases = [random_case(chance) for _ in range(2000)]

    done = subprocess.run(
        [environment.python, "-c", PROGRAM],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=True,
    )
    theirs = json.loads(done.stdout)

    assert [ours(case) for case in cases] == theirs
    assert 100 < sum(answer is None for answer in theirs) < 1000
