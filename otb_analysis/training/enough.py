"""Warnings: too few measured prompts for an interval, answers that are all cut off, and none in the asked form."""

from otb_analysis.config import TrainConfig
from otb_analysis.phases import plural
from otb_analysis.rollouts.sampling import Rollouts
from otb_analysis.statistics import MIN_CLUSTERS
from otb_analysis.tasks import Task
from otb_analysis.tasks.reasoning_gym import ReasoningGym
from otb_analysis.tasks.task_calls import draw_prompts


def too_few_prompts(config: TrainConfig, task: Task) -> str:
    """Return what to change where the level `exact` measures too few prompts for an interval, else nothing."""
    exact, most, total = config.measure.exact, config.sample.prompts, config.optimize.steps
    if exact.every <= 0 or config.measure.budget:  # a budget says it once it has planned
        return ""
    count, ids, steps = min(exact.prompts or most, most), set[str](), 0
    for step in filter(exact.due, range(total)):  # the prompts that the run will draw
        ids |= {prompt.id for prompt in draw_prompts(task, "train", step * most, count)}
        steps += 1
        if len(ids) >= MIN_CLUSTERS:
            return ""
    wanted = -(-MIN_CLUSTERS // max(steps, 1))
    if steps * count >= MIN_CLUSTERS:
        remedy = "take a task with more prompts"
    elif wanted <= most:
        remedy = f"--measure.exact.prompts {wanted}"
    elif total * most >= MIN_CLUSTERS:
        # every ≤ (steps − 1) / (needed − 1): the last measured step that is needed must still be a step of the run
        needed = -(-MIN_CLUSTERS // most)
        remedy = f"--measure.exact.every {max(1, (total - 1) // (needed - 1))} --measure.exact.prompts {most}"
        remedy += " --measure.exact.first 0" if exact.first else ""
    else:
        remedy = f"--optimize.steps {-(-MIN_CLUSTERS // most)} --measure.exact.every 1 --measure.exact.prompts {most}"
    prompts, at = plural(len(ids), "different prompt"), plural(steps, "step")
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
