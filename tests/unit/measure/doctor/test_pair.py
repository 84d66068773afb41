"""Pairs that load, run and accept nothing are found from their files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from spectune.draft.inspect import HeadFacts, ModelFacts
from spectune.measure.doctor import Finding, Severity, worst
from spectune.measure.doctor.capture import check_capture
from spectune.measure.doctor.pair import check_pair
from spectune.measure.doctor.target import check_target
from spectune.measure.doctor.vocabulary import check_vocabulary

MakeHead = Callable[..., HeadFacts]
MakeTarget = Callable[..., ModelFacts]


def all_checks(head: HeadFacts, target: ModelFacts, **options: Any) -> list[Finding]:
    engine = options.get("engine")
    return [
        *check_pair(head, target, **options),
        *check_vocabulary(head, target),
        *check_capture(head, target, engine=engine),
    ]


def bad(findings: Iterable[Finding]) -> list[Finding]:
    return [found for found in findings if found.severity in (Severity.ERROR, Severity.WARNING)]


def only(findings: Iterable[Finding]) -> Finding:
    found = bad(findings)
    assert len(found) == 1, [one.text for one in found]
    assert found[0].signature
    assert found[0].fix
    return found[0]


@pytest.mark.parametrize("engine", [None, "reference", "vllm", "sglang"])
def test_right_pair_has_no_finding(head: MakeHead, target: MakeTarget, engine: str | None) -> None:
    """A head that belongs to its target and names its capture points both ways is fine everywhere."""
    findings = all_checks(head(), target(tokens=[f"t{i}" for i in range(40)]), engine=engine)

    assert bad(findings) == []
    assert worst(findings) is Severity.OK


def test_eagle_method_with_an_eagle3_head_is_an_error(head: MakeHead, target: MakeTarget) -> None:
    """The older method loads an EAGLE-3 head and accepts nothing; it is stopped by the architecture."""
    found = only(check_pair(head(), target(), method="eagle"))

    assert (found.check, found.severity) == ("method", Severity.ERROR)
    assert "acceptance length stays at 1.0" in (found.signature or "")
    assert "eagle3" in (found.fix or "")


def test_eagle3_method_with_an_older_head_names_its_fc(head: MakeHead, target: MakeTarget) -> None:
    """A head whose fc reads two hidden sizes is told to be EAGLE-1 or EAGLE-2."""
    older = head({"fc.weight": np.zeros((32, 64), np.float16)}, architectures=["LlamaForCausalLMEagle"])

    method = [found for found in bad(check_pair(older, target())) if found.check == "method"]

    assert "EAGLE-1 or EAGLE-2" in method[0].text


def test_head_of_another_width_names_both(head: MakeHead, target: MakeTarget) -> None:
    """A head for another hidden size is an error with both numbers."""
    found = only(check_pair(head(), target(hidden_size=64)))

    assert found.text == "the head reads hidden size 32, the target has 64"


def test_head_dim_that_is_not_hidden_over_heads_is_right(head: MakeHead, target: MakeTarget) -> None:
    """Heads times head_dim may differ from the hidden size: 4 heads of 16 on a hidden size of 32."""
    assert bad(check_pair(head(), target())) == []


def test_missing_head_dim_names_the_tensor_both_shapes_and_the_cure(
    head: MakeHead, target: MakeTarget
) -> None:
    """Without head_dim an engine builds 4 heads of 8: the mismatch is told with the value to write."""
    found = bad(check_pair(head(drop=("head_dim",)), target()))

    assert (
        "tensor midlayer.self_attn.q_proj.weight is [64, 64], config.json asks for [32, 64]" == found[0].text
    )
    assert "write head_dim 16 into config.json" in (found[0].fix or "")


def test_attention_of_plain_width_is_told(head: MakeHead, target: MakeTarget) -> None:
    """A q_proj that reads H instead of 2H is named as such."""
    narrow = head({"midlayer.self_attn.q_proj.weight": np.zeros((64, 32), np.float16)})

    found = only(check_pair(narrow, target()))

    assert "reads 2H" in (found.fix or "")


def test_alias_of_the_layer_and_the_prefix_are_read(head: MakeHead, target: MakeTarget) -> None:
    """vLLM's `model.layers.0.` is the classic `midlayer.`."""
    name = "midlayer.hidden_norm.weight"

    facts = head({name: None, "model.layers.0.hidden_norm.weight": np.zeros(32, np.float16)})

    assert bad(check_pair(facts, target())) == []


