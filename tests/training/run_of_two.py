"""Two processes of a run, started by `test_processes.py`: single updates, levels, whole runs, failures.

Usage: run_of_two.py FOLDER CHECKPOINT. Libraries are imported once, then each pair of processes is forked and meets
through gloo, in an environment like the one that `accelerate launch` sets. What a process says goes to
FOLDER/WHAT-RANK.txt, how it ended to FOLDER/WHAT-RANK.code.
"""

import os
import socket
import sys
import traceback
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from otb_analysis.commands import cli
from otb_analysis.config import (
    AttributionSchedule,
    CheckpointConfig,
    ContrastSchedule,
    CriticConfig,
    EstimatorConfig,
    EvaluateConfig,
    MeasureConfig,
    ObjectiveConfig,
    OptimizeConfig,
    SampleConfig,
    SampledSchedule,
    Schedule,
    SketchSchedule,
    TrainConfig,
)
from otb_analysis.gradients import attribution, sampled
from otb_analysis.gradients.exact.layers import UnfitError
from otb_analysis.gradients.sketched import sketch
from otb_analysis.measurement import level
from otb_analysis.measurement.forward import forward_statistics
from otb_analysis.measurement.measurer import GradientMeasurer
from otb_analysis.measurement.table import compute_rewards, token_table
from otb_analysis.processes import SINGLE_PROCESS, Processes
from otb_analysis.rollouts.generation import Generation
from otb_analysis.rollouts.models import gathered, load_policy
from otb_analysis.rollouts.sampling import sample
from otb_analysis.tasks import Prompt
from otb_analysis.training.loop import train, train_step
from otb_analysis.training.runtime import shard
from otb_analysis.training.setup import Trainer

# 3 prompts of 3 rollouts for two processes: 5 and 4, so the second group spans both.
SHAPE = SampleConfig(prompts=3, group_size=3, max_new_tokens=6)
MEASURE = MeasureConfig(exact=Schedule(1, 0), attribution=AttributionSchedule(1))
CASES = {
    "plain": {},
    "micro_batches": {"optimize": OptimizeConfig(learning_rate=0.01, max_grad_norm=0.5, micro_batch=2)},
    "tvm": {"critic": CriticConfig(kind="model", target="tvm")},
    "gae": {"critic": CriticConfig(width=8, target="gae", discount=0.9, decay=0.5)},
    "regression": {"estimator": EstimatorConfig(name="energy_regression", options={"memory": "0.9"})},
    # One engine for both: sharded models have hooks, which `fast` does not follow.
    "exact": {
        "estimator": EstimatorConfig(name="otb", energy="exact"),
        "measure": replace(MEASURE, engine="reference"),
    },
    "off_policy": {
        "objective": ObjectiveConfig(
            ratio="ppo", aggregation="dapo", minibatches=2, epochs=2, kl_coefficient=0.1, entropy_bonus=0.01
        )
    },
}
SCALARS = ("grad_norm", "grad_norm_max", "loss", "critic_loss", "critic_explained_variance", "reward_mean", "n_tokens")


class Odd:
    """Pays 1 for an odd first character; on the process that FAILS names, it gives up at the second step."""

    name, alphabet = "odd", "0123456789+=;#"

    def __init__(self, config=None):
        self.paid = 0

    def prompt(self, split, index):
        return Prompt(id=f"{split}{index}", text=f"{index}+", answer="")

    def demonstration(self, prompt):
        return []

    def reply(self, prompt, turns):
        return None

    def reward(self, prompt, turns):
        self.paid += 1
        if self.paid > 5 and os.environ.get("FAILS") == os.environ["RANK"]:
            raise RuntimeError("the grader is out")
        return [{"odd": float(turns[-1].text[:1] in tuple("13579"))}]


class Fixed:
    """Continues the k-th of all contexts by the k-th of given answers, whichever process asks."""

    def __init__(self, end, processes, count=9):
        draw = np.random.default_rng(5)
        rows = [[*draw.integers(3, 13, size=draw.integers(1, 6)).tolist(), end] for _ in range(count)]
        self.rows = [rows[k] for k in processes.shard(np.arange(count))]

    def generate(self, contexts, max_new_tokens, temperature):
        assert len(contexts) == len(self.rows)
        return [Generation(row, [-2.0 - 0.1 * k for k in range(len(row))], True) for row in self.rows]


def settings(checkpoint, sharded, **changes):
    config = TrainConfig(
        model=checkpoint,
        task="run_of_two:Odd",
        sample=SHAPE,
        optimize=OptimizeConfig(steps=3, learning_rate=0.01, max_grad_norm=0.5),
        critic=CriticConfig(width=8, updates=2),
        measure=MEASURE,
        evaluate=EvaluateConfig(every=0),
        checkpoint=CheckpointConfig(every=1, keep=9),
    )
    return replace(config, **changes)


