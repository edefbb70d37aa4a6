import numpy as np
import pandas as pd
import pytest

from otb_analysis.types import Gram

LABELS = (("rloo", "none"), ("group_mean", "none"), ("otb", "exact"), ("otb", "proxy"))


def gram_of(vectors: np.ndarray, labels=LABELS) -> Gram:
    """Gram matrix of group gradients [M, P, D]."""
    return Gram(np.einsum("mpd,nqd->mnpq", vectors, vectors), labels, n_rollouts=8 * vectors.shape[1])


@pytest.fixture
def vectors():
    """Gradients [4, P, D] by P: group_mean is 7/8 of rloo, otb half as noisy, otb from the proxy a little noisier."""

    def make(n_prompts: int, seed: int = 0) -> np.ndarray:
        random = np.random.default_rng(seed)
        truth, noise = np.eye(12)[0], random.normal(size=(n_prompts, 12)) * 0.3
        rloo = truth + noise
        return np.stack([rloo, 7 / 8 * rloo, truth + noise / 2, truth + noise * 0.6])

    return make


@pytest.fixture
def grams(vectors):
    """Three measured steps with 16 prompts each."""
    return {step: gram_of(vectors(16, step)) for step in (0, 10, 20)}


@pytest.fixture
def tokens():
    """One prompt, three rollouts; rollout 1 has a tool token, rollout 2 was not measured."""
    rows = [
        # rollout, t, token, mask, reward, logprob, proxy, exact, baseline, advantage
        (0, 0, "a", True, 0.0, -0.1, 0.02, 2.0, 0.25, 0.75),
        (0, 1, "b\n", True, 1.0, -0.7, 0.50, 6.0, 0.25, 0.75),
        (1, 0, " c", True, 0.0, -1.2, 0.90, 10.0, 0.5, -0.5),
        (1, 1, "tool", False, 0.0, None, None, None, None, None),
        (1, 2, "<b>", True, 0.0, -0.2, 0.10, 4.0, 0.5, -0.5),
        (2, 0, "", True, 1.0, -0.5, 0.30, None, 0.0, 1.0),
    ]
    names = ["rollout", "t", "token", "mask", "reward", "logprob", "energy_proxy", "grad_norm_sq", "baseline"]
    table = pd.DataFrame(rows, columns=[*names, "advantage"]).assign(step=0, group=0)
    return table.astype({"logprob": float, "energy_proxy": float, "grad_norm_sq": float})
