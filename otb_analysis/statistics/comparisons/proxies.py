"""What a proxy of the energies costs."""

from collections.abc import Sequence

import numpy as np

from otb_analysis.statistics.inference.intervals import Interval, jackknife_interval
from otb_analysis.statistics.moments import measures
from otb_analysis.statistics.moments.gram import REFERENCE, deleted_moments
from otb_analysis.types import Gram, Label


def gain_lost(
    grams: Sequence[Gram], proxy: Label, exact: Label, reference: Label = REFERENCE, n_prompts: int | None = None
) -> Interval | None:
    """Share of an estimator's efficiency gain that is lost by using a proxy for its energies.

    (e_exact − e_proxy)/(e_exact − e_reference) on the same rollouts: 0 when the proxy costs nothing, 1 when the gain
    over the reference is gone, negative when the proxy does better. This, not a correlation, is what a proxy is judged
    by.

    Args:
        reference: The unbiased estimator that stands for ∇J, and that the gain is counted from.
        n_prompts: Prompts P of the update that efficiency is stated for; by default a typical step's. The gain is
            largest, and the share best determined, where P is of the order of the noise scale.

    Returns:
        None where an efficiency is undefined or the exact form gains nothing over the reference; the interval is over
        prompts, of the ratio of the two differences.
    """
    labels = (exact, proxy, reference)
    having = [gram for gram in grams if all(label in gram.labels for label in labels)]
    if not having:
        return None
    batch = n_prompts or max(round(float(np.mean([gram.n_prompts for gram in having]))), 1)
    with_exact, with_proxy, plain = (
        measures.efficiency(deleted_moments(having, label, reference), batch) for label in labels
    )
    gain = with_exact - plain
    share = np.divide(with_exact - with_proxy, gain, out=np.full_like(gain, np.nan), where=gain > 0)
    estimand = f"share of the efficiency gain lost by {proxy} instead of {exact} in an update of {batch} prompts"
    return jackknife_interval(share[0], share[1:], estimand, scale="linear")
