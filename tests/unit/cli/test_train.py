"""`spectune train eagle3`: its flags are the settings of a training plan."""

from __future__ import annotations

import inspect
from dataclasses import fields

from spectune.cli.train import eagle3
from spectune.train.plan import TrainPlan


def test_train_defaults_are_those_of_the_plan() -> None:
    """A flag that is not given changes nothing; --num-tokens-target is the plan's num_tokens."""
    planned = {field.name: field.default for field in fields(TrainPlan)}
    planned["num_tokens_target"] = planned["num_tokens"]
    flags = {name: flag.default for name, flag in inspect.signature(eagle3).parameters.items()}
    shared = (flags.keys() & planned.keys()) - {"output_dir", "apart_from"}

    assert {"num_tokens_target", "ttt_steps", "draft_vocab_size", "epochs", "lr", "seed"} <= shared
    assert {name: flags[name] for name in shared} == {name: planned[name] for name in shared}
