"""What a configuration must satisfy before anything is loaded, made or written."""

from operator import attrgetter

from otb_analysis.config import TrainConfig
from otb_analysis.errors import InputError, nearest
from otb_analysis.estimators import ESTIMATORS, entry_of, options_from_dict
from otb_analysis.estimators.spec import TRAINABLE_NEEDS
from otb_analysis.extras import require
from otb_analysis.gradients import ENGINES
from otb_analysis.gradients.sketched.score_sketch import METHODS
from otb_analysis.measurement.levels import level_of
from otb_analysis.store.layout import check_run_name
from otb_analysis.training.policy.objective import Objective
from otb_analysis.training.runtime.trackers import check_trackers

POSITIVE = (
    *("sample.prompts", "sample.group_size", "sample.max_new_tokens", "sample.max_turns", "sample.temperature"),
    *("sample.vllm_memory", "optimize.steps", "optimize.learning_rate", "objective.epochs", "objective.minibatches"),
    *("critic.width", "critic.updates", "warm_start.batch", "warm_start.learning_rate", "warm_start.max_steps"),
    *("warm_start.check_every", "warm_start.check_prompts", "evaluate.prompts", "evaluate.samples"),
    *("measure.sampled.share", "checkpoint.keep", "lora.alpha"),
)
NOT_NEGATIVE = (
    *(
        "seed",
        "measure.budget",
        "optimize.max_grad_norm",
        "optimize.weight_decay",
        "optimize.warmup_steps",
        "optimize.micro_batch",
    ),
    *("objective.staleness", "objective.kl_coefficient", "objective.entropy_bonus", "checkpoint.every", "lora.rank"),
    *("critic.learning_rate", "evaluate.every", "measure.budget"),
)


