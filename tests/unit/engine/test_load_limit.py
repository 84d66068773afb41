"""A load that rises and falls: how many requests may run, by the tokens emitted so far."""

from __future__ import annotations

from spectune.engine.scheduler import Engine
from tests.support.toys import ragged_requests, request, tiny_target


def test_limit_raises_and_lowers_the_load() -> None:
    """One request, then three, then one: admission follows, and what runs is never stopped."""
    engine = Engine(tiny_target(), batch_size=3, eos_ids=[])
    asks = [request(f"r{i}", [5 + i], max_tokens=4) for i in range(6)]

    rounds = engine.generate(asks, limit=lambda emitted: 3 if 4 <= emitted < 12 else 1).rounds

    assert [1] * 3 + [3] * 3 + [1] * 6 == [r.batch_size for r in rounds if r.kind == "decode"]


def test_limit_does_not_change_a_text() -> None:
    """Whoever runs beside it, a request is answered alike."""
    engine = Engine(tiny_target(), batch_size=3, eos_ids=[])
    asks = ragged_requests(5, 97, temperature=1.0)

    texts = [
        [record.output_ids for record in engine.generate(asks, limit=limit).requests]
        for limit in (None, lambda emitted: 1 + emitted // 10)
    ]

    assert texts[0] == texts[1]
