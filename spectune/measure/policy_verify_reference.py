"""The reference engine as an arm of a verification: the policy's own switches, statics, and a true off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from spectune.draft.deferred import DeferredDrafter
from spectune.engine.scheduler import CacheRoom, Engine
from spectune.errors import UsageError
from spectune.records import BlockResult, Chooser, Request, SpecConfig
from spectune.records.policy_load import PolicyArm, PolicyLoad

if TYPE_CHECKING:
    from spectune.backend.reference import ReferenceBackend
    from spectune.engine.drafter import Drafter


class ReferenceServer:
    """Engines of one target: without a draft, with one at every round, with one that may rest.

    Args:
        method: how all arms of the policy draft; an engine has one drafter.
        scratch: the largest configuration of any arm.
        chooser: made anew for each serving of the policy.
    """

    def __init__(
        self,
        backend: ReferenceBackend,
        *,
        method: str,
        scratch: SpecConfig,
        chooser: Callable[[], Chooser],
        batch_size: int,
    ) -> None:
        drafter = backend.drafter(method)
        self._scratch, self._chooser = scratch, chooser

        room = CacheRoom()

        def engine(own: Drafter | None) -> Engine:
            return Engine(
                backend.target, backend.tokenizer, drafter=own, batch_size=batch_size, cache_room=room
            )

        self._off, self._static = engine(None), engine(drafter)
        self._policy = engine(None if drafter is None else DeferredDrafter(drafter))

    def serve(self, arm: PolicyArm, load: PolicyLoad, requests: Sequence[Request]) -> BlockResult:
        """All requests at the load's levels."""
        if arm.is_policy:
            return self._policy.generate(
                requests, chooser=self._chooser(), scratch=self._scratch, limit=load.limit
            )
        assert arm.config is not None
        engine = self._off if arm.is_off else self._static
        return engine.generate(requests, arm.config, scratch=self._scratch, limit=load.limit)


def one_method(configs: Sequence[SpecConfig]) -> str:
    """The method of all configurations that speculate; UsageError for several."""
    methods = sorted({config.method for config in configs if not config.is_off})
    if len(methods) > 1:
        raise UsageError(
            f"the policy drafts with {' and '.join(methods)}, an engine has one drafter",
            hint=f"sweep one of them: spectune sweep --method {methods[0]}",
        )
    return methods[0] if methods else SpecConfig.off().method
