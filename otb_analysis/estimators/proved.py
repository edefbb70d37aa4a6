"""What a run's stored configuration says of its estimators: which one trained, and which projections are proved.

c = ⟨m, ∇J⟩/‖∇J‖² need not be estimated where it is proved. The registry says which entries are unbiased, and under
which conditions; the configuration says whether the run met them. One that does not say counts as one that did not.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from otb_analysis.config import section
from otb_analysis.errors import InputError, nearest
from otb_analysis.estimators.registry import ESTIMATORS, registered
from otb_analysis.objectives.ratios import RATIOS
from otb_analysis.objectives.shaping import SHAPINGS
from otb_analysis.types import Gram, Label, Proved

PLAIN_SAMPLING = frozenset(
    (
        *("prompts", "group_size", "max_new_tokens", "max_turns", "temperature", "engine", "vllm_memory"),
        *("filter", "filter_options", "filter_rounds", "soft", "soft_noise"),
    )
)
"""Known settings of sampling; with these alone and no filter, tokens (soft ones too) come from the scored policy."""

SOURCES = ("none", "proxy", "exact")
"""Energies that do not look at rollout i where it is left out; a calibration is fitted on it too."""


CONDITIONS: dict[tuple[str, str], tuple[tuple[object, ...], str]] = {
    ("objective", "staleness"): ((0,), "its rollouts are older than the policy"),
    ("objective", "epochs"): ((1,), "it updates more than once on a batch"),
    ("objective", "minibatches"): ((1,), "it updates more than once on a batch"),
    ("objective", "ratio"): (
        ("none", *(name for name, ratio in RATIOS.items() if ratio.keeps_mean)),
        "its importance ratios are clipped or cut",
    ),
    ("objective", "shaping"): (
        tuple(name for name, shaping in SHAPINGS.items() if "group" not in shaping.needs),
        "its rewards are reshaped or filtered by the group's outcome",
    ),
    ("sample", "engine"): (("transformers",), "another engine sampled than was scored"),
    ("optimize", "precision"): (("float32",), "it sampled in half precision and was measured in single"),
}
"""(section, setting) of a stored configuration → what it may be, and the reason where it is something else."""


def unproved_because(config: Mapping[str, Any]) -> str:
    """Return why nothing is proved of a run's estimators; empty where the registered conditions are met."""
    if "source" in config:
        if config.get("plain_sampling") is True:
            return ""
        nobody = "its rollouts were recorded elsewhere (--plain-sampling states that they meet them)"
        return str(config.get("not_plain") or nobody)
    for (part, name), (allowed, wrong) in CONDITIONS.items():
        settings = section(config, part)
        if name not in settings:
            return f"its configuration does not say {part}.{name}"
        if settings[name] not in allowed:
            return wrong
    sample = section(config, "sample")
    if sample.get("filter", "none") != "none":  # earlier runs had no filters
        return "its sampling kept rollouts by their outcome"
    if odd := sorted(set(sample) - PLAIN_SAMPLING):
        return f"its sampling has the setting {odd[0]}"
    return ""


def proved(labels: Iterable[Label], config: Mapping[str, Any]) -> Proved:
    """Return the known projections among a run's labels: 1 where unbiased, 1 − 1/N for means over all N rollouts.

    Returns:
        Empty where the run does not meet the conditions. Entries that couple prompts do not stand for ∇J, since
        products of their gradients over different prompts are not those of independent ones.
    """
    if unproved_because(config):
        return Proved()
    sample, trained, known = section(config, "sample"), section(config, "estimator"), dict[Label, float]()
    size, prompts = sample.get("group_size"), sample.get("prompts")
    alone = set[Label]()
    for name, source in labels:
        entry = registered(name)
        if entry is None or source not in SOURCES or entry.target != "∇J":
            continue
        if entry.unbiased:
            # Only the estimator that trains has other options than the defaults.
            options = trained.get("options") if trained.get("name") == name else {}
            if not isinstance(options, Mapping) or options.get("tail", "group") not in ("own_return", "group"):
                continue
            exact = ("discount", "decay") if name == "value" else ()
            if all(float(options.get(option, 1.0)) == 1.0 for option in exact):
                known[name, source] = 1.0
                alone |= set() if entry.batch_coupled else {(name, source)}
        elif entry.shrinks_by and isinstance(size, int) and isinstance(prompts, int):
            rollouts = size if entry.shrinks_by == "group" else size * prompts
            if rollouts > 1 and size * prompts > 1:
                known[name, source] = 1.0 - 1.0 / rollouts
    return Proved(known, frozenset(alone))


def standing_for_truth(labels: Iterable[Label], config: Mapping[str, Any]) -> frozenset[Label]:
    """Return which of these labels and of all in the registry stand for ∇J: `proved(…).truth` is a part of them."""
    return proved([*labels, *((name, source) for name in ESTIMATORS for source in SOURCES)], config).truth


def proved_in_all(runs: Sequence[tuple[Iterable[Label], Mapping[str, Any]]]) -> Proved:
    """Return what is proved of every label in all the runs that have it, so that their steps can be pooled."""
    measured = [(frozenset(labels), config) for labels, config in runs]
    parts = [(labels, proved(labels, config)) for labels, config in measured]
    every = {label for labels, _ in parts for label in labels}
    having = {label: [known for labels, known in parts if label in labels] for label in every}
    values = {label: {run.projection.get(label) for run in runs} for label, runs in having.items()}
    known = {label: c for label, cs in values.items() if len(cs) == 1 and (c := next(iter(cs))) is not None}
    truth = (label for label in known if all(label in part.truth for part in having[label]))
    return Proved(known, frozenset(truth))


def trained_labels(config: Mapping[str, Any], grams: Iterable[Gram]) -> tuple[Label, ...]:
    """Return the estimator that a run trains with; empty where its configuration names none that was measured."""
    measured = [label for gram in grams for label in gram.labels]
    try:
        label = trained_label(config, measured)
    except InputError:  # a run of somebody else's tool need not name one of ours
        return ()
    return (label,) if label in measured else ()


def trained_label(config: Mapping[str, Any], measured: Collection[Label] = ()) -> Label:
    """Return (estimator, energy source) of the estimator that a run trains with, as its Gram matrices name it.

    `measured` are the labels of its Gram matrices. They name custom estimators, which are not in `ESTIMATORS`.

    Raises:
        InputError: The configuration names no known estimator, and none that was measured.
    """
    chosen = config.get("estimator")
    name = str(chosen.get("name", "") if isinstance(chosen, Mapping) else chosen or "")
    energy = str(chosen.get("energy", "proxy") if isinstance(chosen, Mapping) else "proxy")
    if name not in ESTIMATORS:
        sources = [source for estimator, source in measured if estimator == name]
        if not sources:
            known = dict.fromkeys([*ESTIMATORS, *(estimator for estimator, _ in measured)])
            raise InputError(f"the run's configuration has the estimator {name!r}; {nearest(name, known)}")
        return name, energy if energy in sources else sources[0]
    needs = ESTIMATORS[name].needs
    if "energy" in needs:
        return name, energy
    return name, "exact" if {"rollout_norm_sq", "position_baseline"} & set(needs) else "none"
