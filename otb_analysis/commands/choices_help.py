"""What the help of a command shows: the options that people use, and every row of a registry that is a choice.

Configurations stand below the registries and cannot read them. The command line can, and does so only when a help is
printed: the import takes a second.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Annotated, Any

from tyro.conf import Suppress
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from otb_analysis.config import (
    AttributionSchedule,
    CheckpointConfig,
    EstimatorConfig,
    MeasureConfig,
    ObjectiveConfig,
    OptimizeConfig,
    SampleConfig,
    Schedule,
    TrainConfig,
)

USED: dict[type, tuple[str, ...]] = {
    TrainConfig: (
        *("run", "root", "if_exists", "model", "task", "seed", "trackers", "device"),
        *("sample", "estimator", "optimize", "measure", "checkpoint"),
    ),
    SampleConfig: ("prompts", "group_size", "max_new_tokens", "temperature"),
    EstimatorConfig: ("name", "energy", "options"),
    OptimizeConfig: ("steps", "learning_rate"),
    MeasureConfig: ("exact", "attribution"),
    Schedule: ("every", "prompts"),
    AttributionSchedule: ("every",),
    CheckpointConfig: ("every",),
}
"""Fields and sections that `--help` shows of a command with very many options; `--help-all` shows all."""


def complete_names(text: str, registry: Mapping[str, Any]) -> str:
    """Add the names that a help text does not have."""
    missing = [name for name in registry if name not in _words(text)]
    return f"{text}\nAlso: {', '.join(missing)}." if missing else text


def complete_options(text: str, registry: Mapping[str, Any]) -> str:
    """Add the rows whose name, or one of whose options, a help text does not have; `_loo` forms go with their twin."""
    words = _words(text)
    missing = {
        name: options
        for name, row in registry.items()
        if (options := [field.name for field in fields(row.options)])
        and not {name.removesuffix("_loo"), *options} <= words
    }
    return "\n".join([text, *(f"{', '.join(options)}: of {name}." for name, options in missing.items())])


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def _registry(name: str) -> Mapping[str, Any]:
    """Return a registry by name; of the estimators those whose inputs training can provide."""
    from otb_analysis.estimators import ESTIMATORS
    from otb_analysis.estimators.spec import TRAINABLE_NEEDS
    from otb_analysis.objectives.aggregation import AGGREGATIONS
    from otb_analysis.objectives.filters import FILTERS
    from otb_analysis.objectives.ratios import RATIOS
    from otb_analysis.objectives.shaping import SHAPINGS
    from otb_analysis.objectives.token_weights import TOKEN_WEIGHTS
    from otb_analysis.tasks import TASKS

    trainable = {name: row for name, row in ESTIMATORS.items() if set(row.needs) <= TRAINABLE_NEEDS}
    rows = {"task": TASKS, "estimator": trainable, "ratio": RATIOS, "aggregation": AGGREGATIONS, "shaping": SHAPINGS}
    return (rows | {"token_weight": TOKEN_WEIGHTS, "filter": FILTERS})[name]


Complete = Callable[[str, Mapping[str, Any]], str]
CHOICES: dict[tuple[type, str], tuple[Complete, str]] = {
    (TrainConfig, "task"): (complete_names, "task"),
    (EstimatorConfig, "name"): (complete_names, "estimator"),
    (EstimatorConfig, "options"): (complete_options, "estimator"),
    (ObjectiveConfig, "ratio"): (complete_names, "ratio"),
    (ObjectiveConfig, "ratio_options"): (complete_options, "ratio"),
    (ObjectiveConfig, "aggregation"): (complete_names, "aggregation"),
    (ObjectiveConfig, "aggregation_options"): (complete_options, "aggregation"),
    (ObjectiveConfig, "token_weight"): (complete_names, "token_weight"),
    (ObjectiveConfig, "token_weight_options"): (complete_options, "token_weight"),
    (SampleConfig, "filter"): (complete_names, "filter"),
    (SampleConfig, "filter_options"): (complete_options, "filter"),
    (ObjectiveConfig, "shaping"): (complete_names, "shaping"),
    (ObjectiveConfig, "shaping_options"): (complete_options, "shaping"),
}
"""Fields whose help is completed: by which rule, and from which registry."""


def used_and_all(config: Any, used: bool = True) -> tuple[int, int]:
    """Return how many options of a configuration the short help shows, and how many there are."""
    counts = [
        used_and_all(value, shown) if is_dataclass(value) else (int(shown), 1)
        for field in fields(config)
        for value, shown in [(getattr(config, field.name), used and field.name in USED.get(type(config), ()))]
    ]
    return sum(few for few, _ in counts), sum(whole for _, whole in counts)


def registry_of_help(short: bool = False) -> ConstructorRegistry:
    """Return rules for tyro under which the help of `CHOICES` is complete, and `short` hides what is not in `USED`."""
    registry, inside = ConstructorRegistry(), set[type]()

    @registry.struct_rule
    def completed(info: StructTypeInfo) -> StructConstructorSpec | None:
        kind = info.type
        if kind in inside or kind not in {*USED, *(owner for owner, _ in CHOICES)}:
            return None
        inside.add(kind)  # the call below asks this rule again; then tyro's own rule answers
        try:
            spec = ConstructorRegistry.get_struct_spec(info)
        finally:
            inside.discard(kind)
        if not isinstance(spec, StructConstructorSpec):
            return None
        shown = [_completed(kind, field) for field in spec.fields]
        if short:
            shown = [field if field.name in USED.get(kind, ()) else _hidden(field) for field in shown]
        return replace(spec, fields=tuple(shown))

    return registry


def _hidden(field: StructFieldSpec) -> StructFieldSpec:
    return replace(field, type=Annotated[field.type, Suppress])


def _completed(kind: type, field: StructFieldSpec) -> StructFieldSpec:
    if (kind, field.name) not in CHOICES:
        return field
    complete, name = CHOICES[kind, field.name]
    written = field.helptext

    def text() -> str:  # called only when the help is printed
        return complete((written() if callable(written) else written) or "", _registry(name))

    return replace(field, helptext=text)
