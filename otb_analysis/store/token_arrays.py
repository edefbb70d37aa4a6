"""One step's tokens as [N, T] arrays again, so that any estimator can be computed from disk."""

from dataclasses import dataclass, fields

import numpy as np
import pandas as pd

from otb_analysis.errors import InputError, StoreError
from otb_analysis.types import Bool, EstimatorInputs, Float, Int

FLOAT_COLUMNS = ("energy_proxy", "energy_calibrated", "grad_norm_sq", "logprob", "behavior_logprob", "entropy", "value")
TOKEN_COLUMNS = ("group", "rollout", "turn", "t", "token_id", "mask", "measured_by", "reward", *FLOAT_COLUMNS)
"""The columns of `tokens` that the arrays are made of."""

EXACT_ROWS = "grad_norm_sq IS NOT NULL AND coalesce(measured_by, 'exact') = 'exact'"
"""SQL over `tokens`: rows whose norm is exact. A run without `measured_by` had exact norms only."""

PADDING = -1  # `turn` and `token_id` where there is no token, or none was stored


@dataclass(frozen=True)
class TokenArrays:
    """One step rebuilt from disk; made by `RunStore.token_arrays`, for computing estimators again.

    Column t is the token with that index in the completion; T is the longest completion. Floats are NaN where
    nothing was measured and at padding, except `reward`, which is 0 at padding: nothing is paid there.
    """

    rollout: Int  # Index of each rollout within the step [N], ascending; rollouts without tokens are there too
    group: Int  # Its prompt [N]
    mask: Bool  # True where the policy sampled a token [N, T]
    reward: Float  # Reward paid at each token [N, T]
    turn: Int  # Turn of each token [N, T], −1 at padding
    token_id: Int  # Vocabulary index [N, T], −1 at padding
    energy_proxy: Float  # ‖e_y − π‖² [N, T]
    energy_calibrated: Float  # The same, calibrated on the step's measured tokens [N, T]
    grad_norm_sq: Float  # ‖∇_θ log π(y_t)‖² [N, T], as measured or as estimated
    exact: Bool  # True where `grad_norm_sq` was measured exactly [N, T]
    logprob: Float  # log π(y_t) in nats [N, T]
    behavior_logprob: Float  # The sampler's log-probability in nats [N, T]
    entropy: Float  # Entropy in nats of the distribution y_t was drawn from [N, T]
    value: Float  # V(h_t) before y_t [N, T]
    rollout_norm_sq: Float  # ‖Σ_t ∇_θ log π(y_t)‖² [N]

    def select(self, rows: Bool | Int) -> "TokenArrays":
        """Return some of the rollouts, by true entries [N] or by indices."""
        return TokenArrays(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    def measured_groups(self) -> "TokenArrays":
        """Return the groups whose policy tokens all have an exact norm: what `estimator_inputs("exact")` accepts."""
        whole = (self.exact | ~self.mask).all(axis=1)
        return self.select(~np.isin(self.group, self.group[~whole]))

    def estimator_inputs(self, energy_source: str = "proxy") -> EstimatorInputs:
        """Return what `estimate` takes; an optional input that is not there for every policy token is None.

        Args:
            energy_source: `proxy` (energy_proxy), `calibrated` (energy_calibrated), `exact` (grad_norm_sq) or `none`.

        Raises:
            InputError: The source is another, or a policy token has no reward, or no energy of that source.
        """
        sources = {"proxy": self.energy_proxy, "calibrated": self.energy_calibrated}
        if energy_source not in (*sources, "exact", "none"):
            raise InputError(f"energy_source is {energy_source!r}; pass 'proxy', 'calibrated', 'exact' or 'none'.")
        self._check_measured("reward", self.reward, "store the rewards")
        energy = None
        if energy_source != "none":
            energy = sources.get(energy_source, np.where(self.exact, self.grad_norm_sq, np.nan))
            self._check_measured(
                f"{energy_source} energy", energy, "take measured_groups() first or the other energy_source"
            )
        return EstimatorInputs(
            reward=self.reward,
            mask=self.mask,
            group=self.group,
            energy=energy,
            rollout_norm_sq=None if np.isnan(self.rollout_norm_sq).any() else self.rollout_norm_sq,
            value=self._whole(self.value),
            turn=self.turn,
            token_id=None if (self.token_id[self.mask] == PADDING).any() else self.token_id,
            entropy=self._whole(self.entropy),
        )

    def _whole(self, values: Float) -> Float | None:
        """Return a column that every policy token has, else None."""
        return None if np.isnan(values[self.mask]).any() else values

    def _check_measured(self, name: str, values: Float, remedy: str) -> None:
        missing = int(np.isnan(values[self.mask]).sum())
        if missing:
            raise InputError(f"{missing} of {int(self.mask.sum())} policy tokens have no {name}; {remedy}.")


def rebuild_token_arrays(where: str, tokens: pd.DataFrame, rollouts: pd.DataFrame) -> TokenArrays:
    """Return the arrays of one step.

    Raises:
        StoreError: The mask was not stored, so nothing says which tokens the policy sampled.
    """
    if tokens["mask"].isna().to_numpy().any():
        raise StoreError(f"{where} has tokens without a mask, so no estimator can be computed; write the run again.")
    rollout, group, rollout_norm_sq = _rollout_index(tokens, rollouts)
    place = (np.searchsorted(rollout, tokens["rollout"].to_numpy(np.int64)), tokens["t"].to_numpy(np.int64))
    shape = (len(rollout), int(place[1].max(initial=-1)) + 1)
    exact = (tokens["measured_by"].fillna("exact") == "exact") & tokens["grad_norm_sq"].notna()
    columns = {name: _scatter(shape, place, floats(tokens, name), np.nan) for name in FLOAT_COLUMNS}
    return TokenArrays(
        rollout=rollout,
        group=group,
        mask=_scatter(shape, place, tokens["mask"].to_numpy(np.bool_), False),
        reward=_scatter(shape, place, floats(tokens, "reward"), 0.0),
        turn=_scatter(shape, place, tokens["turn"].to_numpy(np.int64), PADDING),
        token_id=_scatter(shape, place, tokens["token_id"].fillna(PADDING).to_numpy(np.int64), PADDING),
        exact=_scatter(shape, place, exact.to_numpy(np.bool_), False),
        rollout_norm_sq=rollout_norm_sq,
        **columns,
    )


def _rollout_index(tokens: pd.DataFrame, rollouts: pd.DataFrame) -> tuple[Int, Int, Float]:
    """Return every rollout's index, ascending, its group and its score norm; `rollouts` knows those without a token."""
    of_tokens, known = tokens["rollout"].to_numpy(np.int64), rollouts["rollout"].to_numpy(np.int64)
    rollout = np.union1d(of_tokens, known)
    group, norm = np.zeros_like(rollout), np.full(len(rollout), np.nan)
    group[np.searchsorted(rollout, of_tokens)] = tokens["group"].to_numpy(np.int64)
    group[np.searchsorted(rollout, known)] = rollouts["group"].to_numpy(np.int64)
    norm[np.searchsorted(rollout, known)] = floats(rollouts, "score_norm_sq")
    return rollout, group, norm


def floats(frame: pd.DataFrame, name: str) -> Float:
    """Return a column as float64, flags as 0 and 1, NaN where nothing was stored."""
    column = frame[name]
    if column.dtype == np.float64:  # a twentieth of the work
        return column.to_numpy(copy=True)
    return column.astype("Float64").to_numpy(np.float64, na_value=np.nan)


def _scatter(shape: tuple[int, int], place: tuple[Int, Int], values: np.ndarray, fill: float | bool) -> np.ndarray:
    array = np.full(shape, fill, dtype=values.dtype)
    array[place] = values
    return array
