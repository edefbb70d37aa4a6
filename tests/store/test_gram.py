"""The Gram matrix goes to disk as each unordered pair once and comes back whole."""

import numpy as np
import pytest

from otb_analysis.errors import InputError
from otb_analysis.store import RunStore, StepTables, gram_rows, reader, subgroup_rows
from otb_analysis.types import Gram

LABELS = (("otb", "proxy"), ("otb", "exact"), ("rloo", "none"))


def random_gram(groups=(7, 2), seed=0):
    vectors = np.random.default_rng(seed).normal(size=(len(LABELS), len(groups), 5))
    return Gram(np.einsum("mpd,nqd->mnpq", vectors, vectors), LABELS, 8, groups=np.array(groups))


def test_gram_comes_back_with_the_order_of_its_labels_and_groups(writer):
    gram = random_gram()
    writer.write_step(4, StepTables(grams=gram_rows(4, gram)))
    read = RunStore(writer.path).grams()[4]
    assert read.labels == LABELS
    assert read.groups.tolist() == [7, 2]
    assert read.n_rollouts == 8
    np.testing.assert_allclose(read.inner, gram.inner, rtol=1e-15)


def test_step_without_gram_is_none(writer):
    writer.write_step(0, StepTables())
    assert RunStore(writer.path).grams() == {}


def test_rows_hold_each_unordered_pair_once():
    # Two labels on one group, g_1 = (1, 0), g_2 = (2, 3): inner products 1, 2, 13.
    gram = Gram(np.array([[1.0, 2.0], [2.0, 13.0]]).reshape(2, 2, 1, 1), LABELS[:2], 4, groups=np.array([0]))
    rows = gram_rows(0, gram)
    assert rows["inner_product"].tolist() == [1.0, 2.0, 13.0]
    assert rows["energy_source"].tolist() == ["proxy", "proxy", "exact"]
    assert rows["other_energy_source"].tolist() == ["proxy", "exact", "exact"]


def test_order_of_rows_on_disk_does_not_matter_for_the_numbers(writer):
    gram = random_gram()
    rows = gram_rows(0, gram)
    order = np.random.default_rng(1).permutation(len(rows["group"]))
    writer.write_step(0, StepTables(grams={name: values[order] for name, values in rows.items()}))
    read = RunStore(writer.path).grams()[0]
    m = [read.labels.index(label) for label in LABELS]
    p = [read.groups.tolist().index(group) for group in (7, 2)]
    np.testing.assert_allclose(read.inner[np.ix_(m, m, p, p)], gram.inner, rtol=1e-15)


def test_pairs_across_ranks_that_nobody_computed_are_nan(writer):
    first, second = random_gram((0,)), random_gram((1,), seed=1)
    rows = [gram_rows(0, gram) for gram in (first, second)]
    writer.write_step(0, StepTables(grams={name: np.concatenate([r[name] for r in rows]) for name in rows[0]}))
    read = RunStore(writer.path).grams()[0]
    assert np.isnan(read.inner[:, :, 0, 1]).all()
    np.testing.assert_allclose(read.inner[:, :, 1, 1], second.inner[:, :, 0, 0], rtol=1e-15)


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ((np.zeros((3, 3, 2, 1)), LABELS, 4), r"inner has shape \(3, 3, 2, 1\) but there are 3 labels"),
        ((np.zeros((3, 3, 2, 2)), LABELS, 4, None, np.array([1, 1])), "name every group once"),
    ],
)
def test_gram_whose_parts_do_not_fit_is_refused(parts, sentence):
    with pytest.raises(InputError, match=sentence):
        Gram(*parts)


def test_prompts_are_named_from_the_rollouts_so_that_a_returning_prompt_is_one_cluster(writer):
    rollouts = {"group": [7, 2], "rollout": [0, 1], "prompt_id": ["a", "b"]}
    writer.write_step(0, StepTables(rollouts=rollouts, grams=gram_rows(0, random_gram())))
    assert RunStore(writer.path).grams()[0].prompt == ("a", "b")


def test_all_grams_at_once_are_those_of_each_step(writer):
    for step in (0, 3):
        writer.write_step(step, StepTables(grams=gram_rows(step, random_gram(seed=step))))
    writer.write_step(1, StepTables())
    store = RunStore(writer.path)
    grams = store.grams()
    assert list(grams) == [0, 3]
    for step, gram in grams.items():
        np.testing.assert_array_equal(gram.inner, store.grams()[step].inner)
        assert gram.prompt is None


