"""Small random policies shared by the enumeration tests."""

import numpy as np
import pytest

from studies.lib.enumeration.trees import TreeSpec, random_tree

SPECS = {
    f"{'shared' if shared else 'tabular'}-{'dense' if dense else 'terminal'}{'-end' if end else ''}": TreeSpec(
        horizon=3, shared=shared, dense=dense, end_token=end
    )
    for shared in (None, 5)
    for dense in (False, True)
    for end in (False, True)
}


@pytest.fixture(params=SPECS)
def tree(request):
    return random_tree(SPECS[request.param], np.random.default_rng(7))


@pytest.fixture
def draw():
    """Draw one tree: draw(seed, horizon=…, shared=…, …)."""
    return lambda seed, **spec: random_tree(TreeSpec(**spec), np.random.default_rng(seed))
