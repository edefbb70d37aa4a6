"""What a configuration must satisfy before anything is made or written, and warnings about what it will measure."""

from collections.abc import Callable
from operator import attrgetter
from types import SimpleNamespace

from otb_analysis.config import EstimatorConfig, TrainConfig
from otb_analysis.errors import InputError
from otb_analysis.estimators import ESTIMATORS, entry_of, options_from_dict
from otb_analysis.estimators.spec import TRAINABLE_NEEDS
from otb_analysis.extras import require
from otb_analysis.measurement.level import level_of
from otb_analysis.objectives.aggregation import TOKEN_WEIGHTS
from otb_analysis.objectives.registry import lookup, options_from_table
from otb_analysis.objectives.shaping import FILTERS
from otb_analysis.phases import plural
from otb_analysis.rollouts.sampling import Rollouts, check_soft_sampling
from otb_analysis.statistics import MIN_CLUSTERS
from otb_analysis.store.layout import check_run_name
from otb_analysis.tasks import Task
from otb_analysis.tasks.reasoning_gym import ReasoningGym
from otb_analysis.tasks.task_calls import draw_prompts
from otb_analysis.trackers import check_trackers
from otb_analysis.training.budget import planned_levels
from otb_analysis.training.update import Objective

POSITIVE = (
    *("sample.prompts", "sample.group_size", "sample.max_new_tokens", "sample.max_turns", "sample.temperature"),
    *("sample.vllm_memory", "sample.filter_rounds", "optimize.steps", "optimize.learning_rate", "objective.epochs"),
    *("objective.minibatches", "critic.width", "critic.updates", "warm_start.batch", "warm_start.learning_rate"),
    *("warm_start.max_steps", "warm_start.check_every", "warm_start.check_prompts", "evaluate.prompts"),
    *("evaluate.samples", "measure.sampled.share", "checkpoint.keep", "lora.alpha", "measure.contrast.steps"),
    *("measure.contrast.batch", "measure.contrast.learning_rate"),
)
NOT_NEGATIVE = (
    *("seed", "measure.budget", "optimize.max_grad_norm", "optimize.weight_decay", "optimize.warmup_steps"),
    *("optimize.micro_batch", "objective.staleness", "objective.kl_coefficient", "objective.entropy_bonus"),
    *("checkpoint.every", "lora.rank", "critic.learning_rate", "evaluate.every"),
)
CONFLICTS: tuple[tuple[Callable[[SimpleNamespace], object], str], ...] = (
    (
        lambda c: c.model and c.tokenizer != "characters",
        "tokenizer is {tokenizer!r}, but model {model!r} has its own; leave one of them out.",
    ),
    (
        lambda c: next((need for need in c.entry.needs if need not in TRAINABLE_NEEDS), ""),
        "estimator.name is {estimator.name!r}, which needs {found}; training cannot provide it, choose another.",
    ),
    (
        lambda c: "ratio" in c.entry.needs and c.objective.ratio == "none",
        "estimator.name is {estimator.name!r}, which needs importance ratios; set objective.ratio.",
    ),
    (
        lambda c: "value" in c.entry.needs and not c.critic.enabled,
        "estimator.name is {estimator.name!r}, which needs a critic; set critic.enabled.",
    ),
    (
        lambda c: c.critic.enabled and not 0.0 <= c.critic.discount <= 1.0,
        "critic.discount is {critic.discount}; choose a number from 0 to 1.",
    ),
    (
        lambda c: c.critic.enabled and not 0.0 <= c.critic.decay <= 1.0,
        "critic.decay is {critic.decay}; choose a number from 0 to 1.",
    ),
    (
        lambda c: c.critic.enabled and c.critic.kind == "head" and c.critic.path,
        "critic.path is {critic.path!r}, which a head does not have; set critic.kind to 'model'.",
    ),
    (
        lambda c: c.critic.enabled and c.critic.kind == "head" and c.critic.gradient_checkpointing,
        "critic.gradient_checkpointing is {critic.gradient_checkpointing!r}, which a head does not have; "
        "set critic.kind to 'model'.",
    ),
    (
        lambda c: c.critic.enabled and c.estimator.name == "tvm" and c.critic.target != "tvm",
        "estimator.name is 'tvm' but critic.target is {critic.target!r}; set critic.target to 'tvm', or take the "
        "estimator 'value'.",
    ),
    (lambda c: _fitted_otherwise(c.config) if c.critic.enabled else "", "{found}"),
    (
        lambda c: next(
            (name for name in c.measure.subgroups if "value" in entry_of(name).needs and not c.critic.enabled), ""
        ),
        "measure.subgroups has {found!r}, which needs a critic; set critic.enabled or leave it out.",
    ),
    (
        lambda c: (
            "contrast" in TOKEN_WEIGHTS[c.objective.token_weight].needs
            and (c.measure.contrast.every, c.measure.contrast.first) != (1, 0)
        ),
        "objective.token_weight is {objective.token_weight!r}, which reads the contrast of every step; "
        "set measure.contrast.every to 1.",
    ),
    (
        lambda c: c.objective.kl_coefficient > 0 and (c.objective.kl_estimator, c.objective.kl_in) == ("k1", "loss"),
        "objective.kl_estimator is 'k1' in the loss, where its expected gradient is zero; "
        "take k2 or k3, or set objective.kl_in to 'reward'.",
    ),
    (
        lambda c: next((level for level in c.measure.further if hasattr(c.measure, level)), ""),
        "measure.further has {found!r}, which has a section of its own; set measure.{found}.every.",
    ),
    (  # What compares rollouts of one prompt would train as `none`, or not at all.
        lambda c: (
            c.sample.group_size == 1
            and not c.entry.takes_single
            and ", ".join(n for n, e in ESTIMATORS.items() if e.takes_single and set(e.needs) <= TRAINABLE_NEEDS)
        ),
        "sample.group_size is 1 but estimator.name is {estimator.name!r}, which compares rollouts of one prompt; "
        "set sample.group_size to at least 2, or estimator.name to one of {found}.",
    ),
    (
        lambda c: c.sample.group_size == 1 and c.sample.filter == "dynamic",
        "sample.group_size is 1, where sample.filter 'dynamic' keeps no group; "
        "set sample.group_size to at least 2, or sample.filter to 'none'.",
    ),
    (
        lambda c: c.sample.group_size == 1 and c.objective.shaping == "drop_equal",
        "sample.group_size is 1, where objective.shaping 'drop_equal' drops every rollout; "
        "set sample.group_size to at least 2, or choose another shaping.",
    ),
    (
        lambda c: c.measure.sampled.share > 1,
        "measure.sampled.share is {measure.sampled.share}; choose a share of at most 1.",
    ),
    (
        lambda c: c.measure.sketch.directions < 2,
        "measure.sketch.directions is {measure.sketch.directions}; choose at least 2, so that a standard error exists.",
    ),
    (
        lambda c: c.measure.sketch.every > 0 and trains_on_exact(c.estimator),
        "estimator.name is {estimator.name!r}, which already measures every group exactly; "
        "set measure.sketch.every to 0.",
    ),
    (
        lambda c: next((name for name in ("exact", "sampled") if _leaves_nothing_to_sketch(c.config, name)), ""),
        "measure.{found} already measures every group at each step of measure.sketch; "
        "lower measure.{found}.prompts or raise measure.{found}.every.",
    ),
    (
        lambda c: c.n_rollouts < c.processes,
        "sample.prompts·group_size is {n_rollouts} for {processes} processes; sample at least one rollout on each.",
    ),
    (
        lambda c: c.sample.filter != "none" and c.processes > 1,
        "sample.filter is {sample.filter!r} but filters work with one process and {processes} were "
        "launched; launch one, or set it to 'none'.",
    ),
    # What soft tokens do not work with: what reads the distribution that a token was drawn from, mostly.
    (
        lambda c: c.sample.soft and "energy" in c.needs and c.estimator.energy == "proxy",
        "sample.soft is {sample.soft}, and soft tokens have no categorical proxy, which estimator.name "
        "{estimator.name!r} weights by; set estimator.energy to 'exact', or take an estimator without energies, such "
        "as rloo.",
    ),
    (
        lambda c: c.sample.soft and "entropy" in c.needs,
        "sample.soft is {sample.soft}, and soft tokens have no entropy, which estimator.name {estimator.name!r} needs; "
        "leave it out of estimator.options features, or take another estimator.",
    ),
    (
        lambda c: c.sample.soft and c.objective.token_weight != "none",
        "sample.soft is {sample.soft}, and soft tokens have neither probability nor entropy, which "
        "objective.token_weight reads; leave it out or set sample.soft to 0.",
    ),
    (
        lambda c: c.sample.soft and c.objective.entropy_bonus > 0,
        "sample.soft is {sample.soft}, and soft tokens have neither probability nor entropy, which "
        "objective.entropy_bonus reads; leave it out or set sample.soft to 0.",
    ),
    (
        lambda c: c.sample.soft and c.critic.enabled and c.critic.kind == "model",
        "sample.soft is {sample.soft}, but a critic of kind 'model' reads tokens only; set critic.kind to 'head'.",
    ),
    (
        lambda c: c.sample.soft and c.sample.engine == "vllm",
        "sample.soft is {sample.soft}, but sample.engine 'vllm' samples tokens only; set it to 'transformers'.",
    ),
    (
        lambda c: c.sample.soft and c.processes > 1,
        "sample.soft is {sample.soft}, but soft tokens work with one process and {processes} were launched; "
        "launch one.",
    ),
    (
        lambda c: c.sample.soft and c.optimize.precision != "float32",
        "sample.soft is {sample.soft}, but log-densities need optimize.precision 'float32'; set it, or set sample.soft "
        "to 0.",
    ),
    (
        lambda c: c.sample.soft and c.measure.engine in ("generic", "fast"),
        "sample.soft is {sample.soft}, which measure.engine {measure.engine!r} has no rule for; set it to 'auto'.",
    ),
    (
        lambda c: c.sample.soft and c.measure.gram == "sketch",
        "sample.soft is {sample.soft}, where the Gram matrix is always exact; set measure.gram to 'auto'.",
    ),
    (
        lambda c: c.sample.soft and next((name for name, plan in c.measure.levels.items() if plan.every > 0), ""),
        "sample.soft is {sample.soft}, where only measure.exact and measure.gradients measure; set "
        "measure.{found}.every to 0.",
    ),
    (
        lambda c: c.sample.soft and c.measure.budget > 0,
        "sample.soft is {sample.soft}, where only measure.exact and measure.gradients measure; set measure.budget "
        "to 0.",
    ),
    (
        lambda c: c.sample.engine == "vllm" and c.processes > 1,
        "sample.engine is 'vllm' but vLLM works with one process here and {processes} were launched; "
        "set it to 'transformers'.",
    ),
    (
        lambda c: not 0 <= c.warm_start.success_low < c.warm_start.success_high <= 1,
        "warm_start.success_low is {warm_start.success_low} and success_high is {warm_start.success_high}; "
        "choose 0 ≤ success_low < success_high ≤ 1.",
    ),
)
"""What cannot work together: a test of the configuration `c` and what `check` adds to it, and the sentence where it is
not false; `found` is what the test returned."""