def test_missing_tensor_is_named(head: MakeHead, target: MakeTarget) -> None:
    """A tensor that is not there is an error with its name."""
    found = only(check_pair(head({"norm.weight": None}), target()))

    assert found.text == "tensor norm.weight is missing, config.json asks for [32]"


def test_short_context_of_the_draft_is_a_warning_and_planned_beyond_it_an_error(
    head: MakeHead, target: MakeTarget
) -> None:
    """A draft of 2048 positions on a target of 40960: both numbers, and an error once 4096 are planned."""
    short, long = head(max_position_embeddings=2048), target(max_position_embeddings=40960)

    general = only(check_pair(short, long))
    planned = only(check_pair(short, long, context_tokens=4096))
    inside = bad(check_pair(short, long, context_tokens=1024))

    assert (general.severity, general.text) == (
        Severity.WARNING,
        "the draft knows 2048 positions, the target 40960",
    )
    assert (planned.severity, planned.text) == (
        Severity.ERROR,
        "a context of 4096 tokens is beyond the draft's 2048 (the target has 40960)",
    )
    assert inside == []


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}, id="nested"),
        pytest.param({"rope_theta": 10000, "rope_scaling": None}, id="top-level"),
    ],
)
def test_both_layouts_of_rope_are_read(head: MakeHead, target: MakeTarget, changes: dict[str, Any]) -> None:
    """The base is found beside rope_scaling and inside rope_parameters."""
    assert head(drop=("rope_theta",), **changes).rope.theta == 10000.0 or "rope_theta" in changes
    assert bad(check_pair(head(**changes), target())) == []


def test_other_rope_is_a_warning_with_both_values(head: MakeHead, target: MakeTarget) -> None:
    """A different base or a lost scaling is told with its values, not refused."""
    llama3 = {"rope_type": "llama3", "factor": 32.0}

    found = only(check_pair(head(), target(rope_theta=500000.0, rope_scaling=llama3)))

    assert found.severity is Severity.WARNING
    assert "head: theta 10000, scaling none" in found.text
    assert "target: theta 500000, scaling llama3 x32" in found.text


def test_quantised_sides_are_warnings(head: MakeHead, target: MakeTarget) -> None:
    """A quantised head and a quantised target are each told with the scheme."""
    fp8 = {"quant_method": "fp8"}

    assert "head bfloat16 quantised by fp8" in only(check_pair(head(quantization_config=fp8), target())).text
    assert (
        "target bfloat16 quantised by fp8" in only(check_pair(head(), target(quantization_config=fp8))).text
    )


def test_norm_before_residual_is_an_error_in_sglang_only(head: MakeHead, target: MakeTarget) -> None:
    """SGLang does not implement the flag and says nothing."""
    facts = head(norm_before_residual=True)

    assert only(check_pair(facts, target(), engine="sglang")).severity is Severity.ERROR
    assert only(check_pair(facts, target(), engine="vllm")).severity is Severity.WARNING
    assert only(check_pair(facts, target(), engine="reference")).severity is Severity.WARNING
    refused = [one.text for one in bad(check_pair(head(norm_output=True), target(), engine="reference"))]
    assert refused == ["the reference engine does not have norm_output, which this head sets"]


# Vocabulary ---------------------------------------------------------------------------------------


def test_missing_map_of_a_reduced_vocabulary_is_an_error(head: MakeHead, target: MakeTarget) -> None:
    """A draft vocabulary of 10 out of 40 without d2t drafts wrong tokens."""
    found = only(check_vocabulary(head({"d2t": None, "t2d": None}), target()))

    assert found.severity is Severity.ERROR
    assert found.text == "draft_vocab_size 10 is below vocab_size 40, and there is no tensor d2t"


