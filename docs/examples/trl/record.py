"""Two steps of TRL's GRPOTrainer, unchanged, on the policy of the demo: its completions_*.parquet as an example.

    .venv-trl/bin/python docs/examples/trl/record.py docs/examples/trl

Needs trl. Sums of two numbers, two prompts of four rollouts a step; right answers are paid 1, a final `#` 0.1.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from otb_analysis.integrations.recorder import RolloutRecorder
from otb_analysis.rollouts.models import load_policy


def correct(completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """Pay 1 where what stands behind the last # is the answer."""
    return [float(text.rpartition("#")[2] == right) for text, right in zip(completions, answer, strict=True)]


def form(completions: list[str], **columns: object) -> list[float]:
    """Pay 0.1 where there is a # at all."""
    return [0.1 * ("#" in text) for text in completions]


def main() -> None:
    """Train in a temporary directory and copy what was recorded."""
    out = Path(sys.argv[1])
    (out / "rollouts.jsonl").unlink(missing_ok=True)
    model, tokenizer = load_policy("demo")
    sums = [(7, 8), (12, 5), (3, 9), (20, 4)]
    data = {"prompt": [f"{a}+{b}=" for a, b in sums], "answer": [str(a + b) for a, b in sums]}
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=24,
            max_steps=2,
            logging_steps=1,
            log_completions=True,
            shuffle_dataset=False,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
        )
        recorder = RolloutRecorder(out / "rollouts.jsonl")
        GRPOTrainer(
            model, recorder.around([correct, form]), settings, Dataset.from_dict(data), processing_class=tokenizer
        ).train()
        for table in sorted(Path(folder, "completions").glob("*.parquet")):
            shutil.copy(table, out)


if __name__ == "__main__":
    main()