def check(config: TrainConfig, processes: int = 1) -> None:
    """Refuse a configuration that cannot work in a run of so many processes.

    Raises:
        InputError: The first problem, with its remedy. Unknown names come first, then numbers, then `CONFLICTS`.
    """
    path = config.root / check_run_name(config.run_name)
    if config.if_exists == "error" and path.exists():  # before minutes are spent on a warm start
        raise InputError(
            f"run {config.run_name!r} already exists in {config.root}; pass another --run, --if-exists resume "
            "or --if-exists replace."
        )
    check_trackers(config.trackers)
    if config.lora.rank > 0:
        require("peft", "lora.rank above 0")
    name, sample = config.estimator.name, config.sample
    entry, options = entry_of(name), options_from_dict(name, config.estimator.options)
    Objective(config.objective)  # refuses names and options that do not exist
    for level in config.measure.further:
        level_of(level)
    settings = {setting: attrgetter(setting)(config) for setting in (*POSITIVE, *NOT_NEGATIVE)}
    for level, plan in config.measure.schedules.items():
        fields = [field for field in ("every", "prompts") if hasattr(plan, field)]
        settings |= {f"measure.{level}.{field}": getattr(plan, field) for field in fields}
    for setting, number in settings.items():
        positive = setting in POSITIVE
        if not (number > 0 if positive else number >= 0) or number == float("inf"):
            least = "above" if positive else "of at least"
            raise InputError(f"{setting} is {number}; choose a finite number {least} 0.")
    options_from_table(sample.filter, lookup("filter", sample.filter, FILTERS).options, sample.filter_options)
    check_soft_sampling(sample)
    derived = {"needs": entry.needed(options), "n_rollouts": sample.prompts * sample.group_size}
    case = SimpleNamespace(**vars(config), config=config, entry=entry, processes=processes, **derived)
    for broken, sentence in CONFLICTS:
        if found := broken(case):
            raise InputError(sentence.format(found=found, **vars(case)))
    if sample.engine == "vllm":
        require("vllm", "sample.engine 'vllm'")


