"""Were groups with equal rewards left out before they were recorded? What success rates say where no group is dead."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from otb_analysis.phases import plural

IMPROBABLE = 1e-3
"""A file without a dead group is called filtered where its own success rates give that a lower probability."""
RATES = np.linspace(0.005, 0.995, 100)
"""Success rates that a prompt may have."""
ROUNDS = 1_000
"""Steps of the EM algorithm; the likelihood has one maximum, and more rounds change the share by less than a tenth."""


@dataclass(frozen=True)
class Filtered:
    """No group has equal rewards, though the success rates make that improbable."""

    n_groups: int
    expected: float  # Dead groups among as many, by the success rates
    chance: float  # Of none

    @property
    def line(self) -> str:
        """The finding in a sentence."""
        chance = f"{self.chance:.1g}" if self.chance >= 1e-12 else "below 1e-12"
        return (
            f"None of {plural(self.n_groups, 'group')} is dead, though {self.expected:.1f} would be by the success "
            f"rates (chance of none {chance}): the trainer filtered dead groups before it wrote them."
        )

    @property
    def note(self) -> str:
        """What that means for numbers of groups of other sizes."""
        return (
            "Dead groups were filtered, so success rates are those of the prompts that were kept: of all sampled "
            "groups more are dead, at every size."
        )


def filtered_groups(groups: Sequence[Sequence[float]]) -> Filtered | None:
    """Return that dead groups were filtered; None where one is there, rewards have not two values, or it may be chance.

    A group of n has k successes with probability ∫ C(n, k)·pᵏ(1 − p)ⁿ⁻ᵏ dF(p). F, the success rates' distribution over
    prompts, is the one of maximum likelihood on a grid (Laird, 1978; EM from the uniform one), as if nothing had been
    filtered: so it holds as few dead groups as the others allow. The chance of none is Π_g (1 − ∫ pⁿ + (1 − p)ⁿ dF).
    With p = ½ and n = 8, 2 of 256 groups are dead, so 1,000 without one are odd.
    """
    larger = [group for group in groups if len(group) > 1]
    values = sorted({reward for group in larger for reward in group})
    if len(values) != 2 or any(len(set(group)) == 1 for group in larger):
        return None
    cells = Counter((len(group), sum(reward == values[1] for reward in group)) for group in larger)
    (n, k), times = np.array(list(cells)).T[:, :, None], np.array(list(cells.values()), np.float64)
    logs = k * np.log(RATES) + (n - k) * np.log1p(-RATES)
    likelihood = np.exp(logs - logs.max(axis=1, keepdims=True))  # [cells, rates]; a row's scale cancels
    weight = np.full(len(RATES), 1 / len(RATES))
    for _ in range(ROUNDS):
        weight = weight * ((times / (likelihood @ weight)) @ likelihood) / times.sum()
    dead = (RATES**n + (1 - RATES) ** n) @ weight  # of each cell's groups
    chance = float(np.exp(times @ np.log1p(-dead)))
    return Filtered(len(larger), float(times @ dead), chance) if chance < IMPROBABLE else None
