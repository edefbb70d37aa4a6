"""What a configuration must satisfy before anything is loaded, made or written."""

from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter

from otb_analysis.config import EstimatorConfig, TrainConfig
from otb_analysis.errors import InputError
from otb_analysis.estimators import ESTIMATORS, entry_of, options_from_dict
from otb_analysis.estimators.spec import TRAINABLE_NEEDS
from otb_analysis.extras import require
from otb_analysis.measurement.levels import level_of
from otb_analysis.objectives.filters import FILTERS
from otb_analysis.objectives.registry import lookup, options_from_table
from otb_analysis.objectives.token_weights import TOKEN_WEIGHTS
from otb_analysis.rollouts.sampling import check_soft_sampling
from otb_analysis.store.layout import check_run_name
from otb_analysis.training.policy.objective import Objective
from otb_analysis.training.runtime.trackers import check_trackers

POSITIVE = (
    *("sample.prompts", "sample.group_size", "sample.max_new_tokens", "sample.max_turns", "sample.temperature"),
    *(
        "sample.vllm_memory",
        "sample.filter_rounds",
        "optimize.steps",
        "optimize.learning_rate",
        "objective.epochs",
        "objective.minibatches",
    ),
    *("critic.width", "critic.updates", "warm_start.batch", "warm_start.learning_rate", "warm_start.max_steps"),
    *("warm_start.check_every", "warm_start.check_prompts", "evaluate.prompts", "evaluate.samples"),
    *("measure.sampled.share", "checkpoint.keep", "lora.alpha", "measure.contrast.steps"),
    *("measure.contrast.batch", "measure.contrast.learning_rate"),
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
    *("critic.learning_rate", "evaluate.every"),
)


def check(config: TrainConfig, processes: int = 1) -> None:
    """Refuse a configuration that cannot work in a run of so many processes.

    Raises:
        InputError: The first problem, with its remedy.
    """
    if problem := next(_problems(config, processes), None):
        raise InputError(problem)


def trains_on_exact(estimator: EstimatorConfig) -> bool:
    """Return whether the estimator that trains reads exact norms, so that every rollout of every step is measured."""
    needs = entry_of(estimator.name).needs
    return "rollout_norm_sq" in needs or ("energy" in needs and estimator.energy == "exact")


