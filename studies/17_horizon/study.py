"""The horizon: what grows with the length of an answer, its gradient's variance or what a baseline takes off it.

The task `running_total` applies one rule line by line, so that answers of 32 and of 1,024 tokens differ in length only.
With `branching` a slip leads to totals that no demonstration has. Every policy is taught on demonstrations of its own
length, 4,096 tokens a step, until a share of its answers in `BAND` is right: the longer the answer, the rarer are its
slips. Models are small, so that the longest answers cost minutes.

Settings and the question were fixed before anything was measured, but for three that the page names.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

from otb_analysis.config import (
    RunningTotalConfig,
    SampleConfig,
    SmallModelConfig,
    TrainConfig,
    WarmStartConfig,
    plain_config,
)
from otb_analysis.estimators import ESTIMATORS
from otb_analysis.statistics import Partition, gradient_noise_scale, paired_ratios, pool_gram, pool_statistics
from otb_analysis.statistics.energies import correlation
from otb_analysis.training.runtime import Bar
from otb_analysis.training.warm_start import fit
from studies.lib import Cell, Study, Tables, interval_columns, rounded
from studies.lib.formats import by_label, ratio_columns, statistics_columns
from studies.lib.policies import Policy, different_prompts, fresh_policy, write
from studies.lib.pools import proved_of_pool
from studies.lib.record import Gathered, keep_pickle, kept_pickle
from studies.lib.seeds import QUICK_MODEL

from .pool import COMPARED, TOLERANCE, block_gradients, energy_facts, norm_rows
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
PROMPTS_FROM, NORMS_FROM = 40_000_000, 50_000_000
UPDATE = 32
"""Prompts of the update that efficiency is stated for, and those that a batch-coupled estimator sees."""
RATIOS = {"variance_ratio": "variance", "sf_ratio": "sf", "efficiency_ratio": "efficiency"}
"""Columns of the ratios to `rloo`."""


@dataclass(frozen=True)
class Setting:
    """One policy: its architecture, its task, and about how many tokens it writes."""

    name: str
    length: int
    architecture: str = "qwen3"
    branching: bool = False
    tool_calls: int = 0

    @property
    def label(self) -> str:
        """Name in the cells."""
        return f"{self.name}-{self.length}"


TURNS, TURNS_LENGTH, TRAINED_LENGTH = (1, 3, 10), 512, 512
KINDS = {"qwen3": {}, "gpt2": {"architecture": "gpt2"}, "branching": {"branching": True}}
SETTINGS = [Setting(kind, length, **how) for length in LINES for kind, how in KINDS.items()]
SETTINGS += [Setting(f"turns{calls}", TURNS_LENGTH, tool_calls=calls) for calls in TURNS]


@dataclass(frozen=True)
class Size:
    """How much is measured of a policy."""

    blocks: int = 8  # Each of UPDATE prompts
    rollouts: int = 16
    sizes: tuple[int, ...] = (4, 8)
    buckets: int = 1024
    norm_prompts: int = 24
    positions: int = 6
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
    room = 24 * (setting.tool_calls + 1) + config.sample.limit
    return fresh_policy(config, setting.architecture, positions=room)


def cells(settings: Sequence[Setting], size: Size) -> list[Cell]:
    """Return what teaches a policy, what measures its tokens' norms and its groups' gradients, and what compares."""
    made = list[Cell]()
    for one in settings:
        known = {"setting": asdict(one), "config": plain_config(config_of(one, size.quick)), "quick": size.quick}
        teach = Cell(f"teach-{one.label}", known)
        measured = known | {"size": asdict(size), "update": UPDATE, "tolerance": TOLERANCE, "compared": list(COMPARED)}
        norms = Cell(f"norms-{one.label}", measured, after=(teach,))
        pools = [
            Cell(f"pool-{one.label}-{k}", measured | {"blocks": list(blocks)}, after=(teach,))
            for k, blocks in enumerate(size.parts(one.length))
        ]
        compare = Cell(f"compare-{one.label}", measured, after=(teach, *pools))
        made += [teach, norms, *pools, compare]
    return made


def measure(cell: Cell, work: Path, bar: Bar) -> Tables:
    """Teach, measure or compare one policy."""
    setting, size = Setting(**cell.settings["setting"]), SMALL if cell.settings["quick"] else FULL
    key: dict[str, Any] = {"policy": setting.name, "length": setting.length}
    kind = cell.name.partition("-")[0]
    if kind == "compare":
        return compared(key, cell.after[1:], size, work)
    policy = fresh(setting, size.quick)
    if kind == "teach":
        return taught(key, policy, config_of(setting, size.quick), work)
    policy.model.load_state_dict(kept_pickle(cell.after[0], work))
    if kind in ("learn", "last"):
        arm, seed = cell.settings["arm"], cell.settings["seed"]
        config = run_config(config_of(setting, size.quick), SMALL_RUNS if size.quick else FULL_RUNS, kind, arm, seed)
        return run_tables(policy, config, key | {"arm": arm, "seed": seed}, kind == "learn", work, bar)
    sample = replace(config_of(setting, size.quick).sample, group_size=size.rollouts)
    if kind == "norms":
        prompts = different_prompts(policy, NORMS_FROM, size.norm_prompts)
        row, shares = norm_rows(policy, write(policy, prompts, sample, seed=1), size.positions)
        return {"norms": [key | row], "fifths": [key | one for one in shares]}
    return pooled(key, policy, cell.settings["blocks"], size, sample, work, bar)


def taught(key: dict[str, Any], policy: Policy, config: TrainConfig, work: Path) -> Tables:
    """Teach a policy until its success lies in the band."""
    began = process_time()
    steps, success = fit(policy.model, policy.tokenizer, policy.task, config)
    keep_pickle(work, dict(policy.model.state_dict()))
    row = {"parameters": policy.model.num_parameters(), "steps": steps, "checked": success}
    return {"policies": [key | row | {"teach_seconds": rounded(process_time() - began)}]}


def pooled(
    key: dict[str, Any], policy: Policy, blocks: Sequence[int], size: Size, sample: SampleConfig, work: Path, bar: Bar
) -> Tables:
    """Sample blocks of prompts and keep the gradients of their groups."""
    prompts, kept, rows = different_prompts(policy, PROMPTS_FROM, size.blocks * UPDATE), list[Any](), list[Any]()
    for done, block in enumerate(blocks, start=1):
        began = process_time()
        written = write(policy, prompts[block * UPDATE : (block + 1) * UPDATE], sample, seed=100 + block)
        sampled = process_time()
        gradients, names, rank = block_gradients(policy, written, size.sizes, UPDATE, size.buckets)
        kept.append((gradients, names, energy_facts(written)))
        seconds = {"sample_seconds": sampled - began, "gradient_seconds": process_time() - sampled}
        rows.append(key | {"block": block, "rank": rounded(rank)} | {k: rounded(v) for k, v in seconds.items()})
        bar(done, len(blocks), "gradients of groups")
    keep_pickle(work, kept)
    return {"blocks": rows}


def compared(key: dict[str, Any], parts: Sequence[Cell], size: Size, work: Path) -> Tables:
    """Return variance, SF and efficiency of every estimator at every group size, and what the rollouts are."""
    blocks = [block for part in parts for block in kept_pickle(part, work)]
    labels = [(name, "proxy" if ESTIMATORS[name].reads_energy else "none") for name in blocks[0][1]]
    tables = Gathered()
    tables.add(key, rollouts=[rollout_facts([facts for _, _, facts in blocks])])
    for n in size.sizes:
        known, measured = (
            proved_of_pool(labels, UPDATE, n),
            np.concatenate([block[f"g{n}"] for block, _, _ in blocks], axis=1),
        )
        prompt = np.concatenate([block[f"prompt{n}"] + UPDATE * k for k, (block, _, _) in enumerate(blocks)])
        pool = pool_gram([measured], [Partition(np.repeat(np.arange(len(prompt)), n), prompt)], labels)
        gram = pool.gram()
        pairs = by_label(paired_ratios([gram], n_prompts=UPDATE, known=known))
        rows = []
        for one in pool_statistics(pool, n_prompts=UPDATE, known=known):
            label = (one.estimator, one.energy_source)
            row = {
                "estimator": one.estimator,
                "clusters": one.n_clusters,
                "c_known": one.c_known,
                "bias": rounded(one.relative_bias),
            }
            row |= {"within": rounded(one.within), "between": rounded(one.between)}
            rows.append(row | statistics_columns(one) | ratio_columns(pairs.get(label), RATIOS))
        scale = gradient_noise_scale([gram], ("rloo", "none"), known)
        signal = {"prompts": gram.n_prompts} | interval_columns("noise_scale", scale)
        tables.add(key | {"size": n}, estimators=rows, signal=[signal])
    return tables


def rollout_facts(blocks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return success, length, corr(W_T, R) within prompts, and the shares of energy by fifth of the answer."""
    joined = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    prompt = np.concatenate([block["prompt"] + UPDATE * k for k, block in enumerate(blocks)])
    reward, energy, fifths = joined["reward"], joined["energy"], joined["fifths"]
    mixed = [0 < reward[prompt == p].mean() < 1 for p in np.unique(prompt)]
    row = {
        "prompts": len(mixed),
        "rollouts": len(reward),
        "success": rounded(reward.mean()),
        "mixed": float(np.mean(mixed)),
    }
    row |= {"tokens": rounded(joined["length"].mean()), "spread": rounded(joined["length"].std())}
    row |= {"energy": rounded(energy.mean())} | interval_columns("corr", correlation(energy, reward, prompt, prompt))
    for name, some in (("all", reward >= 0), ("wrong", reward < 1)):
        shares = fifths[some].sum(axis=0) / max(energy[some].sum(), 1e-300)
        row |= {f"{name}{k + 1}": rounded(share) for k, share in enumerate(shares)}
    return row


def planned(settings: Sequence[Setting], size: Size, runs: Runs, trained: str) -> list[Cell]:
    """Return the cells of all policies, shortest answers first, and then those that train one of them."""
    measured = cells(settings, size)
    (teach,) = (cell for cell in measured if cell.name == f"teach-{trained}")
    return measured + training_cells(teach, runs)


PLAN = planned(SETTINGS, FULL, FULL_RUNS, f"qwen3-{TRAINED_LENGTH}")
COMMITTED = 128
"""Tokens of the longest answers whose policies' cells the committed tables have at least."""
STUDY = Study(
    title="The horizon",
    question="How does the variance of the gradient grow with the length of answers, what does `otb` take away of it "
    "at equal progress, and does the proxy hold?",
    cells=[cell for cell in PLAN if cell.settings["setting"]["length"] <= COMMITTED],
    quick=planned(SMALL_SETTINGS, SMALL, SMALL_RUNS, "qwen3-32"),
    measure=measure,
    later=[cell for cell in PLAN if cell.settings["setting"]["length"] > COMMITTED],
)