def test_whole_vocabulary_needs_no_map(head: MakeHead, target: MakeTarget) -> None:
    """With as many draft tokens as target tokens the map is optional, and superfluous for vLLM."""
    whole = {"lm_head.weight": np.zeros((40, 32), np.float16)}

    without = head({**whole, "d2t": None, "t2d": None}, draft_vocab_size=40)
    with_map = head({**whole, "d2t": np.zeros(40, np.int64)}, draft_vocab_size=40)

    assert bad(check_vocabulary(without, target())) == []
    assert only(check_vocabulary(with_map, target())).severity is Severity.WARNING


def test_absolute_ids_in_the_map_are_recognised(head: MakeHead, target: MakeTarget) -> None:
    """d2t that holds target ids instead of offsets: 9 + 39 leaves the vocabulary."""
    found = only(check_vocabulary(head({"d2t": np.array([0, 1, 2, 5, 6, 9, 20, 21, 30, 39])}), target()))

    assert found.text == "i + d2t[i] does not rise within 0..39: it holds absolute ids"


def test_absolute_ids_that_stay_within_the_vocabulary_are_recognised_too(
    head: MakeHead, target: MakeTarget
) -> None:
    """70 low ids of 200, without t2d: i + d2t[i] rises and fits, but an offset cannot rise at every entry."""
    absolute = np.arange(70) + np.arange(70) // 4  # four kept, one left out, and so on
    config = {"vocab_size": 200, "draft_vocab_size": 70}
    wrong = head({"d2t": absolute, "t2d": None}, **config)
    rising = head({"d2t": np.arange(70), "t2d": None}, **config)
    right = head({"d2t": np.arange(70) // 4, "t2d": None}, **config)

    for facts in (wrong, rising):
        found = only(check_vocabulary(facts, target(vocab_size=200)))
        assert found.severity is Severity.ERROR
        assert "absolute ids" in found.text
    assert bad(check_vocabulary(right, target(vocab_size=200))) == []


def test_map_of_another_length_is_an_error(head: MakeHead, target: MakeTarget) -> None:
    """Eight entries for ten draft tokens."""
    found = only(check_vocabulary(head({"d2t": np.zeros(8, np.int64)}), target()))

    assert found.text == "d2t has [8] entries, draft_vocab_size is 10"


def test_maps_that_disagree_are_an_error(head: MakeHead, target: MakeTarget) -> None:
    """t2d of another training run flags other tokens than d2t names."""
    found = only(check_vocabulary(head({"t2d": np.arange(40) < 10}), target()))

    assert "not those of d2t" in found.text


def test_vocabulary_that_differs_by_padding_is_a_note(head: MakeHead, target: MakeTarget) -> None:
    """48 rows against 40 with a tokenizer of 40 tokens: allowed."""
    findings = list(check_vocabulary(head(), target(tokens=[f"t{i}" for i in range(40)], vocab_size=48)))

    assert bad(findings) == []
    assert "differ by padding only: the tokenizer has 40 tokens" in findings[0].text


def test_vocabulary_of_another_size_is_an_error_with_both(head: MakeHead, target: MakeTarget) -> None:
    """40 against 33 rows, and the draft can draft token 39 of a tokenizer that ends at 32."""
    found = only(check_vocabulary(head(), target(tokens=[f"t{i}" for i in range(33)], vocab_size=33)))

    assert found.text == "vocab_size is 40 for the draft and 33 for the target"


def test_same_sizes_with_other_tokens_name_the_first_id(head: MakeHead, target: MakeTarget) -> None:
    """Contents are compared, not sizes: the first id that means something else is told."""
    ours = [f"t{i}" for i in range(40)]
    theirs = [*ours[:17], "x", *ours[18:]]

    found = only(check_vocabulary(head(tokens=theirs), target(tokens=ours)))

    assert found.text == "id 17 is 'x' for the draft and 't17' for the target (40 and 40 tokens)"


def test_same_tokens_with_a_longer_tail_are_a_note(head: MakeHead, target: MakeTarget) -> None:
    """A tokenizer with three more added tokens than the other is the same up to its tail."""
    ours = [f"t{i}" for i in range(37)]

    findings = list(check_vocabulary(head(tokens=[*ours, "a", "b", "c"]), target(tokens=ours)))

    assert bad(findings) == []
    assert findings[0].text == "the same tokens up to a tail: 40 and 37 tokens"


# Capture points -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("top", "nested", "engine", "severity", "fix"),
    [
        pytest.param([4, 15, 27], None, "sglang", Severity.ERROR, "[3, 14, 26]", id="sglang-reads-nested"),
        pytest.param([4, 15, 27], None, None, Severity.WARNING, "[3, 14, 26]", id="top-level-alone"),
        pytest.param(None, [3, 14, 26], "vllm", Severity.ERROR, "[4, 15, 27]", id="vllm-reads-top-level"),
        pytest.param(None, [1, 14, 26], "vllm", Severity.WARNING, "[2, 15, 27]", id="nested-default"),
        pytest.param([2, 15, 27], [2, 15, 27], None, Severity.ERROR, "[1, 14, 26]", id="equal-numbers"),
        pytest.param(None, None, None, Severity.WARNING, "top level", id="none-at-all"),
    ],
)
def test_capture_points_follow_each_engines_counting(
    head: MakeHead,
    target: MakeTarget,
    top: list[int] | None,
    nested: list[int] | None,
    engine: str | None,
    severity: Severity,
    fix: str,
) -> None:
    """SGLang's numbers are one lower than vLLM's, and each reads another key: the fix names the numbers."""
    facts = head(
        eagle_aux_hidden_state_layer_ids=top,
        eagle_config={} if nested is None else {"eagle_aux_hidden_state_layer_ids": nested},
    )

    found = only(check_capture(facts, target(), engine=engine))

    assert found.severity is severity
    assert fix in (found.fix or "")


@pytest.mark.parametrize(
    ("nested", "severity"), [(None, Severity.ERROR), ([0, 13, 25], Severity.WARNING)], ids=["alone", "both"]
)
def test_capture_points_one_early_at_the_top_are_named(
    head: MakeHead, target: MakeTarget, nested: list[int] | None, severity: Severity
) -> None:
    """[1, 14, 26] of 30 layers is SGLang's counting of [2, 15, 27]; vLLM would capture one layer early."""
    facts = head(
        eagle_aux_hidden_state_layer_ids=[1, 14, 26],
        eagle_config={} if nested is None else {"eagle_aux_hidden_state_layer_ids": nested},
    )

    found = only(check_capture(facts, target()))

    assert found.severity is severity
    assert "SGLang's counting" in found.text
    assert "write [2, 15, 27] there and [1, 14, 26] inside eagle_config" in (found.fix or "")


def test_shallow_target_has_no_default_capture_points(head: MakeHead, target: MakeTarget) -> None:
    """(2, L//2, L-3) of a target of four layers is (2, 2, 1): two streams, and fc wants three."""
    facts = head(eagle_aux_hidden_state_layer_ids=None, eagle_config={})

    found = only(check_capture(facts, target(num_hidden_layers=4)))

    assert found.severity is Severity.ERROR


def test_capture_point_beyond_the_target_is_an_error(head: MakeHead, target: MakeTarget) -> None:
    """Capture points of a 30-layer target on one of 16 layers."""
    texts = [found.text for found in bad(check_capture(head(), target(num_hidden_layers=16)))]

    assert "[2, 15, 27]: the target of 16 layers has 0..15" in texts[0]
    assert "[1, 14, 26]: the target of 16 layers has -1..14" in texts[1]


def test_target_without_template_offers_the_ways_out(target: MakeTarget) -> None:
    """A base model is told by the tokenizer's folder, with the template file and the completions endpoint."""
    facts = target(template=None)

    found = only(check_target(facts))

    assert str(facts.path) in found.text
    assert "chat_template.jinja" in (found.fix or "")
    assert "completions endpoint" in (found.fix or "")