def _problems(config: TrainConfig, processes: int) -> Iterator[str]:
    """Yield what is wrong with a configuration; what looks up a name raises the problem itself."""
    path = config.root / check_run_name(config.run_name)
    if config.if_exists == "error" and path.exists():  # before minutes are spent on a warm start
        yield (
            f"run {config.run_name!r} already exists in {config.root}; pass another --run, --if-exists resume "
            "or --if-exists replace."
        )
    check_trackers(config.trackers)
    if config.lora.rank > 0:
        require("peft", "lora.rank above 0")
    if config.model and config.tokenizer != "characters":
        yield f"tokenizer is {config.tokenizer!r}, but model {config.model!r} has its own; leave one of them out."
    name, critic, objective = config.estimator.name, config.critic, config.objective
    entry = entry_of(name)
    options_from_dict(name, config.estimator.options)
    for need in entry.needs:
        if need not in TRAINABLE_NEEDS:
            yield f"estimator.name is {name!r}, which needs {need}; training cannot provide it, choose another."
    if "ratio" in entry.needs and objective.ratio == "none":
        yield f"estimator.name is {name!r}, which needs importance ratios; set objective.ratio."
    if "value" in entry.needs and not critic.enabled:
        yield f"estimator.name is {name!r}, which needs a critic; set critic.enabled."
    if critic.enabled:
        yield from _critic_problems(config)
    for other in config.measure.subgroups:
        if "value" in entry_of(other).needs and not critic.enabled:
            yield f"measure.subgroups has {other!r}, which needs a critic; set critic.enabled or leave it out."
    Objective(objective)  # refuses names and options that do not exist
    if "contrast" in TOKEN_WEIGHTS[objective.token_weight].needs and config.measure.contrast != replace(
        config.measure.contrast, every=1, first=0
    ):
        yield (
            f"objective.token_weight is {objective.token_weight!r}, which reads the contrast of every step; "
            "set measure.contrast.every to 1."
        )
    if objective.kl_coefficient > 0 and (objective.kl_estimator, objective.kl_in) == ("k1", "loss"):
        yield (
            "objective.kl_estimator is 'k1' in the loss, where its expected gradient is zero; "
            "take k2 or k3, or set objective.kl_in to 'reward'."
        )
    for level in config.measure.further:
        level_of(level)
        if hasattr(config.measure, level):
            yield f"measure.further has {level!r}, which has a section of its own; set measure.{level}.every."
    settings = {setting: attrgetter(setting)(config) for setting in (*POSITIVE, *NOT_NEGATIVE)}
    for level, plan in config.measure.schedules.items():
        fields = [field for field in ("every", "prompts") if hasattr(plan, field)]
        settings |= {f"measure.{level}.{field}": getattr(plan, field) for field in fields}
    for setting, number in settings.items():
        positive = setting in POSITIVE
        if not (number > 0 if positive else number >= 0) or number == float("inf"):
            yield f"{setting} is {number}; choose a finite number {'above' if positive else 'of at least'} 0."
    if config.sample.group_size == 1:
        # What compares rollouts of one prompt would train as `none`, or not at all.
        remedy = "set sample.group_size to at least 2, or"
        if not entry.takes_single:
            others = [n for n, e in ESTIMATORS.items() if e.takes_single and set(e.needs) <= TRAINABLE_NEEDS]
            yield (
                f"sample.group_size is 1 but estimator.name is {name!r}, which compares rollouts of one prompt; "
                f"{remedy} estimator.name to one of {', '.join(others)}."
            )
        if config.sample.filter == "dynamic":
            yield (
                "sample.group_size is 1, where sample.filter 'dynamic' keeps no group; "
                f"{remedy} sample.filter to 'none'."
            )
        if objective.shaping == "drop_equal":
            yield (
                "sample.group_size is 1, where objective.shaping 'drop_equal' drops every rollout; "
                f"{remedy} choose another shaping."
            )
    if config.measure.sampled.share > 1:
        yield f"measure.sampled.share is {config.measure.sampled.share}; choose a share of at most 1."
    yield from _sketch_problems(config)
    rollouts = config.sample.prompts * config.sample.group_size
    if rollouts < processes:
        yield (
            f"sample.prompts·group_size is {rollouts} for {processes} processes; sample at least one rollout on each."
        )
    options_from_table(
        config.sample.filter, lookup("filter", config.sample.filter, FILTERS).options, config.sample.filter_options
    )
    if config.sample.filter != "none" and processes > 1:
        yield (
            f"sample.filter is {config.sample.filter!r} but filters work with one process and {processes} were "
            "launched; launch one, or set it to 'none'."
        )
    check_soft_sampling(config.sample)
    if config.sample.soft:
        yield from _soft_problems(config, processes)
    if config.sample.engine == "vllm":
        if processes > 1:
            yield (
                f"sample.engine is 'vllm' but vLLM works with one process here and {processes} were launched; "
                "set it to 'transformers'."
            )
        require("vllm", "sample.engine 'vllm'")
    start = config.warm_start
    if not 0 <= start.success_low < start.success_high <= 1:
        yield (
            f"warm_start.success_low is {start.success_low} and success_high is {start.success_high}; "
            "choose 0 ≤ success_low < success_high ≤ 1."
        )


