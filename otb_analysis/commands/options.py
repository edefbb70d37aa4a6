"""How commands read their options.

The help of a command shows the options that people use, and every row of a registry that is a choice. Configurations
stand below the registries and cannot read them. The command line can, and does so only when a help is printed: the
import takes a second.
"""

import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from inspect import getdoc
from textwrap import fill
from typing import Annotated, Any, TypeVar

import tyro
from tyro.conf import Suppress
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from otb_analysis.commands.screen import line_width
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

Config = TypeVar("Config")

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


CHOICES: dict[tuple[type, str], str] = {
    (TrainConfig, "task"): "task",
    (EstimatorConfig, "name"): "estimator",
    (EstimatorConfig, "options"): "estimator",
    (SampleConfig, "filter"): "filter",
    (SampleConfig, "filter_options"): "filter",
    **{
        (ObjectiveConfig, f"{kind}{more}"): kind
        for kind in ("ratio", "aggregation", "token_weight", "shaping")
        for more in ("", "_options")
    },
}
"""Fields whose help is completed, and from which registry: by its names, or by the options of its rows."""


def completed_help(owner: type, field: StructFieldSpec) -> str:
    """Return a field's help with what it lacks of its registry: names, or rows with options.

    Of the estimators only those count whose inputs training can provide. A row is added where its name, or one of its
    options, is missing; `_loo` forms go with their twin.
    """
    from otb_analysis.estimators import ESTIMATORS
    from otb_analysis.estimators.spec import TRAINABLE_NEEDS
    from otb_analysis.objectives.aggregation import AGGREGATIONS, TOKEN_WEIGHTS
    from otb_analysis.objectives.ratios import RATIOS
    from otb_analysis.objectives.shaping import FILTERS, SHAPINGS
    from otb_analysis.tasks import TASKS

    trainable = {name: row for name, row in ESTIMATORS.items() if set(row.needs) <= TRAINABLE_NEEDS}
    registries = {"task": TASKS, "estimator": trainable, "ratio": RATIOS, "aggregation": AGGREGATIONS}
    registries |= {"shaping": SHAPINGS, "token_weight": TOKEN_WEIGHTS, "filter": FILTERS}
    text = (field.helptext() if callable(field.helptext) else field.helptext) or ""
    rows, words = registries[CHOICES[owner, field.name]], set(re.findall(r"\w+", text))
    if not field.name.endswith("options"):
        missing = [name for name in rows if name not in words]
        return f"{text}\nAlso: {', '.join(missing)}." if missing else text
    for name, row in rows.items():
        options = [option.name for option in fields(row.options)]
        if options and not {name.removesuffix("_loo"), *options} <= words:
            text += f"\n{', '.join(options)}: of {name}."
    return text


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
        shown = list[StructFieldSpec]()
        for field in spec.fields:
            if (kind, field.name) in CHOICES:  # called only when the help is printed
                field = replace(field, helptext=partial(completed_help, kind, field))
            hidden = short and field.name not in USED.get(kind, ())
            shown.append(replace(field, type=Annotated[field.type, Suppress]) if hidden else field)
        return replace(spec, fields=tuple(shown))

    return registry


def parsed(
    kind: type[Config], command: str, words: Sequence[str], default: Config, description: str | None = None
) -> Config:
    """Return a command's configuration from the command line; of many options `--help` shows those in `USED`."""
    # tyro breaks the lines of options alone, and joins others that begin with a letter.
    paragraphs = (description or getdoc(kind) or "").split("\n\n")
    description = "\n\n".join(fill(one, line_width(), subsequent_indent="  ") for one in paragraphs)
    if short := kind in USED and "--help-all" not in words and not {"-h", "--help"}.isdisjoint(words):
        few, whole = used_and_all(default)
        description = f"{description}\n\nThese are the {few} options that people use; --help-all shows all {whole}."
    return tyro.cli(
        kind,
        prog=f"otb {command}",
        args=["--help"] if "--help-all" in words else list(words),
        default=default,
        config=(),
        description=description,
        registry=registry_of_help(short),
    )
