"""The horizon: what grows with the length of an answer, its gradient's variance or what a baseline takes off it.

The task `running_total` applies one rule line by line, so that answers of 32 and of 1,024 tokens differ in length only.
With `branching` a slip leads to totals that no demonstration has. Every policy is taught on demonstrations of its own
length, 4,096 tokens a step, until a share of its answers in `BAND` is right: the longer the answer, the rarer are its
slips. Models are small, so that the longest answers cost minutes.

Settings and the question were settled before anything was measured, but for three that the page names. Those of answers
to 128 tokens stand in one commit with their numbers, those of longer ones in an earlier one.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from otb_analysis.config import (
    RunningTotalConfig,
    SampleConfig,
    SmallModelConfig,
    TrainConfig,
    WarmStartConfig,
    plain_config,
)
from otb_analysis.training.runtime import Bar
from studies.lib import Cell, Study, Tables
from studies.lib.long_answers import Amount, compared, norms, planned, pooled, teach
from studies.lib.policies import Policy, fresh_policy
from studies.lib.record import kept_pickle
from studies.lib.seeds import QUICK_MODEL

from .training import FULL_RUNS, SMALL_RUNS, Runs, run_config, run_tables, training_cells

LINES = {32: (4, 5), 128: (17, 19), 512: (70, 76), 1024: (136, 140)}
"""Lines of an answer by its length in tokens, roughly: a line has seven. The longest have 981, since small models read
1,024 tokens, the prompt and what an answer may be too long included."""
BAND = (0.4, 0.6)
"""Success of one sampled answer to each of 192 prompts at which teaching stops."""
LONGEST_LOW = 0.3
"""Its lower end for the longest answers: 4,000 steps of teaching ended at .36 there."""
LESSON = 4096
"""Tokens of demonstrations in a step of teaching, roughly, at every length."""
MODELS = {"qwen3": SmallModelConfig(layers=2, width=48, heads=2, key_value_heads=2, feed_forward=128)}
MODELS["gpt2"] = replace(MODELS["qwen3"], feed_forward=192)
"""One with rotary positions and gated layers, one with learned positions and plain ones; as many parameters."""
LARGEST = {False: 9, True: 15}
"""Largest term, by whether steps branch."""


@dataclass(frozen=True)
class Setting:
    """One policy: its architecture, its task, and about how many tokens it writes."""

    name: str
    length: int
    architecture: str = "qwen3"
    branching: bool = False
    tool_calls: int = 0


TURNS, TURNS_LENGTH, TRAINED_LENGTH = (1, 3, 10), 512, 512
KINDS = {"qwen3": {}, "gpt2": {"architecture": "gpt2"}, "branching": {"branching": True}}
SETTINGS = [
    Setting(kind, length, **how)
    for length in LINES
    for kind, how in KINDS.items()
    if (kind, length) != ("gpt2", max(LINES))  # 4,000 steps of teaching ended at 5 % there
]
SETTINGS += [Setting(f"turns{calls}", TURNS_LENGTH, tool_calls=calls) for calls in TURNS]


@dataclass(frozen=True)
class Size(Amount):
    """How much is measured of a policy."""

    quick: bool = False

    def parts(self, length: int) -> list[range]:
        """Return the blocks of each cell: long answers take more cells, so that little is lost where one is stopped."""
        cells = min(max(1, length // 256), self.blocks)
        return [range(k * self.blocks // cells, (k + 1) * self.blocks // cells) for k in range(cells)]


FULL = Size()
SMALL = Size(blocks=1, rollouts=8, sizes=(2, 4), buckets=256, norm_prompts=16, positions=2, quick=True)
SMALL_SETTINGS = [Setting("qwen3", 32), Setting("turns1", 32, tool_calls=1)]


def config_of(setting: Setting, quick: bool) -> TrainConfig:
    """Return the configuration of a policy: task, model, limits of sampling and supervised start."""
    low, high = (2, 2) if quick else LINES[setting.length]
    largest = 2 if quick else LARGEST[setting.branching]
    task = RunningTotalConfig(low, high, largest, setting.branching, setting.tool_calls)
    lowest = LONGEST_LOW if setting.length == max(LINES) else BAND[0]
    start = WarmStartConfig(
        success_low=0.05 if quick else lowest, success_high=0.95 if quick else BAND[1],
        batch=32 if quick else LESSON // setting.length, check_prompts=64 if quick else 192,
    )  # fmt: skip
    # Room for a line more than the longest answer, and for the end token of every turn
    longest = 7 * (high // (setting.tool_calls + 1) + 2) + 1
    return TrainConfig(
        task="running_total", running_total=task, warm_start=start,
        small_model=QUICK_MODEL if quick else MODELS[setting.architecture],
        sample=SampleConfig(max_new_tokens=longest, max_turns=setting.tool_calls + 1),
    )  # fmt: skip


def fresh(setting: Setting, quick: bool) -> Policy:
    """Return an untaught policy."""
    config = config_of(setting, quick)
    return fresh_policy(config, setting.architecture, positions=24 * (setting.tool_calls + 1) + config.sample.limit)


def cells(settings: Sequence[Setting], size: Size, runs: Runs, trained: str) -> list[Cell]:
    """Return the cells of all policies, shortest answers first, and then those that train one of them."""
    made, facts = list[Cell](), asdict(size)
    how = {"update": facts.pop("update"), "size": facts}
    for one in settings:
        known = {"setting": asdict(one), "config": plain_config(config_of(one, size.quick)), "quick": size.quick}
        parts = [{"blocks": list(blocks)} for blocks in size.parts(one.length)]
        made += planned(f"{one.name}-{one.length}", known, how, parts)
    return made + training_cells(next(cell for cell in made if cell.name == f"teach-{trained}"), runs)


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Teach, measure or compare one policy."""
    setting, size = Setting(**cell.settings["setting"]), SMALL if cell.settings["quick"] else FULL
    key: dict[str, Any] = {"policy": setting.name, "length": setting.length}
    kind = cell.name.partition("-")[0]
    if kind == "compare":
        return compared(key, cell.after[1:], size, work)
    policy = fresh(setting, size.quick)
    if kind == "teach":
        return teach(key, policy, config_of(setting, size.quick), work)
    policy.model.load_state_dict(kept_pickle(cell.after[0], work))
    if kind in ("learn", "last"):
        arm, seed = cell.settings["arm"], cell.settings["seed"]
        config = run_config(config_of(setting, size.quick), SMALL_RUNS if size.quick else FULL_RUNS, kind, arm, seed)
        return run_tables(policy, config, key | {"arm": arm, "seed": seed}, kind == "learn", work, bar)
    sample = replace(config_of(setting, size.quick).sample, group_size=size.rollouts)
    if kind == "norms":
        return norms(key, policy, sample, size)
    return pooled(key, policy, cell.settings["blocks"], sample, size, work, bar)


PLAN = cells(SETTINGS, FULL, FULL_RUNS, f"qwen3-{TRAINED_LENGTH}")
COMMITTED = 128
"""Tokens of the longest answers whose policies' cells the committed tables have at least."""
STUDY = Study(
    title="The horizon",
    question="How does the variance of the gradient grow with the length of answers, what does `otb` take away of it "
    "at equal progress, and does the proxy hold?",
    cells=[cell for cell in PLAN if cell.settings["setting"]["length"] <= COMMITTED],
    quick=cells(SMALL_SETTINGS, SMALL, SMALL_RUNS, "qwen3-32"),
    measure=measure,
    later=[cell for cell in PLAN if cell.settings["setting"]["length"] > COMMITTED],
)
