"""What the call on a device measures, and what is known of devices."""

from __future__ import annotations

import pytest
import torch

from spectune.engine.bandwidth import queue_length
from tests.gpu import checks, machine, parts
from tests.gpu.drive import PARTS
from tests.gpu.plan import CROSSOVER_ARMS, LENGTHS, ON_A_DEVICE, REHEARSAL, Plan, ends_first
from tests.gpu.shapes import arrange, drift_of, quartiles


def test_the_plan_covers_what_was_asked_for() -> None:
    """Batch 1 to 256, context 512 to 8,192, four acceptance lengths, chains 1, 3, 5, 7 and trees."""
    configs = {config for config, _ in CROSSOVER_ARMS}

    assert (1, 256) == (min(ON_A_DEVICE.batches), max(ON_A_DEVICE.batches))
    assert (512, 8192) == (min(ON_A_DEVICE.contexts), max(ON_A_DEVICE.contexts))
    assert (1.5, 2.0, 2.5, 3.0) == LENGTHS
    assert set(LENGTHS) == {length for _, length in CROSSOVER_ARMS if length is not None}
    assert all(length <= config.num_steps + 1 for config, length in CROSSOVER_ARMS if length is not None)
    assert any(config.is_off for config in configs)
    assert {1, 3, 5, 7} <= {config.num_steps for config in parts.ROUND_CONFIGS if config.topk == 1}
    assert any(config.is_tree for config in parts.ROUND_CONFIGS)


@pytest.mark.parametrize("plan", [ON_A_DEVICE, REHEARSAL], ids=["device", "rehearsal"])
def test_the_time_surface_has_seventy_points(plan: Plan) -> None:
    """On a device some of them may not fit its memory, so more are planned."""
    assert parts.num_surface(plan) >= 70
    assert checks.num_equality(plan) == 16


def test_the_shares_of_the_parts_are_the_whole_call() -> None:
    """Nothing is promised twice."""
    assert 1.0 == pytest.approx(sum(share for *_, share in PARTS))


def test_cells_go_from_the_ends_to_the_middle() -> None:
    """A part that is cut short spans its range."""
    assert [1, 256, 16, 4, 64, 2, 8, 32, 128] == ends_first((1, 2, 4, 8, 16, 32, 64, 128, 256))
    assert [5, 6] == ends_first((5, 6))
    cells = list(ON_A_DEVICE.cells((1, 4, 16)))
    assert [(1, 512), (16, 512), (4, 512), (1, 8192)] == cells[:4]
    assert len(set(cells)) == 12


def test_arms_take_turns_forth_and_back() -> None:
    """A B C, C B A: what drifts over time meets all arms alike."""
    assert [0, 1, 2, 2, 1, 0, 0, 1, 2] == arrange(3, 3)


def test_quartiles_and_drift_by_hand() -> None:
    """Inclusive quartiles; the last third over the first; too few rounds have no drift."""
    assert (2.0, 3.0, 4.0) == quartiles([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (7.0, 7.0, 7.0) == quartiles([7.0])
    assert 1.5 == drift_of([2.0, 2.0, 9.0, 9.0, 3.0, 3.0])
    assert drift_of([1.0] * 5) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", 4.8e12),
        ("NVIDIA H100 80GB HBM3", 3.35e12),
        ("NVIDIA A100-SXM4-80GB", 2.039e12),
        ("NVIDIA L40S", 0.864e12),
        ("NVIDIA L4", 0.3e12),
        ("NVIDIA GeForce RTX 4090", 1.008e12),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_the_data_sheet_is_found_by_name(name: str, expected: float | None) -> None:
    """Names are matched by whole words, so that an L4 is no L40S; unknown ones have no figure."""
    assert expected == machine.sheet_bandwidth(name)


def test_bandwidth_is_measured_in_queues_on_a_device_only() -> None:
    """269 MB are read in 60 µs there: 64 sums share one wait. A CPU sum is its own measurement."""
    assert 1 == queue_length("cpu", 269_000_000)
    assert 64 == queue_length("cuda", 269_000_000)
    assert 1 == queue_length("cuda", 17 << 30)


def test_the_machine_describes_itself() -> None:
    """A CPU has a name, no driver and a read bandwidth; the digest tells sources apart."""
    found = machine.describe(torch.device("cpu"), probe_bytes=64 << 20)
    surroundings = machine.provenance(["run.sh", "out"])

    assert ("cpu", None, None) == (found.kind, found.driver, found.sheet_bandwidth_bytes_per_s)
    assert found.read_bandwidth_bytes_per_s is not None
    assert found.read_bandwidth_bytes_per_s > 1e8
    assert ["run.sh", "out"] == surroundings["argv"]
    assert 16 == len(surroundings["source_digest"])