def one_step(config, processes):
    model, tokenizer = load_policy(config.model)
    trainer = Trainer(config, model, tokenizer, Odd(), processes)
    trainer.generator = Fixed(tokenizer.eos_token_id, processes)
    tables = train_step(trainer, 0)
    weights = [p.detach() for p in trainer.model.parameters()]
    weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in weights]
    return {name: np.array(tables.steps[name]) for name in SCALARS} | {
        "rollout": np.array(tables.tokens["rollout"]),
        "advantage": tables.tokens["advantage"].filled(np.nan),
        "rollouts": np.array(tables.rollouts["rollout"]),
        "exact": np.array([0.0]) if tables.gradients is None else np.array(tables.gradients["mean_norm_sq"]),
        "norms": tables.tokens["grad_norm_sq"].filled(np.nan),
        "attribution": tables.tokens["attribution"].filled(np.nan),
        "weights": torch.cat([p.flatten() for p in weights]).numpy(),
        "critic": torch.cat([p.detach().flatten() for p in trainer.critic.net.parameters()]).numpy(),
    }


def updates(folder, checkpoint):
    together, results = Processes.joined(sharded=False), {}
    for sharded in (False, True):
        for case, changes in CASES.items():
            config = settings(checkpoint, sharded, **changes)
            for name, processes in {"one": SINGLE_PROCESS, "two": replace(together, sharded=sharded)}.items():
                found = one_step(config, processes)
                results |= {f"{sharded} {case} {name} {key}": value for key, value in found.items()}
    np.savez(folder / f"{together.rank}.npz", **results)
    together.end()


class Alone(level.Level):
    """A level of one's own, which knows nothing of other processes: it notes who ran it."""

    phase = "alone"

    def measure(self, step, plan, known):
        return known.with_columns({"alone": np.full(step.table.mask.shape, float(os.environ["RANK"]))})

    def passes(self, plan, rollouts, rows):
        return 0.0


ALONE = Alone()
EVERY_LEVEL = MeasureConfig(
    exact=Schedule(1, 2),
    sampled=SampledSchedule(1, 3, share=0.3),
    sketch=SketchSchedule(1, 0, directions=4, method="hybrid"),
    attribution=AttributionSchedule(1),
    contrast=ContrastSchedule(1, steps=2, batch=4, learning_rate=0.01),
    further={"run_of_two:ALONE": 1},
    gram="sketch",
)
# What fails on the second process, with the level that is then missing: between two exchanges, before the first one,
# after the last one.
BROKEN = [
    ("sampled", sampled, "norms_above_cut"),
    ("sampled", sampled, "_size"),
    ("sampled", level, "calibrate"),
    ("sketch", level, "sketch_score_norms"),
    ("sketch", level, "_exact_is_cheaper"),
    ("attribution", attribution, "forward_slopes"),
    ("attribution", attribution, "check_group"),
    ("attribution", attribution, "_refuse_sum"),
    ("contrast", level, "fitted"),
    ("contrast", level, "halves"),
    ("gram", sketch, "gradient_sketch"),
    ("gram", sketch, "check_weights"),
    ("gram", sketch, "of_all_rows"),
]


