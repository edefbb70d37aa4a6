"""One stored prompt under any estimator: baseline and advantage computed again from its columns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from otb_analysis.errors import InputError, StoreError
from otb_analysis.estimators import ESTIMATORS, available, entry_of, estimate, options_from_dict, registered, with_limit
from otb_analysis.store.token_arrays import TokenArrays
from otb_analysis.types import EstimatorInputs, Int, Label

ENERGIES = ("proxy", "calibrated", "exact")
NAMES = ["rollout", "t"]


def in_words(label: Label) -> str:
    """Return how a label is called on the page Tokens: `otb (exact)`, `rloo`."""
    name, source = label
    return name if source == "none" else f"{name} ({source})"


def ours(name: str) -> bool:
    """Return whether a name stands for an estimator of this package."""
    return registered(name) is not None


def trained_label(name: str, config: Mapping[str, Any]) -> Label:
    """Return the estimator that trained and its energies; none and another name where it is not one of ours."""
    settings = config.get("estimator")
    energy = settings.get("energy") if isinstance(settings, Mapping) else None
    reads = ours(name) and entry_of(name).reads_energy
    return (name, str(energy or "proxy") if reads else "none")


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

    @property
    def _stored(self) -> bool:
        return bool(self.tokens["advantage"].notna().any())

    def labels(self) -> list[Label]:
        """Return the estimators whose advantages are stored or can be computed; the trained one is first."""
        first = self.trained
        stored = bool(first[0]) and self._stored
        try:
            arrays = self.arrays(self.group)
            found = [(name, "none") for name in _available(arrays, "none")]
        except (InputError, StoreError):  # no rewards, or nothing says which tokens the policy sampled
            return [first] if stored else []
        for source in ENERGIES:
            try:
                names = _available(arrays.measured_groups() if source == "exact" else arrays, source)
            except InputError:  # not measured at every token
                continue
            found += [(name, source) for name in names if ESTIMATORS[name].reads_energy]
        return list(dict.fromkeys([first, *found] if stored or first in found else found))

    def inputs(self, label: Label) -> tuple[EstimatorInputs, Int]:
        """Return an estimator's inputs and the rollouts of their rows: the prompt's; the step's where prompts couple.

        Raises:
            InputError: An input is missing, or the estimator is somebody's own: no code that a run names is run.
        """
        if not ours(label[0]):
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

    def estimated(self, label: Label) -> pd.DataFrame:
        """Return baseline and advantage of the prompt's policy tokens, by rollout and t.

        Raises:
            InputError: As `inputs`.
        """
        inputs, rollouts = self.inputs(label)
        found = estimate(label[0], inputs, self.options(label))
        rows, t = np.nonzero(inputs.mask & (inputs.group == self.group)[:, None])
        columns = {"baseline": found.baseline[rows, t], "advantage": found.advantage[rows, t]}
        return pd.DataFrame(columns, index=pd.MultiIndex.from_arrays([rollouts[rows], t], names=NAMES))

    def under(self, label: Label) -> pd.DataFrame:
        """Return the tokens with an estimator's baseline and advantage; those of the trained one are the stored ones.

        Raises:
            InputError: As `inputs`.
        """
        if label == self.trained and self._stored:
            return self.tokens
        found = self.estimated(label)
        index = pd.MultiIndex.from_arrays([self.tokens[name] for name in NAMES])
        columns = {name: found[name].reindex(index).to_numpy() for name in ("baseline", "advantage")}
        return self.tokens.assign(**columns)


def _available(arrays: TokenArrays, source: str) -> list[str]:
    return available(arrays.estimator_inputs(source)) if len(arrays.rollout) else []
