"""Where the target's hidden states are captured for an EAGLE-3 head, and who reads it how.

The number of a capture point means the layers that have run before it in vLLM and in this project, and
the layer after which it is taken in SGLang, so one stream has two numbers. The keys differ as well:
vLLM reads the top-level key (its newer runner that one alone), SGLang the one inside eagle_config.
Both engines fall back to (2, L//2, L-3) without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from spectune.draft.inspect import HeadFacts, ModelFacts
from spectune.measure.doctor.findings import Finding, error, fine, warning

KEY = "eagle_aux_hidden_state_layer_ids"
WRONG_LAYERS = (
    "no error: first-position acceptance of 1 to 10% where 45 to 75% are normal, acceptance length near 1.0"
)


def default_ids(num_layers: int) -> tuple[int, int, int]:
    """What all engines take where the head says nothing."""
    return 2, num_layers // 2, num_layers - 3


def check_capture(head: HeadFacts, target: ModelFacts, *, engine: str | None = None) -> Iterator[Finding]:
    """Capture points of the head against the target's depth and the engines' conventions."""
    layers = target.count("num_hidden_layers")
    if layers is None or not head.is_eagle3:
        return
    top, nested = head.top_level_ids, head.nested_ids
    default = default_ids(layers)
    if top is None and nested is None:
        if len({layer for layer in default if layer >= 0}) < 3 or layers < 7:
            yield error(
                "capture",
                f"the head names no capture points, and the default {default} of a target of {layers} layers "
                "has no three different ones",
                signature="a shape error of fc while loading",
                fix=f"write {KEY} into the head's config.json",
            )
        else:
            yield warning(
                "capture",
                f"the head names no capture points, so every engine takes the default {list(default)}",
                signature=f"right for most heads; otherwise {WRONG_LAYERS}",
                fix=f"if it was trained on others, write {KEY} into config.json, for vLLM at the top level",
            )
        return
    yield from _ranges(top, nested, layers)
    yield from _conventions(top, nested, default, engine)


def _ranges(top: tuple[int, ...] | None, nested: tuple[int, ...] | None, layers: int) -> Iterator[Finding]:
    for ids, low, high, where in ((top, 0, layers - 1, KEY), (nested, -1, layers - 2, f"eagle_config.{KEY}")):
        if ids is None:
            continue
        if len(set(ids)) != len(ids):
            yield error(
                "capture",
                f"{where} {list(ids)} names a layer twice",
                signature="vLLM removes the double one, then fc has a wrong shape",
                fix="name different layers",
            )
        if not all(low <= layer <= high for layer in ids):
            yield error(
                "capture",
                f"{where} {list(ids)}: the target of {layers} layers has {low}..{high}",
                signature="the engine fails while loading, or captures fewer states than fc reads",
                fix="this head was trained for a target of another depth",
            )


def _conventions(
    top: tuple[int, ...] | None, nested: tuple[int, ...] | None, default: tuple[int, ...], engine: str | None
) -> Iterator[Finding]:
    if top is not None and nested is not None:
        shifted = tuple(layer + 1 for layer in nested)
        if shifted == top and _is_one_early(top, default):
            yield _one_early(warning, top, default)
        elif shifted == top:
            yield fine("capture", f"capture points {list(top)}, written for vLLM and SGLang")
        else:
            hint = (
                "they are equal, but SGLang counts one lower" if top == nested else "they name other streams"
            )
            yield error(
                "capture",
                f"{KEY} {list(top)} and eagle_config's {list(nested)} do not agree: {hint}",
                signature=f"in one of the engines {WRONG_LAYERS}",
                fix=f"keep the one the head was trained with; for these the other is "
                f"{[layer - 1 for layer in top]} inside eagle_config",
            )
        return
    if nested is not None:
        meant = [layer + 1 for layer in nested]
        if engine == "sglang":
            yield fine("capture", f"eagle_config's {list(nested)} is read by SGLang as after these layers")
            return
        make = error if engine == "vllm" and meant != list(default) else warning
        like = "; these are vLLM's default, so they may have been written in its counting" * (
            nested == default
        )
        yield make(
            "capture",
            f"only eagle_config names the capture points, {list(nested)} in SGLang's counting{like}. vLLM's newer "
            f"runner ignores them and takes {list(default)}, its older one reads them one layer too early",
            signature=f"in vLLM: {WRONG_LAYERS}",
            fix=f"add the top-level key {KEY}: {meant}",
        )
        return
    if top is not None and _is_one_early(top, default):
        yield _one_early(error, top, default)
    elif top is not None and list(top) != list(default):
        make = error if engine == "sglang" else warning
        yield make(
            "capture",
            f"only the top level names the capture points {list(top)}; SGLang reads eagle_config alone and "
            f"takes the default {list(default)}",
            signature=f"in SGLang: {WRONG_LAYERS}",
            fix=f"add eagle_config.{KEY}: {[layer - 1 for layer in top]}",
        )
    elif top is not None:
        yield fine("capture", f"capture points {list(top)}, the default of every engine")


def _is_one_early(top: tuple[int, ...], default: tuple[int, ...]) -> bool:
    return [layer + 1 for layer in top] == list(default)


def _one_early(make: Callable[..., Finding], top: tuple[int, ...], default: tuple[int, ...]) -> Finding:
    """SGLang's counting under the key that vLLM reads."""
    return make(
        "capture",
        f"{KEY} {list(top)} is one lower than EAGLE-3's usual {list(default)}: SGLang's counting, where vLLM "
        "reads layers run before the capture",
        signature=f"in vLLM: {WRONG_LAYERS}",
        fix=f"write {list(default)} there and {list(top)} inside eagle_config, unless the head was trained on "
        "other streams than usual",
    )
