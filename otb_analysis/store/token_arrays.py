"""One step's tokens as [N, T] arrays again, one stored prompt under any estimator, and scalars by step, from frames."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pandas as pd

from otb_analysis.diagnostics import StepSeries
from otb_analysis.errors import InputError, StoreError
from otb_analysis.estimators import ESTIMATORS, available, entry_of, estimate, options_from_dict, registered, with_limit
from otb_analysis.schema import TABLES
from otb_analysis.types import Bool, EstimatorInputs, Float, Int, Label

FLOAT_COLUMNS = ("energy_proxy", "energy_calibrated", "grad_norm_sq", "logprob", "behavior_logprob", "entropy", "value")
TOKEN_COLUMNS = ("group", "rollout", "turn", "t", "token_id", "mask", "measured_by", "reward", *FLOAT_COLUMNS)
"""The columns of `tokens` that the arrays are made of."""

EXACT_ROWS = "grad_norm_sq IS NOT NULL AND coalesce(measured_by, 'exact') = 'exact'"
"""SQL over `tokens`: rows whose norm is exact. A run without `measured_by` had exact norms only."""

STEP_NUMBERS = tuple(c.name for c in TABLES["steps"] if c.dtype in ("DOUBLE", "BIGINT", "BOOLEAN") and not c.key)
"""The columns of `steps` that `step_series` has."""

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
        energy, known = None, [("reward", self.reward, "store the rewards")]
        if energy_source != "none":
            energy = sources.get(energy_source, np.where(self.exact, self.grad_norm_sq, np.nan))
            remedy = "take measured_groups() first or the other energy_source"
            known.append((f"{energy_source} energy", energy, remedy))
        for name, values, remedy in known:
            if lost := int(np.isnan(values[self.mask]).sum()):
                raise InputError(f"{lost} of {int(self.mask.sum())} policy tokens have no {name}; {remedy}.")
        value, entropy = (None if np.isnan(x[self.mask]).any() else x for x in (self.value, self.entropy))
        return EstimatorInputs(
            self.reward, self.mask, self.group, energy, value=value, turn=self.turn, entropy=entropy,
            rollout_norm_sq=None if np.isnan(self.rollout_norm_sq).any() else self.rollout_norm_sq,
            token_id=None if (self.token_id[self.mask] == PADDING).any() else self.token_id,
        )  # fmt: skip


def rebuild_token_arrays(where: str, tokens: pd.DataFrame, rollouts: pd.DataFrame) -> TokenArrays:
    """Return the arrays of one step.

    Raises:
        StoreError: The mask was not stored, so nothing says which tokens the policy sampled.
    """
    if tokens["mask"].isna().to_numpy().any():
        raise StoreError(f"{where} has tokens without a mask, so no estimator can be computed; write the run again.")
    # Every rollout in ascending order; `rollouts` has those without a token, too.
    of_tokens, listed = tokens["rollout"].to_numpy(np.int64), rollouts["rollout"].to_numpy(np.int64)
    rollout = np.union1d(of_tokens, listed)
    row, of_listed = np.searchsorted(rollout, of_tokens), np.searchsorted(rollout, listed)
    group, rollout_norm_sq = np.zeros_like(rollout), np.full(len(rollout), np.nan)
    group[row] = tokens["group"].to_numpy(np.int64)
    group[of_listed] = rollouts["group"].to_numpy(np.int64)
    rollout_norm_sq[of_listed] = floats(rollouts, "score_norm_sq")
    t = tokens["t"].to_numpy(np.int64)
    exact = tokens["grad_norm_sq"].notna().to_numpy(np.bool_)
    if exact.any():  # comparing texts takes long
        exact = exact & (tokens["measured_by"].fillna("exact") == "exact").to_numpy(np.bool_)
    columns = {
        "mask": (tokens["mask"].to_numpy(np.bool_), False),
        "reward": (floats(tokens, "reward"), 0.0),
        "turn": (tokens["turn"].to_numpy(np.int64), PADDING),
        "token_id": (tokens["token_id"].fillna(PADDING).to_numpy(np.int64), PADDING),
        "exact": (exact, False),
        **{name: (floats(tokens, name), np.nan) for name in FLOAT_COLUMNS},
    }
    arrays = dict[str, Any]()
    for name, (values, fill) in columns.items():
        arrays[name] = np.full((len(rollout), int(t.max(initial=-1)) + 1), fill, dtype=values.dtype)
        arrays[name][row, t] = values
    return TokenArrays(rollout=rollout, group=group, rollout_norm_sq=rollout_norm_sq, **arrays)


def floats(frame: pd.DataFrame, name: str) -> Float:
    """Return a column as float64, flags as 0 and 1, NaN where nothing was stored."""
    column = frame[name]
    if column.dtype == np.float64:  # a twentieth of the work
        return column.to_numpy(copy=True)
    return column.astype("Float64").to_numpy(np.float64, na_value=np.nan)


def step_series(steps: pd.DataFrame) -> StepSeries:
    """Return the scalars of a run by step, NaN where a step did not record one; flags become 0 and 1.

    A recorded NaN is ∞: frames do not tell it from what was not recorded, so the column `not_finite` names it.
    """
    ordered = steps.sort_values("step")
    columns = {name: floats(ordered, name) for name in STEP_NUMBERS if name in ordered}
    named = ordered["not_finite"].dropna() if "not_finite" in ordered else ordered["step"].iloc[:0]
    for at, names in zip(ordered.index.get_indexer(named.index), named, strict=True):
        for name in set(str(names).split(", ")) & set(columns):
            columns[name][at] = np.inf if np.isnan(columns[name][at]) else columns[name][at]
    return StepSeries(ordered["step"].to_numpy(np.int64), columns)


def in_words(label: Label) -> str:
    """Return how a label is called on the page Tokens: `otb (exact)`, `rloo`."""
    name, source = label
    return name if source == "none" else f"{name} ({source})"


def trained_label(name: str, config: Mapping[str, Any]) -> Label:
    """Return the estimator that trained and its energies; none and another name where it is not one of ours."""
    settings = config.get("estimator")
    energy = settings.get("energy") if isinstance(settings, Mapping) else None
    entry = registered(name)
    return (name, str(energy or "proxy") if entry is not None and entry.reads_energy else "none")


@dataclass(frozen=True)
class StoredPrompt:
    """One prompt at one step, with what its run trained with."""

    estimator: str  # Name of the estimator that trained; empty where the run names none
    config: Mapping[str, Any]  # The run's configuration, nested
    group: int
    tokens: pd.DataFrame  # The prompt's rows of `tokens`
    # Reads the step's arrays: of this group, or of all groups for None; raises as `RunStore.token_arrays`
    arrays: Callable[[int | None], TokenArrays]

    @property
    def trained(self) -> Label:
        """The estimator that trained and its energies."""
        return trained_label(self.estimator, self.config)

    def labels(self) -> list[Label]:
        """Return the estimators whose advantages are stored or can be computed; the trained one is first."""
        first, labels = self.trained, list[Label]()
        stored = bool(first[0] and self.tokens["advantage"].notna().any())
        try:
            arrays = self.arrays(self.group)
            arrays.estimator_inputs("none")
        except (InputError, StoreError):  # no rewards, or nothing says which tokens the policy sampled
            return [first] if stored else []
        for source in ("none", "proxy", "calibrated", "exact"):
            some = arrays.measured_groups() if source == "exact" else arrays
            with suppress(InputError):  # not measured at every token
                names = available(some.estimator_inputs(source)) if len(some.rollout) else []
                labels += [(name, source) for name in names if source == "none" or ESTIMATORS[name].reads_energy]
        return list(dict.fromkeys([first, *labels] if stored or first in labels else labels))

    def inputs(self, label: Label) -> tuple[EstimatorInputs, Int]:
        """Return an estimator's inputs and the rollouts of their rows: the prompt's; the step's where prompts couple.

        Raises:
            InputError: An input is missing, or the estimator is somebody's own: no code that a run names is run.
        """
        if registered(label[0]) is None:
            raise InputError(f"{label[0]} is no estimator of otb-analysis, so its formula cannot be shown.")
        arrays = self.arrays(None if entry_of(label[0]).batch_coupled else self.group)
        if label[1] == "exact":
            arrays = arrays.measured_groups()
        return arrays.estimator_inputs(label[1]), arrays.rollout

    def options(self, label: Label) -> Any:
        """Return an estimator's options: as trained for the one that did, else defaults, with the sampling limit."""
        settings, sample = (self.config.get(name) for name in ("estimator", "sample"))
        values = settings.get("options") if isinstance(settings, Mapping) and label == self.trained else None
        options = options_from_dict(label[0], values) if isinstance(values, Mapping) and values else None
        sizes = [sample.get(name) for name in ("max_new_tokens", "max_turns")] if isinstance(sample, Mapping) else []
        limit = int(np.prod([n for n in sizes if isinstance(n, int)])) if sizes and isinstance(sizes[0], int) else 0
        return with_limit(label[0], options, limit)

    def with_estimator(self, label: Label) -> pd.DataFrame:
        """Return the tokens with an estimator's baseline and advantage; those of the trained one are the stored ones.

        Raises:
            InputError: As `inputs`.
        """
        if label == self.trained and bool(self.tokens["advantage"].notna().any()):
            return self.tokens
        inputs, rollouts = self.inputs(label)
        estimates = estimate(label[0], inputs, self.options(label))
        rows, t = np.nonzero(inputs.mask & (inputs.group == self.group)[:, None])
        columns = {"baseline": estimates.baseline[rows, t], "advantage": estimates.advantage[rows, t]}
        estimated = pd.DataFrame(columns, index=pd.MultiIndex.from_arrays([rollouts[rows], t]))
        estimated = estimated.reindex(pd.MultiIndex.from_arrays([self.tokens[name] for name in ("rollout", "t")]))
        return self.tokens.assign(**{name: estimated[name].to_numpy() for name in columns})
