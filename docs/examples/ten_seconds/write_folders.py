"""Writes `completions/` as TRL does and `traces.jsonl` as prime-rl does: 256 rollouts each, rewards 0 or 1 by lot."""

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

lot = random.Random(0)
Path("completions").mkdir(exist_ok=True)
with Path("traces.jsonl").open("w") as traces:
    for step in range(1, 5):
        rows = []
        for group in range(8):
            rate = lot.random()
            paid = [float(lot.random() < rate) for _ in range(8)]
            mean = sum(paid) / 8
            std = (sum((reward - mean) ** 2 for reward in paid) / 7) ** 0.5
            for reward in paid:
                prompt, length, advantage = f"{step}.{group}+1=", lot.randint(20, 60), (reward - mean) / (std + 1e-4)
                rows.append({"step": step, "prompt": prompt, "completion": "y" * length, "correct": reward})
                rows[-1]["advantage"] = advantage
                logprobs = [-lot.expovariate(2.0) for _ in range(length)]
                nodes = [
                    {"parent": None, "token_ids": [step, group], "mask": [False, False], "logprobs": []},
                    {"parent": 0, "token_ids": [7] * length, "mask": [True] * length, "logprobs": logprobs},
                ]
                nodes[1]["advantages"] = [reward - mean] * length
                nodes[1]["trainer_logprobs"] = [value - lot.random() / 50 for value in logprobs]
                one = {"nodes": nodes, "rewards": {"correct": {"score": reward}}, "calls": [{"finish_reason": "stop"}]}
                run = {"type": "train", "work": {"type": "train", "step": step}}
                traces.write(json.dumps({"group": {"id": f"{step}.{group}"}, "run": run, "traces": [one]}) + "\n")
        pq.write_table(pa.Table.from_pylist(rows), f"completions/completions_{step:05d}.parquet")
