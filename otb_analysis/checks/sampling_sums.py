"""Rows of the table `sampling` added up over steps: by test, by setting, by step and by position."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otb_analysis.errors import InputError
from otb_analysis.types import Bool, Float

LOCAL = ("temperature", "probability")
SUMS = ("n_tokens", "score", "variance", "observed", "gain", "residual_sq")
"""Columns of the table `sampling` that add up."""


@dataclass(frozen=True)
class ZScores:
    """Both z-scores of a part of the tokens; None where nothing was random."""

    at: int  # The step, or the first position of the bin
    n_tokens: int
    temperature: float | None  # z of Σ(log π_y + H)
    probability: float | None  # z of Σ(π_y − Σπ²)


@dataclass(frozen=True)
class SamplingSums:
    """Rows of the table `sampling`, of one step or many."""

    test: NDArray[np.str_]
    parameter: Float  # NaN at score tests
    position: Float  # NaN where the row is of all positions
    step: Float
    sums: Mapping[str, Float]  # By name in SUMS; NaN where the test has no such sum

    @classmethod
    def from_rows(cls, rows: Any) -> "SamplingSums":
        """Return the sums of a data frame, or of a step's columns as `SamplingCheck.rows` makes them.

        Raises:
            InputError: There are none.
        """
        test = np.array([str(name) for name in rows["test"]])
        if not (test == "probability").any():
            raise InputError(
                "there is no sampling check; measure the rollouts with: otb score --model DIR --rollouts FILE."
            )
        numbers = {
            name: _numbers(rows[name]) if name in rows else np.zeros(len(test))
            for name in ("parameter", "position", "step", *SUMS)
        }
        places = {name: numbers.pop(name) for name in ("parameter", "position", "step")}
        return cls(test, **places, sums=numbers)

    def total(self, test: str, column: str) -> float:
        """Return one sum of a score test over all rows; 0 where there are none."""
        return float(np.nansum(self.sums[column][(self.test == test) & np.isnan(self.parameter)]))

    def grid(self, test: str, column: str) -> dict[float, float]:
        """Return one sum at every setting that was tried; settings without it are left out."""
        here = (self.test == test) & ~np.isnan(self.parameter) & ~np.isnan(self.sums[column])
        settings, index = np.unique(self.parameter[here], return_inverse=True)
        values = np.bincount(index, self.sums[column][here], minlength=len(settings))
        return dict(zip(settings.tolist(), values.tolist(), strict=True))

    def has(self, test: str) -> bool:
        """Return whether a test ran."""
        return bool((self.test == test).any())

    def z_scores(self, by: Float) -> tuple[ZScores, ...]:
        """Return both z-scores by `step` or by `position`."""
        found = []
        for at in np.unique(by[(self.test == LOCAL[0]) & np.isnan(self.parameter)]).tolist():
            here = by == at
            n = int(self._sum(LOCAL[0], here, "n_tokens"))
            found.append(ZScores(int(at), n, *(self._z(test, here) for test in LOCAL)))
        return tuple(found)

    def _z(self, test: str, here: Bool) -> float | None:
        variance = self._sum(test, here, "variance")
        return self._sum(test, here, "score") / variance**0.5 if variance > 0 else None

    def _sum(self, test: str, here: Bool, column: str) -> float:
        return float(np.nansum(self.sums[column][here & (self.test == test) & np.isnan(self.parameter)]))

    def by_position(self, test: str) -> list[tuple[int, dict[str, float]]]:
        """Return the sums of a test at every position bin."""
        places = np.unique(self.position[(self.test == test) & ~np.isnan(self.position)])
        return [(int(p), {name: self._sum(test, self.position == p, name) for name in SUMS}) for p in places.tolist()]


def _numbers(values: Any) -> Float:
    """Return a list, or a column of a data frame, as numbers; None and missing ones become NaN."""
    if hasattr(values, "to_numpy"):
        return values.to_numpy(np.float64, na_value=np.nan)
    return np.array([np.nan if value is None else float(value) for value in values], np.float64)
