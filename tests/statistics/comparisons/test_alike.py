import numpy as np

from otb_analysis.statistics import Gram, alike

A, B, C, D = (("a", "none"), ("b", "none"), ("c", "none"), ("d", "none"))


def test_identical_and_proportional_estimators_are_named_after_the_first(gram_of):
    g = np.random.default_rng(0).normal(size=(2, 6, 4))
    gram = Gram(gram_of(np.stack([g[0], g[0], 0.75 * g[0], g[1]])), (A, B, C, D), 6)
    found = alike([gram])
    assert [(one.of, round(one.factor, 12), one.identical) for one in found.values()] == [
        (A, 1, True), (A, 1, True), (A, 0.75, False), (D, 1, True)
    ]  # fmt: skip
    assert alike([gram], [C])[A].of == C


def test_opposite_zero_and_partly_equal_gradients_are_not_alike(gram_of):
    rng = np.random.default_rng(1)
    a = rng.normal(size=(6, 4))
    almost = a.copy()
    almost[0] += 0.01  # one prompt of six
    gram = Gram(gram_of(np.stack([a, -a, 0 * a, almost])), (A, B, C, D), 6)
    assert all(one.of == label for label, one in alike([gram]).items())


def test_a_factor_that_changes_between_steps_is_no_multiple(gram_of):
    rng = np.random.default_rng(2)
    a, b = rng.normal(size=(2, 6, 4))
    steps = [Gram(gram_of(np.stack([x, f * x])), (A, B), 6) for x, f in ((a, 0.5), (b, 0.7))]
    assert alike(steps[:1])[B].of == A
    assert alike(steps)[B].of == B


def test_estimators_of_other_steps_are_not_compared(gram_of):
    a = np.random.default_rng(3).normal(size=(6, 4))
    both, alone = Gram(gram_of(np.stack([a, a])), (A, B), 6), Gram(gram_of(a[None]), (A,), 6)
    assert alike([both])[B].of == A
    assert alike([both, alone])[B].of == B


def test_only_those_that_were_asked_for_are_named_and_as_beside_the_others(gram_of):
    g = np.random.default_rng(4).normal(size=(2, 6, 4))
    steps = [Gram(gram_of(np.stack([g[0], g[0], 2 * g[0], g[1]])), (A, B, C, D), 6)]
    steps.append(Gram(gram_of(np.stack([g[1], g[0]])), (D, C), 6))
    asked = alike(steps, [C, B], others=False)
    assert list(asked) == [C, B] and asked == {label: alike(steps, [C, B])[label] for label in (C, B)}