def trains_on_exact(estimator: EstimatorConfig) -> bool:
    """Return whether the estimator that trains reads exact norms, so that every rollout of every step is measured."""
    needs = entry_of(estimator.name).needs
    return "rollout_norm_sq" in needs or ("energy" in needs and estimator.energy == "exact")


def _fitted_otherwise(config: TrainConfig) -> str:
    """Return the problem where γ or λ of the advantages is not that of the critic's target; `return` fits any λ."""
    critic, options = config.critic, options_from_dict(config.estimator.name, config.estimator.options)
    fitted: dict[str, dict[str, float]] = {
        "return": {"discount": 1.0},
        "gae": {"discount": critic.discount, "decay": critic.decay},
        "tvm": {"discount": 1.0, "decay": 1.0},
    }
    for name, number in fitted[critic.target].items() if config.estimator.name == "value" else ():
        if getattr(options, name) != number:
            gae = critic.target == "gae"
            remedy = f"set critic.{name} to the same" if gae else "set critic.target to 'gae' with both"
            return (
                f"estimator.options {name} is {getattr(options, name)} but the critic is fitted with {number} "
                f"(critic.target is {critic.target!r}); {remedy}, or change the option to {number}."
            )
    return ""


def _leaves_nothing_to_sketch(config: TrainConfig, name: str) -> bool:
    """Return whether a level measures every group at each step at which sketches are due."""
    level, sketch = getattr(config.measure, name), config.measure.sketch
    whole = not 0 < level.prompts < config.sample.prompts
    return sketch.every > 0 and level.every > 0 and whole and sketch.every % level.every == 0