def check(config: TrainConfig, processes: int = 1) -> None:
    """Refuse a configuration that cannot work in a run of so many processes.

    Raises:
        InputError: The first problem, with its remedy.
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
    entry = entry_of(config.estimator.name)
    options_from_dict(config.estimator.name, config.estimator.options)
    unmet = [need for need in entry.needs if need not in TRAINABLE_NEEDS]
    if unmet:
        raise InputError(
            f"estimator.name is {config.estimator.name!r}, which needs {unmet[0]}; training cannot provide it, "
            "choose another."
        )
    if "ratio" in entry.needs and config.objective.ratio == "none":
        raise InputError(
            f"estimator.name is {config.estimator.name!r}, which needs importance ratios; set objective.ratio."
        )
    if "value" in entry.needs and not config.critic.enabled:
        raise InputError(f"estimator.name is {config.estimator.name!r}, which needs a critic; set critic.enabled.")
    if config.critic.enabled:
        _check_critic(config)
    if config.measure.engine not in (*ENGINES, "auto"):
        raise InputError(
            f"measure.engine is {config.measure.engine!r}; this version has {', '.join(ENGINES)}, or pass auto."
        )
    for name in config.measure.subgroups:
        if "value" in entry_of(name).needs and not config.critic.enabled:
            raise InputError(
                f"measure.subgroups has {name!r}, which needs a critic; set critic.enabled or leave it out."
            )
    Objective(config.objective)  # refuses names and options that do not exist
    objective = config.objective
    if objective.kl_coefficient > 0 and (objective.kl_estimator, objective.kl_in) == ("k1", "loss"):
        raise InputError(
            "objective.kl_estimator is 'k1' in the loss, where its expected gradient is zero; "
            "take k2 or k3, or set objective.kl_in to 'reward'."
        )
    for level in config.measure.further:
        level_of(level)
        if hasattr(config.measure, level):
            raise InputError(
                f"measure.further has {level!r}, which has a section of its own; set measure.{level}.every."
            )
    scheduled = {
        f"measure.{level}.{name}": getattr(plan, name)
        for level, plan in config.measure.schedules.items()
        for name in ("every", "prompts")
        if hasattr(plan, name)
    }
    settings = {name: attrgetter(name)(config) for name in (*POSITIVE, *NOT_NEGATIVE)}
    for name, number in (settings | scheduled).items():
        positive = name in POSITIVE
        if not (number > 0 if positive else number >= 0) or number == float("inf"):
            raise InputError(f"{name} is {number}; choose a finite number {'above' if positive else 'of at least'} 0.")
    if config.sample.group_size == 1:
        _check_single(config)
    if config.measure.sampled.share > 1:
        raise InputError(f"measure.sampled.share is {config.measure.sampled.share}; choose a share of at most 1.")
    _check_sketch(config)
    if config.sample.prompts * config.sample.group_size < processes:
        raise InputError(
            f"sample.prompts·group_size is {config.sample.prompts * config.sample.group_size} for {processes} "
            "processes; sample at least one rollout on each."
        )
    if processes > 1 and config.sample.engine == "vllm":
        raise InputError(
            f"sample.engine is 'vllm' but vLLM works with one process here and {processes} were launched; "
            "set it to 'transformers'."
        )
    if config.sample.engine == "vllm":
        require("vllm", "sample.engine 'vllm'")
    start = config.warm_start
    if not 0 <= start.success_low < start.success_high <= 1:
        raise InputError(
            f"warm_start.success_low is {start.success_low} and success_high is {start.success_high}; "
            "choose 0 ≤ success_low < success_high ≤ 1."
        )


def _check_single(config: TrainConfig) -> None:
    """With one rollout per prompt, refuse what compares its rollouts: it would train as `none`, or not at all."""
    name = config.estimator.name
    if not entry_of(name).takes_single:
        others = [n for n, e in ESTIMATORS.items() if e.takes_single and set(e.needs) <= TRAINABLE_NEEDS]
        raise InputError(
            f"sample.group_size is 1 but estimator.name is {name!r}, which compares rollouts of one prompt; "
            f"set sample.group_size to at least 2, or estimator.name to one of {', '.join(others)}."
        )
    if config.objective.shaping == "drop_equal":
        raise InputError(
            "sample.group_size is 1, where objective.shaping 'drop_equal' drops every rollout; "
            "set sample.group_size to at least 2, or choose another shaping."
        )


def _check_critic(config: TrainConfig) -> None:
    """Refuse a critic whose settings contradict each other or the estimator that trains on its values."""
    critic = config.critic
    for name in ("discount", "decay"):
        if not 0.0 <= getattr(critic, name) <= 1.0:
            raise InputError(f"critic.{name} is {getattr(critic, name)}; choose a number from 0 to 1.")
    for name in ("path", "gradient_checkpointing"):
        if critic.kind == "head" and getattr(critic, name):
            raise InputError(
                f"critic.{name} is {getattr(critic, name)!r}, which a head does not have; set critic.kind to 'model'."
            )
    if config.estimator.name == "tvm" and critic.target != "tvm":
        raise InputError(
            f"estimator.name is 'tvm' but critic.target is {critic.target!r}; set critic.target to 'tvm', or take the "
            "estimator 'value'."
        )
    if config.estimator.name == "value":
        _check_value(config)


def _check_value(config: TrainConfig) -> None:
    """Refuse advantages whose γ and λ are not those of the critic's target. The target `return` fits any λ."""
    critic, options = config.critic, options_from_dict("value", config.estimator.options)
    fitted: dict[str, dict[str, float]] = {
        "return": {"discount": 1.0},
        "gae": {"discount": critic.discount, "decay": critic.decay},
        "tvm": {"discount": 1.0, "decay": 1.0},
    }
    for name, number in fitted[critic.target].items():
        if getattr(options, name) != number:
            gae = critic.target == "gae"
            remedy = f"set critic.{name} to the same" if gae else "set critic.target to 'gae' with both"
            raise InputError(
                f"estimator.options {name} is {getattr(options, name)} but the critic is fitted with {number} "
                f"(critic.target is {critic.target!r}); {remedy}, or change the option to {number}."
            )


def _check_sketch(config: TrainConfig) -> None:
    sketch = config.measure.sketch
    if sketch.directions < 2:
        raise InputError(
            f"measure.sketch.directions is {sketch.directions}; choose at least 2, so that a standard error exists."
        )
    if sketch.method not in METHODS:
        raise InputError(f"measure.sketch.method is {sketch.method!r}; {nearest(sketch.method, METHODS)}")
    needs = entry_of(config.estimator.name).needs
    exact = "rollout_norm_sq" in needs or ("energy" in needs and config.estimator.energy == "exact")
    if sketch.every > 0 and exact:
        raise InputError(
            f"estimator.name is {config.estimator.name!r}, which already measures every group exactly; "
            "set measure.sketch.every to 0."
        )
    for name in ("exact", "sampled"):
        level = getattr(config.measure, name)
        whole = not 0 < level.prompts < config.sample.prompts
        if sketch.every > 0 and level.every > 0 and whole and sketch.every % level.every == 0:
            raise InputError(
                f"measure.{name} already measures every group at each step of measure.sketch; "
                f"lower measure.{name}.prompts or raise measure.{name}.every."
            )
