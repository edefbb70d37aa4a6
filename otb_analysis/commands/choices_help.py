"""Help of fields whose values are the rows of a registry: rows that the text beside the field leaves out are added.

Configurations stand below the registries and cannot read them. The command line can, and does so only when a help is
printed: the import takes a second.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from otb_analysis.config import EstimatorConfig, ObjectiveConfig, SampleConfig, TrainConfig


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


def registry_of_help() -> ConstructorRegistry:
    """Return rules for tyro under which the help of `CHOICES` is complete."""
    registry, inside = ConstructorRegistry(), set[type]()

    @registry.struct_rule
    def completed(info: StructTypeInfo) -> StructConstructorSpec | None:
        if info.type in inside or info.type not in {kind for kind, _ in CHOICES}:
            return None
        inside.add(info.type)  # the call below asks this rule again; then tyro's own rule answers
        try:
            spec = ConstructorRegistry.get_struct_spec(info)
        finally:
            inside.discard(info.type)
        if not isinstance(spec, StructConstructorSpec):
            return None
        return replace(spec, fields=tuple(_completed(info.type, field) for field in spec.fields))

    return registry


def _completed(kind: type, field: StructFieldSpec) -> StructFieldSpec:
    if (kind, field.name) not in CHOICES:
        return field
    complete, name = CHOICES[kind, field.name]
    written = field.helptext

    def text() -> str:  # called only when the help is printed
        return complete((written() if callable(written) else written) or "", _registry(name))

    return replace(field, helptext=text)
