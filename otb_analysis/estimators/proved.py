"""Which projections c = ⟨m, ∇J⟩/‖∇J‖² of a stored run are proved, so that they need not be estimated.

The registry says which entries are unbiased, and under which conditions; a run's stored configuration says whether it
met them. A configuration that does not say counts as one that did not.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from otb_analysis.estimators.registry import ESTIMATORS, registered
from otb_analysis.estimators.spec import EstimatorSpec
from otb_analysis.objectives.ratios import RATIOS
from otb_analysis.objectives.shaping import SHAPINGS
from otb_analysis.types import Label, Proved

PLAIN_SAMPLING = frozenset(
    (
        *("prompts", "group_size", "max_new_tokens", "max_turns", "temperature", "engine", "vllm_memory"),
        *("filter", "filter_options", "filter_rounds", "soft", "soft_noise"),
    )
)
"""Known settings of sampling; with these alone and no filter, tokens (soft ones too) come from the scored policy."""

SOURCES = ("none", "proxy", "exact")
"""Energies that do not look at rollout i where it is left out; a calibration is fitted on it too."""


def _is(*allowed: object) -> Callable[[object], bool]:
    return lambda setting: setting in allowed


def _keeps_mean(name: object) -> bool:
    return name == "none" or (name in RATIOS and RATIOS[str(name)].keeps_mean)


def _looks_at_no_group(name: object) -> bool:
    return name in SHAPINGS and "group" not in SHAPINGS[str(name)].needs


CONDITIONS: dict[tuple[str, str], tuple[Callable[[object], bool], str]] = {
    ("objective", "staleness"): (_is(0), "its rollouts are older than the policy"),
    ("objective", "epochs"): (_is(1), "it updates more than once on a batch"),
    ("objective", "minibatches"): (_is(1), "it updates more than once on a batch"),
    ("objective", "ratio"): (_keeps_mean, "its importance ratios are clipped or cut"),
    ("objective", "shaping"): (_looks_at_no_group, "its rewards are reshaped or filtered by the group's outcome"),
    ("sample", "engine"): (_is("transformers"), "another engine sampled than was scored"),
    ("optimize", "precision"): (_is("float32"), "it sampled in half precision and was measured in single"),
}
"""(section, setting) of a stored configuration → its condition, and the reason where the condition fails."""


def unproved_because(config: Mapping[str, Any]) -> str:
    """Return why nothing is proved of a run's estimators; empty where the registered conditions are met."""
    if "source" in config:
        stated = config.get("plain_sampling") is True
        return "" if stated else "its rollouts were recorded elsewhere (--plain-sampling states that they meet them)"
    for (part, name), (fits, wrong) in CONDITIONS.items():
        settings = _part(config, part)
        if name not in settings:
            return f"its configuration does not say {part}.{name}"
        if not fits(settings[name]):
            return wrong
    sample = _part(config, "sample")
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
    known = {label: c for label in labels if (c := _projection(label, config)) is not None}
    alone = (label for label, c in known.items() if c == 1 and (e := registered(label[0])) and not e.batch_coupled)
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


def _projection(label: Label, config: Mapping[str, Any]) -> float | None:
    name, source = label
    entry = registered(name)
    if entry is None or source not in SOURCES or entry.target != "∇J":
        return None
    if entry.unbiased:
        return 1.0 if _options_keep(name, config) else None
    return _shrunk(entry, _part(config, "sample"))


def _shrunk(entry: EstimatorSpec, sample: Mapping[str, Any]) -> float | None:
    size, prompts = sample.get("group_size"), sample.get("prompts")
    if not entry.shrinks_by or not isinstance(size, int) or not isinstance(prompts, int) or size * prompts < 2:
        return None
    rollouts = size if entry.shrinks_by == "group" else size * prompts
    return 1.0 - 1.0 / rollouts if rollouts > 1 else None


def _options_keep(name: str, config: Mapping[str, Any]) -> bool:
    """Tell whether the options keep an entry unbiased; only the estimator that trains has other than the defaults."""
    trained = _part(config, "estimator")
    options = trained.get("options") if trained.get("name") == name else {}
    if not isinstance(options, Mapping):
        return False
    exact = ("discount", "decay") if name == "value" else ()
    return str(options.get("tail", "own_return")) in ("own_return", "group") and all(
        float(options.get(option, 1.0)) == 1.0 for option in exact
    )


def _part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = config.get(name)
    return part if isinstance(part, Mapping) else {}
