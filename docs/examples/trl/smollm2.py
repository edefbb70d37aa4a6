"""Three steps of SmolLM2-135M-Instruct under OTBGRPOTrainer, with advantages recomputed in float64 at every step.

    .venv-trl/bin/python docs/examples/trl/smollm2.py .cache/models/smollm2 docs/results

Needs trl and the model (`otb model fetch smollm2`). The reward is the share of digits in the answer, so that it differs
between rollouts. Writes trl_smollm2.md, and the run under runs/.
"""

import sys
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from trl import GRPOConfig

from otb_analysis.integrations.trl import OTBGRPOTrainer, RecordConfig
from otb_analysis.rollouts.models import load_policy
from otb_analysis.store import RunStore

SIZE = 4
QUESTIONS = ["Count from one to five in digits.", "What is 17 + 25?", "Name a year.", "How many days has a week?"]


def digits(completions: list[Any], **columns: object) -> list[float]:
    """Pay the share of digits in an answer."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(sign.isdigit() for sign in text) / max(len(text), 1) for text in texts]


class Checked(OTBGRPOTrainer):
    """Recomputes otb_loo from a float64 copy of the policy, row by row, and keeps the largest difference."""

    differences: list[float]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        twin = deepcopy(self.accelerator.unwrap_model(self.model)).double().eval()
        realized = []
        for row in range(len(batch["prompt_ids"])):
            prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()]
            answer = batch["completion_ids"][row][batch["completion_mask"][row].bool()]
            with torch.no_grad():
                logits = twin(torch.cat([prompt, answer])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
            pi = (logits / self.temperature).softmax(-1)
            pi[torch.arange(len(answer)), answer] -= 1
            realized.append(pi.square().sum(-1).cumsum(0).numpy())
        reward = self._rewards_by_function[:, 0].double().numpy()
        worst = 0.0
        for i, own in enumerate(realized):
            for t in range(len(own)):
                others = [j for j in range(len(realized)) if j // SIZE == i // SIZE and j != i and len(realized[j]) > t]
                weights = np.array([realized[j][t] for j in others])
                baseline = weights @ reward[others] / weights.sum() if others else 0.0
                worst = max(worst, abs(float(batch["advantages"][i, t]) - (reward[i] - baseline)))
        self.differences.append(worst)
        return batch


def main() -> None:
    """Train and write the result."""
    model, tokenizer = load_policy(sys.argv[1])
    messages = [[{"role": "user", "content": text}] for text in QUESTIONS]
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 8, "num_generations": SIZE, "max_completion_length": 24, "max_steps": 3,
        "learning_rate": 1e-6,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trainer = Checked(
            model,
            digits,
            GRPOConfig(
                output_dir=folder, use_cpu=True, bf16=False, logging_steps=1, report_to="none", save_strategy="no",
                **settings,
            ),
            Dataset.from_dict({"prompt": messages}),
            processing_class=tokenizer,
            estimator="otb_loo",
            record=RecordConfig(run="trl-smollm2", if_exists="replace"),
        )  # fmt: skip
        trainer.differences = []
        trainer.train()
    steps = RunStore(Path("runs/trl-smollm2")).steps_df()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    lines = [
        "# Three steps of SmolLM2-135M under OTBGRPOTrainer\n",
        "How far TRL's per-token advantages are from otb_loo recomputed in float64 (they are stored in float32).\n",
        "```",
        ".venv-trl/bin/python docs/examples/trl/smollm2.py .cache/models/smollm2 docs/results",
        "```\n",
        f"{', '.join(f'{name} {value}' for name, value in settings.items())}; float32, CPU.\n",
        "| step | tokens | largest difference | ‖ḡ‖ | mean reward | z of the sampling check | our forward pass, s | "
        "whole step, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for k, entry in enumerate(logged):
        row = steps.iloc[k]
        lines.append(
            f"| {k} | {row['n_tokens']} | {trainer.differences[k]:.1e} | {float(entry['grad_norm']):.2f} | "
            f"{row['reward_mean']:.3f} | {row['certificate_prob_z']:.1f} | {row['seconds_forward']:.1f} | "
            f"{entry['step_time']:.1f} |"
        )
    lines.append("\nThe whole step holds the check in float64 too. One run on a machine that others used.")
    Path(sys.argv[2], "trl_smollm2.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
