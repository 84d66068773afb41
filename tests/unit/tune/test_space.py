"""The grid: off first, one chain a K, trees crossed, and a reason for each that is left out."""

from __future__ import annotations

import pytest

from spectune.errors import UsageError
from spectune.records import SpecConfig
from spectune.tune.space import build_space


def labels(configs):
    return [config.label for config in configs]


def test_space_chains_ignore_num_draft_tokens():
    """topk=1 gives one chain per K with N=K+1 whatever --num-draft-tokens says."""
    configs, pruned = build_space(["eagle3"], [1, 3], [1], [8, 16])

    assert labels(configs) == ["off", "eagle3 K=1", "eagle3 K=3"]
    assert [config.num_draft_tokens for config in configs] == [1, 2, 4]
    assert pruned == ()


def test_space_trees_are_crossed_and_pruned_with_the_reason():
    """Depth 1 with topk 4 drafts 4 nodes, too few for N=8; depth 3 and N=8, 16 fit in 4 + 2·16 = 36."""
    configs, pruned = build_space(["eagle3"], [1, 3], [4], [8, 16])

    assert labels(configs) == ["off", "eagle3 D=3 k=4 N=8", "eagle3 D=3 k=4 N=16"]
    assert pruned == (
        ("eagle3 D=1 k=4 N=8", "needs 7 drafted nodes, depth 1 with topk 4 drafts 4"),
        ("eagle3 D=1 k=4 N=16", "needs 15 drafted nodes, depth 1 with topk 4 drafts 4"),
    )


def test_space_tree_deeper_than_its_nodes_is_the_smaller_tree():
    """N=3 holds two drafted nodes, which never reach depth 5: the same as depth 2 at more cost."""
    configs, pruned = build_space(["eagle3"], [2, 5], [2], [3])

    assert labels(configs) == ["off", "eagle3 D=2 k=2 N=3"]
    assert [label for label, _ in pruned] == ["eagle3 D=5 k=2 N=3"]
    assert "the same tree as num-tokens 2" in pruned[0][1]


def test_space_ngram_has_chains_only():
    """n-grams draft no trees; their chains stay."""
    configs, pruned = build_space(["ngram", "eagle3"], [3], [1, 4], [8])

    assert labels(configs) == ["off", "ngram K=3", "eagle3 K=3", "eagle3 D=3 k=4 N=8"]
    assert [label for label, _ in pruned] == ["ngram D=3 k=4 N=8"]


def test_space_options_and_head_go_to_their_method():
    """The head belongs to eagle3, the window to ngram."""
    configs, _ = build_space(["eagle3", "ngram"], [2], options={"ngram": {"min_n": 2}}, draft_model="heads/x")

    assert [(c.draft_model, c.options) for c in configs] == [
        (None, ()),
        ("heads/x", ()),
        (None, (("min_n", 2),)),
    ]


def test_space_repeated_values_give_a_configuration_once():
    """A list with doubles is not run twice; off is in every space, once."""
    configs, _ = build_space(["off", "eagle3", "eagle3"], [2, 2], [1, 1])

    assert configs == (SpecConfig.off(), SpecConfig.chain("eagle3", 2))


def test_space_of_off_alone_needs_no_numbers():
    """Plain decoding can be measured by itself."""
    assert build_space(["off"], []) == ((SpecConfig.off(),), ())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param((["eagel"], [1]), "--method eagel", id="unknown-method"),
        pytest.param((["eagle3"], [0]), "--num-tokens 0", id="zero-tokens"),
        pytest.param((["eagle3"], []), "--num-tokens", id="no-tokens"),
        pytest.param((["eagle3"], [1], [0]), "--topk 0", id="zero-topk"),
        pytest.param((["eagle3"], [1], [4], [1]), "--num-draft-tokens 1", id="root-only"),
        pytest.param((["eagle3"], [1], [4]), "needs --num-draft-tokens", id="tree-without-nodes"),
    ],
)
def test_space_wrong_axis_names_flag_and_value(arguments, words):
    """Every mistake is a usage error that says which flag."""
    with pytest.raises(UsageError, match=words):
        build_space(*arguments)
