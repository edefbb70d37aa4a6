"""What is known of the tokens' scores at a step: one record, which every level of measuring adds to.

It alone decides `measured_by`: exact norms stand, whoever measured them; estimates fill only what nobody measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from otb_analysis.energies import Calibration
from otb_analysis.statistics import Totals, difference_total, horvitz_thompson
from otb_analysis.types import Bool, Float, Int


@dataclass(frozen=True)
class DrawnTokens:
    """How the tokens of the level `sampled` were drawn, and what their norms say about all others."""

    # π within the measured groups [N, T], 1 in those measured whole; NaN outside them and of the mask.
    probability: Float
    share: float  # Share of the step's groups that were measured; groups come in random order
    calibration: Calibration  # Proxy to exact energy, fitted on the measured tokens
    calibrated: Float  # Its prediction for every policy token [N, T], zero outside the mask

    @property
    def population(self) -> Bool:
        """True at the tokens that could be drawn [N, T]."""
        return np.isfinite(self.probability)


@dataclass(frozen=True)
class TokenMeasurements:
    """What was measured of a step's scores s_{n,t} = ∇ log π(y_{n,t}); made by the levels, read by the store."""

    norm_sq: Float  # ‖s_{n,t}‖² [N, T], exact or estimated; NaN where it was not measured
    stderr: Float  # Standard error of estimates [N, T]; those of one step share their directions and do not average out
    measured_by: NDArray[np.str_]  # How, at each token [N, T]: `none`, `exact` or `sketch`
    inclusion_prob: Float  # Chance of a token to be measured at this step [N, T]; known of tokens not drawn, too
    rollout_norm_sq: Float  # ‖Σ_t s_{n,t}‖² of rollouts whose group was measured whole [N], else NaN
    drawn: DrawnTokens | None = None  # How tokens were drawn, if the level `sampled` ran
    n_sketched: int = 0  # Groups with estimated norms
    # Columns of `tokens` that further levels fill [N, T], by name; NaN where nothing was measured.
    further: Mapping[str, Float] = field(default_factory=dict)

    @classmethod
    def nothing(cls, shape: tuple[int, ...]) -> "TokenMeasurements":
        """Return the record of a step [N, T] at which nothing was measured."""
        unknown = np.full(shape, np.nan)
        return cls(unknown, unknown, np.full(shape, "none", "<U6"), unknown, np.full(shape[0], np.nan))

    @classmethod
    def exact(cls, norm_sq: Float, rollout_norm_sq: Float, group: Int) -> "TokenMeasurements":
        """Return the record of groups that were measured whole; both norms are NaN elsewhere."""
        known = np.isfinite(norm_sq)
        # Prompts come in random order, so measuring the first groups is drawing that share of the step's groups.
        share = len(np.unique(group[known.any(axis=1)])) / max(len(np.unique(group)), 1)
        return replace(
            cls.nothing(norm_sq.shape),
            norm_sq=norm_sq,
            measured_by=np.where(known, "exact", "none"),
            inclusion_prob=np.where(known, share, np.nan),
            rollout_norm_sq=rollout_norm_sq,
        )

    @classmethod
    def joined(cls, parts: Sequence["TokenMeasurements"], group: Int) -> "TokenMeasurements":
        """Return the exact norms of several processes as one record; a number beats NaN, which is not measured."""
        norm_sq = np.fmax.reduce([part.norm_sq for part in parts])
        return cls.exact(norm_sq, np.fmax.reduce([part.rollout_norm_sq for part in parts]), group)

    @property
    def whole(self) -> Bool:
        """True at rollouts whose group was measured whole [N]."""
        return np.isfinite(self.rollout_norm_sq)

    @property
    def whole_norm_sq(self) -> Float:
        """Exact norms of the groups that were measured whole [N, T], NaN elsewhere: what estimators may read."""
        return np.where(self.whole[:, None], self.norm_sq, np.nan)

    def with_drawn(self, norm_sq: Float, drawn: DrawnTokens) -> "TokenMeasurements":
        """Add exact norms of drawn tokens; `norm_sq` [N, T] repeats those that were known."""
        return replace(
            self,
            norm_sq=norm_sq,
            measured_by=np.where(np.isfinite(norm_sq), "exact", "none"),
            inclusion_prob=drawn.share * drawn.probability,
            drawn=drawn,
        )

    def with_sketched(self, norm_sq: Float, stderr: Float, n_groups: int, share: float) -> "TokenMeasurements":
        """Add estimates of whole groups of which nothing was measured; NaN elsewhere."""
        here = np.isfinite(norm_sq)
        return replace(
            self,
            norm_sq=np.where(here, norm_sq, self.norm_sq),
            stderr=stderr,
            measured_by=np.where(here, "sketch", self.measured_by),
            inclusion_prob=np.where(here, share, self.inclusion_prob),
            n_sketched=n_groups,
        )

    def with_groups(self, norm_sq: Float, share: float) -> "TokenMeasurements":
        """Add exact norms of the tokens of whole groups of which nothing was measured; NaN elsewhere."""
        here = np.isfinite(norm_sq)
        return replace(
            self,
            norm_sq=np.where(here, norm_sq, self.norm_sq),
            measured_by=np.where(here, "exact", self.measured_by),
            inclusion_prob=np.where(here, share, self.inclusion_prob),
        )

    def with_columns(self, columns: Mapping[str, Float]) -> "TokenMeasurements":
        """Add columns of `tokens` [N, T], NaN where nothing was measured."""
        return replace(self, further={**self.further, **columns})

    @property
    def energy_total(self) -> Totals | None:
        """Horvitz–Thompson total of the step's energy; None where no tokens were drawn or groups were left out."""
        if self.drawn is None or self.drawn.share < 1:
            return None
        chosen = self.drawn.population
        return horvitz_thompson(self.norm_sq[chosen], self.drawn.probability[chosen])

    def rollout_totals(self) -> tuple[Float, Float]:
        """Return realized energy W_T of each rollout and its standard error [N], with the calibrated proxy's help.

        NaN for rollouts of groups that were left out, and an error of NaN where no token of the rollout was drawn.
        """
        energy, stderr = np.full(len(self.norm_sq), np.nan), np.full(len(self.norm_sq), np.nan)
        if self.drawn is not None:
            chosen, drawn = self.drawn.population, self.drawn
            totals = difference_total(
                self.norm_sq[chosen], drawn.calibrated[chosen], drawn.probability[chosen], np.nonzero(chosen)[0]
            )
            energy[totals.labels], stderr[totals.labels] = totals.estimate, totals.stderr
        return energy, stderr

    def columns(self, tokens: tuple[Int, Int], mask: Bool) -> dict[str, object]:
        """Return the columns of `tokens` that measuring fills; masked entries were not measured.

        `tokens` is the rollout and the position of each row, `mask` [N, T] is true at policy tokens.
        """

        def known(x: Float) -> np.ma.MaskedArray:
            return np.ma.masked_invalid(np.where(mask, x, np.nan)[tokens])

        columns: dict[str, object] = {
            "grad_norm_sq": known(self.norm_sq),
            "measured_by": np.where(mask, self.measured_by, "none")[tokens],
            "inclusion_prob": known(self.inclusion_prob),
        }
        if self.n_sketched:
            columns["grad_norm_sq_stderr"] = known(self.stderr)
        if self.drawn is not None:
            columns["energy_calibrated"] = known(self.drawn.calibrated)
        return columns | {name: known(x) for name, x in self.further.items()}

    def rollout_columns(self) -> dict[str, object]:
        """Return the columns of `rollouts` that measuring fills; masked entries were not measured."""
        energy, stderr = self.rollout_totals()
        columns = {"score_norm_sq": self.rollout_norm_sq, "energy_total": energy, "energy_total_stderr": stderr}
        return {name: np.ma.masked_invalid(x) for name, x in columns.items() if np.isfinite(x).any()}
