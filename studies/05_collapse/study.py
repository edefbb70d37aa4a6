"""Training made to collapse, to tell what lets a baseline last: less variance, or the level of B.

Rollouts are those of an old policy, and the learning rate rises linearly from 0, so that every run begins calmly and
the step at which it breaks says how long a step it bears. All arms of a seed share the supervised start, the prompts
and these conditions. Without a correction for the sampler a constant in B is a force on the policy; `otb` has a lower
mean B than `rloo` where long answers fail more often. Level and shape of B are therefore varied apart: `lowered` is
`rloo` moved to the mean of `otb`, `raised` is `otb` moved to the mean of `rloo` (levels.py). With the importance ratio
of the token a constant exerts no force. `calm` shares the starts, but neither old rollouts nor long steps: what a
detector calls there is a false alarm.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from otb_analysis.config import (
    EstimatorConfig,
    ObjectiveConfig,
    OptimizeConfig,
    SampleConfig,
    TrainConfig,
    WarmStartConfig,
    plain_config,
)
from otb_analysis.config.measuring import AttributionSchedule
from otb_analysis.figures.styles import AMBER, BLUE, GREEN, GREY, ORANGE, PINK
from otb_analysis.store import RunStore
from otb_analysis.training.loop import train
from otb_analysis.training.runtime.progress import Bar
from studies.lib import Cell, Study, Tables
from studies.lib.seeds import BASE, FORWARD_ONLY, QUICK_START, QUICK_TASK, started

from .runs import RULE, run_tables


@dataclass(frozen=True)
class Arm:
    """A way to train, with its colour in the figure."""

    estimator: str
    color: str
    staleness: int
    ratio: str = "none"
    attributed: bool = False

    @property
    def calm(self) -> bool:
        """Whether it trains on rollouts of its own policy, at a low rate."""
        return self.staleness == 0


STALENESSES = (4, 8)
"""Batches between the policy that samples and the one that learns."""
RATIO = "token"
"""ρ_t: with it a constant in B drops out of the mean, whoever sampled."""
LEVELS = f"study_{Path(__file__).parent.name}.levels"
BASELINES = {
    "rloo": ("rloo", BLUE),
    "lowered": (f"{LEVELS}:lowered", GREEN),
    "otb": ("otb", ORANGE),
    "raised": (f"{LEVELS}:raised", AMBER),
    "none": ("none", GREY),
}
CORRECTED = ("rloo", "lowered", "otb", "none")
"""Baselines that are trained with importance ratios, too."""
ARMS = {
    f"{name}-{staleness}": Arm(*BASELINES[name], staleness, attributed=staleness == 4 and name in ("rloo", "otb"))
    for staleness in STALENESSES
    for name in BASELINES
}
ARMS |= {
    f"{name}-{staleness}-ratio": Arm(*BASELINES[name], staleness, RATIO)
    for staleness in STALENESSES
    for name in CORRECTED
}
ARMS["calm"] = Arm("rloo", PINK, 0)
CALM_RATE = 3e-4
"""Constant, of the arm without old rollouts."""

LEVEL = (("lowered", "rloo"), ("otb", "raised"))
SHAPE = (("otb", "lowered"), ("raised", "rloo"))
"""What is asked: the effect of the level is the mean of the first two differences of steps survived, that of the shape,
variance included, the mean of the second two; both over the stalenesses, without ratios, seed by seed.

The level is the cause where its effect is above 0 and above that of the shape, the shape where it is the other way
round; both where both are above 0 and neither is above the other; otherwise it is open. Above means that Student's 95 %
interval over seeds is. A force of the level shows in a second way: with ratios `lowered` − `rloo` is smaller.
"""


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4, 5)
    arms: tuple[str, ...] = tuple(ARMS)
    steps: int = 80
    attribute_every: int = 2


FULL = Size()
SMALL = Size(
    seeds=(0, 1), arms=("rloo-4", "lowered-4", "otb-4", "raised-4", "rloo-4-ratio", "lowered-4-ratio", "calm"),
    steps=12, attribute_every=4,
)  # fmt: skip
CONFIG = replace(
    BASE,
    sample=SampleConfig(prompts=8, group_size=8),
    warm_start=WarmStartConfig(success_low=0.6, success_high=0.85),
    optimize=OptimizeConfig(learning_rate=4.8e-3),
)
QUICK_RATE = 5e-2
QUICK_SAMPLE = SampleConfig(prompts=4, group_size=4)


def config_of(seed: int, size: Size, quick: bool, arm: Arm) -> TrainConfig:
    """Return the settings of an arm from the seed's start."""
    measured = replace(FORWARD_ONLY, attribution=AttributionSchedule(every=size.attribute_every * arm.attributed))
    rising = replace(CONFIG.optimize, steps=size.steps, warmup_steps=size.steps)
    config = replace(
        CONFIG,
        seed=seed,
        measure=measured,
        optimize=rising,
        objective=ObjectiveConfig(staleness=arm.staleness, ratio=arm.ratio),
        estimator=EstimatorConfig(name=arm.estimator),
    )
    config = replace(config, checkpoint=replace(config.checkpoint, every=0))
    if quick:
        fast = replace(rising, learning_rate=QUICK_RATE)
        config = replace(config, chain_sum=QUICK_TASK, warm_start=QUICK_START, optimize=fast, sample=QUICK_SAMPLE)
    if not arm.calm:
        return config
    return replace(config, optimize=replace(config.optimize, learning_rate=CALM_RATE, warmup_steps=0))


def cells(size: Size, quick: bool) -> list[Cell]:
    """Return one cell per arm and seed, seed by seed."""
    common: dict[str, object] = {"quick": quick, "size": asdict(size), "rule": RULE, "effects": [LEVEL, SHAPE]}
    return [
        Cell(
            f"{name}-s{seed}",
            {**common, "arm": name, "seed": seed, "config": plain_config(config_of(seed, size, quick, ARMS[name]))},
        )
        for seed in size.seeds
        for name in size.arms
    ]


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Let one arm of a seed run into its end."""
    quick = cell.settings["quick"]
    name, seed = cell.settings["arm"], cell.settings["seed"]
    config = started(config_of(seed, SMALL if quick else FULL, quick, ARMS[name]), work)
    store = RunStore(train(replace(config, root=work, run=name), bar))
    return run_tables({"arm": name, "seed": seed}, config.optimize.learning_rate, store)


STUDY = Study(
    title="Collapse",
    question="When old rollouts and long steps drive training into collapse, does `otb` last longer than `rloo` "
    "because of less variance or because its mean B is lower, and who sees the collapse coming?",
    cells=cells(FULL, quick=False),
    quick=cells(SMALL, quick=True),
    measure=measure,
)
