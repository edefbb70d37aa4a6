import numpy as np
import pytest


@pytest.fixture
def gram_of():
    """Gram matrix [M, M, P, P] of explicit group gradients [M, P, D]."""
    return lambda g: np.einsum("mpd,nqd->mnpq", g, g)


@pytest.fixture
def noisy_prompts():
    """Group gradients [M, P, D] of M estimators over fresh prompts: mean[m] + between-prompt part + noise[m]."""

    def draw(rng, means, n_prompts, noise=1.0):
        means = np.asarray(means, dtype=float)
        shared = rng.normal(size=(1, n_prompts, means.shape[1]))
        own = rng.normal(size=(len(means), n_prompts, means.shape[1]))
        return means[:, None, :] + 0.5 * shared + noise * own

    return draw
