"""How far each row of the engine benchmark is from float64, at a few tokens of the same rollout."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from otb_analysis import gradients
from otb_analysis.bench.engine_cases import LOOP, Case
from otb_analysis.types import Attribution, Float, ScoreNorms

CHECKED, PATHS = 32, 8
"""Tokens whose norms are compared, and whose path norms are: one float64 backward pass each."""


@dataclass(frozen=True)
class Exact:
    """Values by the reference engine on float64 copies of the weights.

    Attributes:
        tokens: Columns of the tokens whose norms ‖s_t‖² are compared.
        paths: Columns of the tokens whose path norms ‖Σ_{j≤t} s_j‖² are compared.
        rows: ‖Σ_t weights s_t‖² of the case's rows of weights.
        alignment: s_t·direction of all tokens [1, T + 1].
    """

    tokens: np.ndarray
    norm_sq: Float
    paths: np.ndarray
    path_norm_sq: Float
    rows: Float
    alignment: Float

    @classmethod
    def of(cls, case: Case) -> "Exact":
        """Compute them for a case with the model in float64."""
        length = case.mask.shape[1]
        tokens, paths = (np.unique(np.linspace(1, length - 1, n).round().astype(int)) for n in (CHECKED, PATHS))
        unit, prefix = np.eye(length)[tokens], np.tri(length)[paths]
        weights = np.concatenate([unit, prefix, case.weights[0]])[None]
        args = (case.model, case.input_ids, case.mask)
        norms = gradients.weighted_score_norms(*args, weights, engine="reference")[0]
        norm_sq, path_norm_sq, rows = np.split(norms, [len(tokens), len(tokens) + len(paths)])
        direction = {name: value.double() for name, value in case.direction.items()}
        along = gradients.gradient_attribution(*args, case.weights[:, 0], direction=direction, method="jvp")
        return cls(tokens, norm_sq, paths, path_norm_sq, rows, along.alignment)


def error_of(name: str, result: Any, exact: Exact | None) -> float | None:
    """Largest difference over the largest value; of a sketch the root mean square of relative errors.

    Of a batch, where nothing exact is known, an attribution along the batch's own gradient ḡ has |Σ share / ‖ḡ‖² − 1|.
    Returns None for a result that holds none of these values.
    """
    if exact is None:
        return abs(float(result.share.sum()) / result.norm_sq - 1) if isinstance(result, Attribution) else None
    if name == LOOP or isinstance(result, tuple):
        return _largest(result[1][0, exact.tokens], exact.norm_sq)
    if isinstance(result, Attribution):
        return _largest(result.alignment, exact.alignment)
    if isinstance(result, ScoreNorms) and name.startswith("sketch"):
        return float(np.sqrt(np.mean((result.norm_sq[0, exact.tokens] / exact.norm_sq - 1) ** 2)))
    if isinstance(result, ScoreNorms) and result.path_norm_sq is not None:
        return _largest(result.path_norm_sq[0, exact.paths], exact.path_norm_sq)
    if isinstance(result, ScoreNorms):
        return _largest(result.norm_sq[0, exact.tokens], exact.norm_sq)
    if isinstance(result, np.ndarray) and result.shape == (1, len(exact.rows)):
        return _largest(result[0], exact.rows)
    return None


def _largest(got: Float, expected: Float) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())