REFERENCES = (("rloo", "none"), frozenset({("rloo", "none"), ("otb", "exact"), ("unmeasured", "none")}))


@pytest.mark.parametrize("reference", [*REFERENCES, ("otb", "proxy"), ("unmeasured", "none")])
def test_reduced_gram_has_the_blocks_and_products_of_the_whole_one(writer, reference):
    for step in (0, 3):
        writer.write_step(step, StepTables(grams=gram_rows(step, random_gram(seed=step))))
    store = RunStore(writer.path)
    whole, reduced = store.grams(), store.reduced_grams(REFERENCES)
    assert list(reduced) == [0, 3]
    for step, gram in reduced.items():
        label = reference if reference == ("otb", "proxy") else LABELS[1]
        np.testing.assert_array_equal(gram.blocks([label], reference), whole[step].blocks([label], reference))
        np.testing.assert_array_equal(gram.products, whole[step].products)
        assert (gram.n_prompts, gram.group_index.tolist(), gram.n_rollouts) == (2, [7, 2], 8)


def test_reduced_gram_refuses_a_reference_that_it_was_reduced_without():
    with pytest.raises(InputError, match=r"reduced without \('otb', 'proxy'\)"):
        random_gram().reduced(REFERENCES).blocks([LABELS[1]], ("otb", "proxy"))


def test_what_comparisons_need_is_kept_when_a_step_is_written_and_no_gram_matrix_is_read_for_it(writer, monkeypatch):
    rollouts = {"group": [7, 2], "rollout": [0, 1], "prompt_id": ["a", "b"]}
    for step in (0, 1):
        gram = random_gram(seed=step)
        tables = StepTables(rollouts=rollouts, grams=gram_rows(step, gram), subgroups=subgroup_rows(step, {2: gram}))
        writer.write_step(step, tables)
    store, read = RunStore(writer.path), []
    real = reader.read_step
    monkeypatch.setattr(reader, "read_step", lambda *args: read.append(args[1].step) or real(*args))
    kept, halves = store.reduced_grams([("rloo", "none")]), store.subgroup_grams()
    assert not read
    other = store.reduced_grams([("otb", "proxy")])  # nobody foresaw this reference
    assert read == [0, 1]
    whole = store.grams()
    for step in (0, 1):
        assert kept[step].prompt == whole[step].prompt == ("a", "b")
        for reduced, reference in ((kept, ("rloo", "none")), (other, ("otb", "proxy"))):
            found, expected = (grams[step].blocks([("otb", "exact")], reference) for grams in (reduced, whole))
            np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(halves[2][step].inner, whole[step].inner)
        assert halves[2][step].labels == LABELS


def test_gram_matrices_of_several_shapes_come_back_as_they_are_and_from_one_file(writer):
    rng, grams = np.random.default_rng(0), []
    for step in range(5):
        shape = (3, 3, 2, 2) if step != 3 else (2, 2, 4, 4)
        inner = rng.normal(size=shape)
        groups = np.array([4, 2]) if step != 3 else np.arange(4)
        dim = 9 if step == 4 else None
        grams.append(Gram(inner + inner.transpose(1, 0, 3, 2), LABELS[: shape[0]], 7 + step, None, groups, dim))
        writer.write_step(step, StepTables(grams=gram_rows(step, grams[-1])))
    for _ in range(2):
        read = RunStore(writer.path).grams()
        for step, gram in enumerate(grams):
            np.testing.assert_array_equal(read[step].inner, gram.inner)
            assert read[step].labels == gram.labels and read[step].n_rollouts == gram.n_rollouts
            assert read[step].sketch_dim == gram.sketch_dim
            assert read[step].group_index.tolist() == gram.group_index.tolist()
        writer.finish()


def test_steps_with_a_column_are_known_without_opening_a_file(writer, tables):
    one = tables(0)
    for step in range(4):
        tokens = dict(one.tokens) | ({"attribution": np.ones(10)} if step % 2 else {})
        writer.write_step(step, StepTables(tokens if step else None, one.rollouts, one.steps))
    for _ in range(2):
        store = RunStore(writer.path)
        assert store.steps_with("tokens", "attribution") == [1, 3]
        assert store.steps_with("tokens", "step") == [1, 2, 3] and store.steps_with("rollouts", "step") == [0, 1, 2, 3]
        assert store.steps_with("tokens", "value") == [] and store.steps_with("sampling", "test") == []
        writer.finish()
