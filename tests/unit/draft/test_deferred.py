"""A drafter that catches up late proposes what one that was kept fresh proposes."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from spectune.draft.deferred import CHUNK, DeferredDrafter
from spectune.engine.sampling import RowSampling
from spectune.engine.scheduler import Engine
from spectune.records import SpecConfig
from tests.support.toys import CPU, cyclic_pair, ragged_requests, random_drafter, request, tiny_target

OFF = SpecConfig.off()
CHAIN = SpecConfig.chain("eagle3", 3)
TREE = SpecConfig(method="eagle3", num_steps=3, topk=2, num_draft_tokens=8)


class Cycling:
    """Picks the given configurations in turn."""

    def __init__(self, *configs: SpecConfig) -> None:
        self._configs = itertools.cycle(configs)

    def choose(self, *, batch_size: int, context_tokens: int, acceptance_ema: float | None) -> SpecConfig:
        return next(self._configs)


@pytest.mark.parametrize("pattern", [(OFF, OFF, CHAIN), (CHAIN, OFF, TREE, OFF, OFF), (OFF,)], ids=str)
@pytest.mark.parametrize("chunk", [4, 512])
def test_deferred_drafts_are_the_fresh_ones(
    pattern: tuple[SpecConfig, ...], chunk: int, tmp_path: Path
) -> None:
    """Texts and accepted counts of every step are those of a drafter that commits in plain rounds."""
    target = tiny_target()
    drafter = random_drafter(target, tmp_path, 97)
    asks = ragged_requests(6, 97, temperature=1.0)

    def run(own: object) -> list[tuple[tuple[int, ...], list[int]]]:
        engine = Engine(target, drafter=own, batch_size=3, eos_ids=[], prefill_chunk=chunk)  # type: ignore[arg-type]
        result = engine.generate(asks, chooser=Cycling(*pattern), scratch=TREE)
        return [(r.output_ids, [s.num_accepted for s in r.steps]) for r in result.requests]

    assert run(drafter) == run(DeferredDrafter(drafter))


def test_deferred_drafter_is_fresh_after_plain_rounds() -> None:
    """A perfect head accepts everything in the round after any number of plain ones."""
    target, drafter = cyclic_pair()
    engine = Engine(target, drafter=DeferredDrafter(drafter), eos_ids=[])
    asks = [request("w", [1], max_tokens=40)]

    steps = engine.generate(asks, chooser=Cycling(OFF, OFF, CHAIN, OFF, TREE)).requests[0].steps

    assert [1, 1, 4, 1, 4] * 3 == [step.num_emitted for step in steps[:15]]


class Counting:
    """A drafter that counts the tokens it is given."""

    needs_features = True
    pure_in_prefix = True
    max_context = None
    weight_bytes = 0

    def __init__(self) -> None:
        self.num_started = 0
        self.committed: list[int] = []

    def reserve(self, num_slots: int, max_len: int, config: SpecConfig) -> None: ...

    def start(self, slot: int, tokens: torch.Tensor, features: torch.Tensor) -> None:
        self.num_started += 1

    def commit(self, slots: list[int], tokens: torch.Tensor, features: torch.Tensor, counts: object) -> None:
        self.committed.append(tokens.shape[1])

    def propose(self, slots: list[int], config: SpecConfig, rows: RowSampling) -> None: ...

    def stop(self, slot: int) -> None: ...


def test_plain_rounds_cost_the_draft_nothing() -> None:
    """A text that begins and ends in plain rounds never reaches the draft."""
    target = tiny_target()
    counting = Counting()
    engine = Engine(target, drafter=DeferredDrafter(counting), eos_ids=[])  # type: ignore[arg-type]
    asks = [request("first", [5, 6, 7], max_tokens=8), request("second", [5, 6, 8], max_tokens=8)]

    engine.generate(asks, chooser=Cycling(OFF))

    # the first text began before anything was known of the rounds to come
    assert (1, []) == (counting.num_started, counting.committed)


def test_a_long_backlog_is_caught_up_in_chunks() -> None:
    """No pass of the draft is longer than CHUNK tokens."""
    counting = Counting()
    drafter = DeferredDrafter(counting)  # type: ignore[arg-type]
    one = torch.tensor([1])
    drafter.start(0, torch.zeros(3, dtype=torch.int64), torch.zeros(2, 3))
    for _ in range(CHUNK + 5):
        drafter.commit([0], torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, 3), one)
    assert CHUNK + 5 == drafter.num_deferred_tokens

    drafter.propose([0], CHAIN, RowSampling.of([], CPU))

    assert [CHUNK, 5] == counting.committed
    assert 0 == drafter.num_deferred_tokens