def levels(folder, checkpoint, name="levels"):
    """Measure one batch by every level, by one process and by several; of two then with a level broken on one."""
    together, results = Processes.joined(sharded=False), {}
    model, tokenizer = load_policy(checkpoint)
    shape = replace(SHAPE, prompts=7, group_size=8)
    prompts = [Odd().prompt("train", k) for k in range(7)]
    rollouts = sample(Fixed(tokenizer.eos_token_id, SINGLE_PROCESS, 56), tokenizer, Odd(), prompts, shape)
    rollouts = compute_rewards(Odd(), rollouts)
    table = token_table(rollouts, forward_statistics(model, rollouts, 1.0), None)
    weights = np.where(table.mask, np.random.default_rng(1).normal(size=table.mask.shape), 0.0)

    def measured(processes, config=EVERY_LEVEL, model=model):
        measurer = GradientMeasurer(model, config, 1.0, processes=processes)
        found = measurer.measure(3, rollouts, table, None, lambda: weights)
        drawn = {} if found.tokens.drawn is None else {"prob": found.tokens.drawn.probability}
        columns = {"norms": found.tokens.norm_sq, "stderr": found.tokens.stderr, **drawn, **found.tokens.further}
        gram = {} if found.gram is None else {"gram": found.gram.inner}
        return columns | gram | {"gaps": np.array(found.gaps), "groups": rollouts.group}

    def keep(case, found):
        results.update({f"{case} {name}": x for name, x in found.items()})

    def broken(*args, **named):
        raise RuntimeError("out of memory")

    def without_forward_mode(*args):
        raise UnfitError("an operation has no forward mode")

    sharded = load_policy(checkpoint)[0]
    shard(sharded, replace(together, sharded=True))
    if together.size > 2:  # three have two of the 7 prompts, and two fit the copies of one half
        exact = MeasureConfig(exact=Schedule(1), gram="exact")
        for who, processes in {"one": SINGLE_PROCESS, "four": together}.items():
            keep(who, measured(processes))
            keep(f"exact {who}", measured(processes, exact))
        with gathered(sharded):
            keep("exact sharded", measured(together, exact, sharded))
        np.savez(folder / f"{name}{together.rank}.npz", **results)
        together.end()
        return
    for by in ("above_cut", "proxy", "uniform"):
        config = replace(EVERY_LEVEL, sampled=replace(EVERY_LEVEL.sampled, by=by))
        for who, processes in {"one": SINGLE_PROCESS, "two": together}.items():
            keep(f"{by} {who}", measured(processes, config))
    with gathered(sharded):
        keep("sharded two", measured(together, model=sharded))
    for broken_level, module, attribute in BROKEN:
        kept = getattr(module, attribute)
        if together.rank:
            setattr(module, attribute, broken)
        keep(f"{broken_level} without {attribute}", measured(together))
        setattr(module, attribute, kept)
    if together.rank:
        attribution.forward_slopes = without_forward_mode
    keep("differences", measured(together))
    np.savez(folder / f"{name}{together.rank}.npz", **results)
    together.end()


def runs(folder, checkpoint):
    remembering = EstimatorConfig(name="energy_regression", options={"memory": "0.9"})
    for kind, own in {"ddp": {}, "fsdp": {}, "memory": {"estimator": remembering}}.items():
        sharded = kind == "fsdp"
        os.environ |= {"ACCELERATE_USE_FSDP": str(sharded).lower(), "FSDP_VERSION": "2"}
        held_out = EvaluateConfig(every=1, prompts=3, samples=3)
        config = settings(checkpoint, sharded, run=kind, evaluate=held_out, trackers=("tensorboard",), **own)
        train(replace(config, root=folder / "whole"))
        short = replace(config, root=folder / "resumed", optimize=replace(config.optimize, steps=2))
        train(short)
        train(replace(short, optimize=config.optimize, if_exists="resume"))


def failure(folder, checkpoint):
    lines = f'task = "run_of_two:Odd"\nmodel = "{checkpoint}"\nroot = "{folder}"\nrun = "fails{os.environ["FAILS"]}"\n'
    file = folder / f"{os.environ['FAILS']}-{os.environ['RANK']}.toml"
    file.write_text(lines + "[sample]\nprompts = 3\ngroup_size = 3\nmax_new_tokens = 6\n[evaluate]\nevery = 0\n")
    sys.exit(cli.main(["train", "--config", str(file)]))


def disagreement(folder, checkpoint):
    file = folder / f"disagree-{os.environ['RANK']}.toml"
    steps = 2 + int(os.environ["RANK"])
    file.write_text(f'model = "{checkpoint}"\nroot = "{folder}"\nrun = "disagree"\n[optimize]\nsteps = {steps}\n')
    sys.exit(cli.main(["train", "--config", str(file)]))


def forked(rank, size, port, folder, name, run, environment):
    """Start one of some processes; return its number."""
    pid = os.fork()
    if pid:
        return pid
    os.environ |= {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "ACCELERATE_USE_CPU": "true",
    }
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)} | environment
    said = os.open(folder / f"{name}-{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    code = 0
    try:
        run()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def two(folder, name, run, size=2, **environment):
    """Run a function in two processes, or more, and note how each ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = [forked(rank, size, port, folder, name, run, environment) for rank in range(size)]
    for rank, pid in enumerate(started):
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        (folder / f"{name}-{rank}.code").write_text(str(code))


def main():
    folder, checkpoint = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # whatever other libraries say about a process group on a CPU
    two(folder, "updates", lambda: updates(folder, checkpoint))
    two(folder, "levels", lambda: levels(folder, checkpoint))
    two(folder, "four", lambda: levels(folder, checkpoint, "four"), size=4)
    two(folder, "runs", lambda: runs(folder, checkpoint))
    for rank in "01":
        two(folder, f"fails{rank}", lambda: failure(folder, checkpoint), FAILS=rank)
    two(folder, "disagree", lambda: disagreement(folder, checkpoint))


if __name__ == "__main__":
    main()
