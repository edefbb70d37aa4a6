"""Warnings: too few measured prompts for an interval, answers that are all cut off, and none in the asked form."""

from otb_analysis.config import TrainConfig
from otb_analysis.phases import plural
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.statistics import MIN_CLUSTERS
from otb_analysis.tasks import Task
from otb_analysis.tasks.reasoning_gym import ReasoningGym
from otb_analysis.tasks.task_calls import draw_prompts
from otb_analysis.training.budget import planned_levels


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
