import numpy as np
import pytest

from otb_analysis import schema
from otb_analysis.errors import InputError
from otb_analysis.statistics import Gram, gram_columns, grams_from_columns, pooled_statistics

LABELS = (("rloo", "none"), ("otb", "exact"), ("otb", "proxy"))


def test_a_matrix_survives_its_rows_in_any_order(gram_of, noisy_prompts):
    rng = np.random.default_rng(0)
    grams = {s: Gram(gram_of(noisy_prompts(rng, [[2, 1]] * 3, 4)), LABELS, 16) for s in (3, 7)}
    parts = [gram_columns(g, s) for s, g in grams.items()]
    order = rng.permutation(2 * 12 * 13 // 2)
    table = {name: np.concatenate([p[name] for p in parts])[order] for name in parts[0]}
    back = grams_from_columns(table, {3: 16, 7: 16})
    assert list(back) == [3, 7]
    for step, gram in back.items():
        at = [gram.labels.index(label) for label in LABELS]
        np.testing.assert_array_equal(gram.inner[np.ix_(at, at)], grams[step].inner)


def test_columns_are_those_of_the_schema_and_each_pair_stands_once(gram_of, noisy_prompts):
    gram = Gram(gram_of(noisy_prompts(np.random.default_rng(1), [[2, 1]] * 3, 2)), LABELS, 8)
    columns = gram_columns(gram, 5, group=[4, 9])
    assert list(columns) == [c.name for c in schema.GRAMS]
    assert {len(v) for v in columns.values()} == {6 * 7 // 2}
    assert set(columns["group"]) == {4, 9}


def test_prompt_names_cluster_across_steps(gram_of, noisy_prompts):
    rng = np.random.default_rng(2)
    parts = [gram_columns(Gram(gram_of(noisy_prompts(rng, [[2, 1]], 3)), LABELS[:1], 3), s) for s in (0, 1)]
    table = {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}
    named = grams_from_columns(table, {0: 3, 1: 3}, {(s, g): "abc"[g] for s in (0, 1) for g in range(3)})
    assert pooled_statistics(list(named.values()))[0].n_clusters == 3
    assert pooled_statistics(list(grams_from_columns(table, {0: 3, 1: 3}).values()))[0].n_clusters == 6


def test_no_prompts_give_no_rows():
    columns = gram_columns(Gram(np.zeros((3, 3, 0, 0)), LABELS, 0), 0)
    assert {len(v) for v in columns.values()} == {0}
    assert grams_from_columns(columns, {}) == {}


def test_a_step_without_a_count_of_rollouts_is_named(gram_of, noisy_prompts):
    gram = Gram(gram_of(noisy_prompts(np.random.default_rng(3), [[2, 1]], 2)), LABELS[:1], 2)
    with pytest.raises(InputError, match="no entry for step 4"):
        grams_from_columns(gram_columns(gram, 4), {})