def _critic_problems(config: TrainConfig) -> Iterator[str]:
    """Yield where a critic's settings contradict each other or the estimator that trains on its values."""
    critic = config.critic
    for name in ("discount", "decay"):
        if not 0.0 <= getattr(critic, name) <= 1.0:
            yield f"critic.{name} is {getattr(critic, name)}; choose a number from 0 to 1."
    for name in ("path", "gradient_checkpointing"):
        if critic.kind == "head" and getattr(critic, name):
            yield f"critic.{name} is {getattr(critic, name)!r}, which a head does not have; set critic.kind to 'model'."
    if config.estimator.name == "tvm" and critic.target != "tvm":
        yield (
            f"estimator.name is 'tvm' but critic.target is {critic.target!r}; set critic.target to 'tvm', or take the "
            "estimator 'value'."
        )
    if config.estimator.name != "value":
        return
    # γ and λ of the advantages must be those of the critic's target. The target `return` fits any λ.
    options = options_from_dict("value", config.estimator.options)
    fitted: dict[str, dict[str, float]] = {
        "return": {"discount": 1.0},
        "gae": {"discount": critic.discount, "decay": critic.decay},
        "tvm": {"discount": 1.0, "decay": 1.0},
    }
    for name, number in fitted[critic.target].items():
        if getattr(options, name) != number:
            gae = critic.target == "gae"
            remedy = f"set critic.{name} to the same" if gae else "set critic.target to 'gae' with both"
            yield (
                f"estimator.options {name} is {getattr(options, name)} but the critic is fitted with {number} "
                f"(critic.target is {critic.target!r}); {remedy}, or change the option to {number}."
            )


def _soft_problems(config: TrainConfig, processes: int) -> Iterator[str]:
    """Yield what soft tokens do not work with: what reads the distribution that a token was drawn from, mostly."""
    given, name, objective = f"sample.soft is {config.sample.soft}", config.estimator.name, config.objective
    needs = entry_of(name).needed(options_from_dict(name, config.estimator.options))
    if "energy" in needs and config.estimator.energy == "proxy":
        yield (
            f"{given}, and soft tokens have no categorical proxy, which estimator.name {name!r} weights by; set "
            "estimator.energy to 'exact', or take an estimator without energies, such as rloo."
        )
    if "entropy" in needs:
        yield (
            f"{given}, and soft tokens have no entropy, which estimator.name {name!r} needs; leave it out of "
            "estimator.options features, or take another estimator."
        )
    if objective.token_weight != "none" or objective.entropy_bonus > 0:
        what = "entropy_bonus" if objective.token_weight == "none" else "token_weight"
        yield (
            f"{given}, and soft tokens have neither probability nor entropy, which objective.{what} reads; leave it "
            "out or set sample.soft to 0."
        )
    if config.critic.enabled and config.critic.kind == "model":
        yield f"{given}, but a critic of kind 'model' reads tokens only; set critic.kind to 'head'."
    if config.sample.engine == "vllm":
        yield f"{given}, but sample.engine 'vllm' samples tokens only; set it to 'transformers'."
    if processes > 1:
        yield f"{given}, but soft tokens work with one process and {processes} were launched; launch one."
    if config.optimize.precision != "float32":
        yield f"{given}, but log-densities need optimize.precision 'float32'; set it, or set sample.soft to 0."
    if config.measure.engine in ("generic", "fast"):
        yield f"{given}, which measure.engine {config.measure.engine!r} has no rule for; set it to 'auto'."
    if config.measure.gram == "sketch":
        yield f"{given}, where the Gram matrix is always exact; set measure.gram to 'auto'."
    further = [level for level, plan in config.measure.levels.items() if plan.every > 0]
    if config.measure.budget > 0 or further:
        what = f"measure.{further[0]}.every" if further else "measure.budget"
        yield f"{given}, where only measure.exact and measure.gradients measure; set {what} to 0."


def _sketch_problems(config: TrainConfig) -> Iterator[str]:
    sketch = config.measure.sketch
    if sketch.directions < 2:
        yield f"measure.sketch.directions is {sketch.directions}; choose at least 2, so that a standard error exists."
    if sketch.every > 0 and trains_on_exact(config.estimator):
        yield (
            f"estimator.name is {config.estimator.name!r}, which already measures every group exactly; "
            "set measure.sketch.every to 0."
        )
    for name in ("exact", "sampled"):
        level = getattr(config.measure, name)
        whole = not 0 < level.prompts < config.sample.prompts
        if sketch.every > 0 and level.every > 0 and whole and sketch.every % level.every == 0:
            yield (
                f"measure.{name} already measures every group at each step of measure.sketch; "
                f"lower measure.{name}.prompts or raise measure.{name}.every."
            )
