"""Critics fitted on rollouts of their own: what `value` and `tvm` centre by where a study compares baselines."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from otb_analysis.config import CriticConfig, SampleConfig, TrainConfig
from otb_analysis.errors import InputError
from otb_analysis.tasks.task_calls import draw_prompts
from otb_analysis.training.critic.critic import Critic, make_critic
from otb_analysis.training.critic.nets import CriticBatch
from otb_analysis.training.critic.targets import critic_target
from otb_analysis.training.runtime.progress import Bar, silent
from studies.lib.policies import Policy, ScoredRollouts, score, write


def critic_batches(
    policy: Policy, first: int, batches: int, config: SampleConfig, seed: int, bar: Bar = silent
) -> list[ScoredRollouts]:
    """Return batches of rollouts of distinct prompts' groups for critics to be fitted on.

    `first` is the index of the first prompt of the training split: far from those that are measured.
    """
    written = []
    for k in range(batches):
        prompts = draw_prompts(policy.task, "train", first + k * config.prompts, config.prompts)
        written.append(write(policy, prompts, config, seed=seed + k))
        bar(k + 1, batches, "rollouts for critics")
    return written


def fitted_critic(policy: Policy, config: CriticConfig, batches: Sequence[ScoredRollouts], bar: Bar = silent) -> Critic:
    """Return a critic fitted to each batch in turn, as a run fits the one beside its policy.

    A critic with a backbone starts from the policy's weights.
    Where all reward comes at the end, the targets `return` and `tvm` make the same critic: rollouts that share a prefix
    share its value, so their mean return gives the same gradient as each one's own.

    Raises:
        InputError: There is no batch, or the critic is switched off.
    """
    critic = make_critic(TrainConfig(critic=config), policy.model, policy.tokenizer)
    if critic is None or not batches:
        raise InputError("a critic is fitted on at least one batch with critic.enabled true; pass both.")
    for k, written in enumerate(batches):
        seen = _as_critic_sees(policy, written)
        table = replace(written.table, value=critic.value(seen))
        critic.update(seen, critic_target(config, table.inputs(None)))
        bar(k + 1, len(batches), f"fitting a critic to {config.target}")
    return critic


def with_values(policy: Policy, critic: Critic, written: ScoredRollouts) -> ScoredRollouts:
    """Return rollouts with a critic's values V(h_t) in their table."""
    value = critic.value(_as_critic_sees(policy, written))
    return replace(written, table=replace(written.table, value=value))


def _as_critic_sees(policy: Policy, written: ScoredRollouts) -> CriticBatch:
    forward = score(policy, written.rollouts, written.temperature)
    rows = np.arange(len(written.rollouts.group))
    return CriticBatch(written.rollouts, forward, np.array_split(rows, max(1, len(rows) // 512)))