def too_few_prompts(config: TrainConfig, task: Task) -> str:
    """Return what to change where the gradients of too few prompts are measured for an interval, else nothing."""
    measure, most, total = config.measure, config.sample.prompts, config.optimize.steps
    counts = {step: count for step in range(total) if (count := measure.prompts_due(step, most)[1])}
    if not counts or (measure.budget and "gradients" in planned_levels(measure, False)):  # the budget will say it
        return ""
    ids, used = set[str](), 0
    for step, count in counts.items():  # the prompts that the run will draw
        ids |= {prompt.id for prompt in draw_prompts(task, "train", step * most, count)}
        used += count
        if len(ids) >= MIN_CLUSTERS:
            return ""
    level = "gradients" if measure.gradients.every else "exact"
    wanted, option = -(-MIN_CLUSTERS // len(counts)), f"--measure.{level}"
    if used >= MIN_CLUSTERS:
        remedy = "take a task with more prompts"
    elif wanted <= most:
        remedy = f"{option}.prompts {wanted}"
    elif total * most >= MIN_CLUSTERS:
        # every ≤ (steps − 1) / (needed − 1): the last measured step that is needed must still be a step of the run
        needed = -(-MIN_CLUSTERS // most)
        remedy = f"{option}.every {max(1, (total - 1) // (needed - 1))} {option}.prompts {most}"
        remedy += f" {option}.first 0" if getattr(measure, level).first else ""
    else:
        remedy = f"--optimize.steps {-(-MIN_CLUSTERS // most)} {option}.every 1 {option}.prompts {most}"
    prompts, at = plural(len(ids), "different prompt"), plural(len(counts), "step")
    return f"this run will measure {prompts} at {at}; an interval takes {MIN_CLUSTERS}: {remedy}."


def none_ends(config: TrainConfig, step: int, rollouts: Rollouts) -> str:
    """Return what to change where every answer of a step used up its length budget, else nothing."""
    if any(reason != "length" for reason in rollouts.finish_reason):
        return ""
    budget = config.sample.max_new_tokens
    return (
        f"all {len(rollouts.group)} answers of step {step} end at max_new_tokens = {budget}, so they are cut off and "
        "most tasks pay nothing for them; raise --sample.max-new-tokens."
    )


def none_answers(task: Task, step: int, rollouts: Rollouts) -> str:
    """Return what was written where no rollout of the first step has an answer in the form its task asks for."""
    if step or not isinstance(task, ReasoningGym):
        return ""
    texts = [(rollouts.prompts[g], turns[-1].text) for g, turns in zip(rollouts.group, rollouts.turns, strict=True)]
    if any(task.final_answer(prompt, text) is not None for prompt, text in texts):
        return ""
    return (
        f"none of the {len(texts)} answers of step {step} has the form that {task.name} asks for, so none is paid; one "
        f"is {texts[0][1][:200]!r}; choose another {task.name}.answer_format, or show examples ({task.name}.shots)."
    )
