"""Servers as arms: what is started in which order, and that the emitted JSON is what is served."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from spectune.measure.policy_verify_server import EmittedVllm, serve_load, serve_starts
from spectune.records import (
    BlockResult,
    Cell,
    Gap,
    Launch,
    Point,
    Request,
    RequestRecord,
    SpecConfig,
    StepRecord,
)
from spectune.records.policy_load import PolicyArm, PolicyLoad
from tests.support.toys import request, save_target

K3 = SpecConfig.chain("ngram", 3)
ARMS = (PolicyArm.static(SpecConfig.off()), PolicyArm.policy(), PolicyArm.static(K3))
STEADY = PolicyLoad(name="batch 2", levels=((2, 0),), num_requests=4, max_tokens=5)
RAMP = PolicyLoad(name="ramp", levels=((1, 5), (2, 10), (1, 5)), num_requests=4, max_tokens=5)


def asks(load: PolicyLoad, repeat: int) -> tuple[Request, ...]:
    return tuple(request(f"{load.name}-{repeat}-{i}", [5], max_tokens=5) for i in range(load.num_requests))


class Session:
    """Answers everything in a second a token, and remembers what it was asked."""

    def __init__(self, log: list[tuple[str, int, int]], label: str) -> None:
        self._log, self._label = log, label

    def run(self, point: Point, requests: Sequence[Request]) -> BlockResult:
        self._log.append((f"run {self._label}", point.cell.batch_size, len(requests)))
        return self._block(requests)

    def stream(self, point: Point, requests: Sequence[Request], fillers: Sequence[Request]) -> BlockResult:
        self._log.append((f"stream {self._label}", point.cell.batch_size, len(requests)))
        return self._block(requests)

    def gap(self, request: Request, output_ids: Sequence[int], index: int) -> Gap | None:
        return None

    def _block(self, requests: Sequence[Request]) -> BlockResult:
        step = StepRecord(num_proposed=0, num_verified=0, num_accepted=0, num_emitted=1)
        records = tuple(
            RequestRecord(
                request_id=one.request_id, category="toy", num_prompt_tokens=1, output_ids=(1, 2, 3, 4, 5),
                arrival_s=0.0, first_token_s=1.0, finish_s=5.0, finish_reason="length", steps=(step,) * 4,
            )
            for one in requests
        )  # fmt: skip
        return BlockResult(requests=records, rounds=(), duration_s=5.0)


class Backend:
    def __init__(self, arm: PolicyArm, log: list[tuple[str, int, int]]) -> None:
        self._arm, self._log = arm, log

    @contextlib.contextmanager
    def open(self, launch: Launch) -> Iterator[Session]:
        self._log.append((f"start {self._arm.label}", 0, 0))
        yield Session(self._log, self._arm.label)


def test_plain_decoding_is_started_before_and_after_the_others() -> None:
    """off, the policy, K=3, off: each start serves every load of every repeat."""
    log: list[tuple[str, int, int]] = []

    samples = list(
        serve_starts(lambda arm: Backend(arm, log), K3, ARMS, [STEADY], asks, repeats=2)  # type: ignore[arg-type, return-value]
    )

    assert [name for name, _, _ in log if name.startswith("start")] == [
        "start off", "start policy", "start ngram K=3", "start off",
    ]  # fmt: skip
    assert [(s.arm, s.boot, s.repeat) for s in samples] == [
        ("off", 0, 0), ("off", 0, 1), ("policy", 1, 0), ("policy", 1, 1),
        ("ngram K=3", 2, 0), ("ngram K=3", 2, 1), ("off", 3, 0), ("off", 3, 1),
    ]  # fmt: skip
    assert {sample.tpot_s for sample in samples} == {1.0}


def test_start_that_lacks_nothing_is_left_out() -> None:
    """A verification that stopped starts only the servers that it still needs."""
    log: list[tuple[str, int, int]] = []
    done = {("batch 2", 0, "off", 0), ("batch 2", 0, "policy", 1)}

    samples = list(
        serve_starts(lambda arm: Backend(arm, log), K3, ARMS, [STEADY], asks, repeats=1, done=done)  # type: ignore[arg-type, return-value]
    )

    assert [(sample.arm, sample.boot) for sample in samples] == [("ngram K=3", 2), ("off", 3)]


def test_no_server_is_started_for_too_little_time() -> None:
    """Half a minute is less than a start takes."""
    log: list[tuple[str, int, int]] = []

    samples = list(
        serve_starts(
            lambda arm: Backend(arm, log),
            K3,
            ARMS,
            [STEADY],
            asks,
            repeats=1,
            max_seconds=30,  # type: ignore[arg-type, return-value]
        )
    )

    assert (samples, log) == ([], [])


def test_ramp_is_served_level_by_level() -> None:
    """1, 2, 1 requests at once, each level drained: three waits of 5 s."""
    log: list[tuple[str, int, int]] = []

    block = serve_load(Session(log, "x"), K3, RAMP, asks(RAMP, 0))

    assert log == [("run x", 1, 1), ("run x", 2, 2), ("run x", 1, 1)]
    assert (len(block.requests), block.duration_s) == (4, 15.0)


def test_emitted_json_is_what_the_server_gets(tmp_path: Path) -> None:
    """The schedule stands in the command as it was written, with the other flags of a measurement."""
    schedule = [[1, 2, 3], [3, 16, 0]]
    document = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": schedule,
    }
    backend = EmittedVllm(
        document, model=str(save_target(tmp_path / "toy")), server_cmd="launch {args}", device="cpu"
    )
    point = Point(
        config=K3,
        cell=Cell(batch_size=2, context_tokens=0, temperature=0.0),
        workload_hash="x",
        sampling=request("r", [1]).sampling,
    )

    words = backend.command(Launch(points=(point,)), port=1, served_model="m").argv

    assert json.loads(words[words.index("--speculative-config") + 1]) == document
    assert "--max-num-seqs" in words
