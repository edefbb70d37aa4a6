"""Small valid files of every format, mutated: never a traceback, and never silently other numbers.

What may come of a mutated file: a sentence (`InputError`), the numbers of the whole file, or other numbers and a note.
"""

import copy
import json
import math
import random
import struct

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from otb_analysis.config import ImportConfig
from otb_analysis.errors import InputError, StoreError
from otb_analysis.phases import NOTES
from otb_analysis.recorded.importing import import_rollouts
from otb_analysis.store import RunStore

QUICK, SEEDS = 9, 1_000
"""Seeds of each format that are read at once, and of all formats together."""
ROLLOUTS = [(step, g, k) for step in (1, 2) for g in range(2) for k in range(2)]
IDS, LOGPROBS = [7, 8, 9], [-0.5, -0.25, -0.75]


def plain(step, g, k):
    return {
        "prompt": f"p{g}", "completion": f"c{k}", "reward": float(k), "group": g, "step": step, "answer": "1",
        "prompt_ids": [5, 6 + g], "ids": IDS, "mask": [1, 1, 0], "logprobs": LOGPROBS, "trainer_logprobs": LOGPROBS,
        "advantages": [k - 0.5] * 3, "finish_reason": "stop", "grad_norm": 0.5,
    }  # fmt: skip


def texts(step, g, k):
    return {"prompt": f"p{g}", "completion": f"c{k}", "reward": float(k), "group": g, "step": step}


def trl(step, g, k):
    return {"step": step, "prompt": f"p{g}", "completion": f"c{k}", "right": float(k), "advantage": k - 0.5}


def verl(step, g, k):
    more = {"gts": "1", "num_turns": 2, "uid": f"u{g}_{k}_0"}
    return {"input": f"p{g}", "output": f"c{k}", "score": float(k), "step": step, **more}


def art(step, g, k):
    said = [("user", f"q{g}", False), ("assistant", f"a{k}", True)]
    messages = [{"role": role, "content": text, "tool_calls": None, "trainable": own} for role, text, own in said]
    return {"group_index": g, "reward": float(k), "messages": messages, "metrics": None}


def prime_rl(step, g, k):
    sampled, ids = [False, False, True, True, True], [5, 6 + g, *IDS]
    columns = {"inference_logprobs": [0, 0, *LOGPROBS], "trainer_logprobs": [0, 0, *LOGPROBS]}
    columns |= {"advantages": [k - 0.5] * 5, "rewards": [float(k)] * 5, "entropy": [0, 0, 1, 1, 1]}
    place = {"step": step, "export_step": step, "rank": 0, "export_sequence_idx": 2 * g + k}
    return {"token_ids": ids, "loss_mask": sampled, **columns, **place}


def trace(step, g, k):
    first = {"parent": None, "token_ids": [5, 6 + g], "mask": [False] * 2, "logprobs": []}
    second = {"parent": 0, "token_ids": IDS, "mask": [True] * 3, "logprobs": LOGPROBS, "advantages": [k - 0.5] * 3}
    one = {
        "id": f"{step}{g}{k}", "agent": {"trainable": True}, "rewards": {"right": {"score": float(k), "weight": 1.0}},
        "nodes": [first, second], "calls": [{"finish_reason": "stop"}],
    }  # fmt: skip
    return {
        "group": {"id": f"g{g}"},
        "run": {"type": "train", "work": {"type": "train", "step": step}},
        "traces": [one],
    }


def alone(step, g, k):
    return {"step": step, "group": f"g{g}", **trace(step, g, k)["traces"][0]}


def nemo_rl(step, g, k):
    zeros = [0, 0, *LOGPROBS, 0]
    return {
        "rewards": float(k), "token_ids": [5, 6 + g, *IDS, 0], "input_lengths": 5, "sample_loss_mask": 1.0,
        "token_loss_mask": [0, 0, 1, 1, 1, 0], "advantages": [k - 0.5] * 6, "generation_logprobs": zeros,
        "prev_logprobs": zeros,
    }  # fmt: skip


def open_instruct(step, g, k):
    return {
        "step": step, "sample_idx": k, "prompt_idx": g, "prompt_tokens": [5, 6 + g], "response_tokens": IDS,
        "reward": float(k), "advantage": k - 0.5, "finish_reason": "stop", "logprobs": LOGPROBS,
    }  # fmt: skip


def slime(step, g, k):
    return {
        "group_index": g, "index": 2 * g + k, "prompt": f"p{g}", "tokens": [5, 6 + g, *IDS], "response": "xyz",
        "response_length": 3, "reward": float(k), "loss_mask": [1, 1, 1], "rollout_log_probs": LOGPROBS,
        "status": "completed",
    }  # fmt: skip


FILES = {
    "plain": (plain, "rollouts.jsonl"), "texts": (texts, "rollouts.ndjson"), "array": (texts, "rollouts.json"),
    "table": (plain, "rollouts.parquet"), "trl": (trl, "completions_{step:05d}.parquet"),
    "verl": (verl, "{step}.jsonl"), "art": (art, "trajectories/train/{step:04d}.parquet"),
    "prime_rl": (prime_rl, "step_{step}/rank_0.jsonl"),
    "verifiers": (trace, "step_{step}/traces.jsonl"), "prime_rl_traces": (alone, "stream/00000.jsonl"),
    "nemo_rl": (nemo_rl, "train_data_step{step}.jsonl"),
    "open_instruct": (open_instruct, "run_rollouts_000000.jsonl"), "slime": (slime, "{step}.pt"),
}  # fmt: skip
"""Format → its rows, and what its files are called."""


def written(folder, name, rows):
    """Write rows, as (step, row), into the files of a format; return the files."""
    files = {}
    for step, row in rows:
        files.setdefault(folder / FILES[name][1].format(step=step), []).append((step, row))
    for path, part in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        alone = [row for _, row in part]
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(alone), path)
        elif path.suffix == ".pt":
            torch.save({"rollout_id": part[0][0], "samples": alone}, path)
        elif path.suffix == ".json":
            path.write_text(json.dumps(alone))
        else:
            path.write_text("".join(f"{json.dumps(row)}\n" for row in alone))
    return list(files)


def read(folder, root):
    """Import a folder; return what it says in numbers, and what was noted."""
    NOTES.clear()
    store = RunStore(import_rollouts(folder, ImportConfig(root=root, run="run", if_exists="replace"), lasting=False))
    rows = store.rollouts_df(columns=["step", "group", "reward", "length"])
    return sorted(map(str, rows.itertuples(index=False, name=None))), set(NOTES)


def places(value, path=()):
    """Every place in nested lists and objects, as a path of keys."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [path] if path else []
    for key, one in inner:
        found += places(one, (*path, key))
    return found


def deep(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


ODD = [None, True, "", "x", [], {}, [None], [[1, 2]], {"a": 1}, -1, 0.5, 2**70, float("nan"), float("inf"), -1e300]


def mutate(row, lot):
    """Change one place of a row; return what was done, None where the row is as well-formed as before."""
    before = copy.deepcopy(row)
    path = lot.choice(places(row))
    holder = row
    for key in path[:-1]:
        holder = holder[key]
    value, kind = holder[path[-1]], lot.choice(["drop", "type", "nest", "shorten", "lengthen"])
    if kind == "shorten" and isinstance(value, list | str) and value:
        holder[path[-1]] = value[:-1] if lot.random() < 0.5 else value[1:]
    elif kind == "lengthen" and isinstance(value, list) and value:
        holder[path[-1]] = [*value, value[-1]]
    elif kind == "nest":
        holder[path[-1]] = lot.choice([[value], {"value": value}, deep(60)])
    elif kind == "drop":
        del holder[path[-1]]
    else:
        kind, holder[path[-1]] = "type", lot.choice([one for one in ODD if one != value])
        kind += f" {holder[path[-1]]!r}"
    return None if alike(before, row) else f"{kind} at {'.'.join(map(str, path))}"


def alike(one, other):
    """Whether two parsed files differ in values only, so that the second is as well-formed as the first."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if {type(one), type(other)} <= {int, float}:
        return math.isfinite(other) or not math.isfinite(one)
    return type(one) is type(other)


def parsed(path):
    """A file's rows by another reader; None where they cannot be read, or the file has its own checksums."""
    try:
        if path.suffix == ".parquet":
            return pq.read_table(path).to_pylist()
        return None if path.suffix == ".pt" else [json.loads(line) for line in path.read_bytes().splitlines() if line]
    except (ValueError, OSError, pa.ArrowException):
        return None


def rows_in(paths):
    return [row for path in paths for row in parsed(path) or ()]


def flip(path, lot):
    """Change, drop or double bytes of a file, or cut it off; return what was done, None where the file is as good."""
    before, content = parsed(path), bytearray(path.read_bytes())
    at = lot.randrange(len(content))
    kind = lot.choice(["flip", "flip", "delete", "double", "cut"])
    if kind == "flip":
        content[at] ^= 1 << lot.randrange(8)
    elif kind == "delete":
        del content[at : at + lot.randint(1, 8)]
    elif kind == "double":
        content[at:at] = content[at : at + lot.randint(1, 8)]
    else:
        del content[at:]
    path.write_bytes(content)
    after = parsed(path)
    return None if before is not None and alike(before, after) else f"{kind} at byte {at} of {path.name}"


def failure(name, seed, folder, root, whole):
    """Return what is wrong with reading a mutated file, empty where nothing is."""
    lot = random.Random(f"{name} {seed}")
    rows = [(step, copy.deepcopy(FILES[name][0](step, g, k))) for step, g, k in ROLLOUTS]
    by_field = lot.random() < 0.7
    if by_field and (done := mutate(lot.choice(rows)[1], lot)) is None:
        return ""
    try:
        files = written(folder, name, rows)
    except (pa.ArrowException, OverflowError):  # a table that cannot be written so
        return ""
    if by_field and all(path.suffix == ".parquet" for path in files) and alike(rows_in(whole[2]), rows_in(files)):
        return ""  # written as the type of its column
    if not by_field and (done := flip(lot.choice(files), lot)) is None:
        return ""
    try:
        found, notes = read(folder, root)
    except (InputError, StoreError) as error:
        sentence = str(error)
        return "" if "Traceback" not in sentence and "\n" not in sentence else f"{done}: {sentence!r}"
    except Exception as error:
        return f"{done}: {type(error).__name__}: {error}"
    silent = found != whole[0] and not notes - whole[1]
    return f"{done}: silently {set(found) ^ set(whole[0])}" if silent else ""


def failures(name, seeds, tmp_path):
    root = tmp_path / "runs"
    written(tmp_path / "whole", name, [(step, FILES[name][0](step, g, k)) for step, g, k in ROLLOUTS])
    whole = (*read(tmp_path / "whole", root), sorted(tmp_path.rglob("whole/**/*.parquet")))
    assert len(whole[0]) == len(ROLLOUTS)
    found = [(seed, failure(name, seed, tmp_path / f"{seed}", root, whole)) for seed in seeds]
    return [f"{name} {seed}: {what}" for seed, what in found if what]


@pytest.mark.parametrize("name", FILES)
def test_a_mutated_file_gives_a_sentence_a_note_or_its_own_numbers(name, tmp_path):
    assert failures(name, range(QUICK), tmp_path) == []


@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.parametrize("name", FILES)
def test_the_rest_of_a_thousand_mutated_files(name, tmp_path):
    assert failures(name, range(QUICK, -(-SEEDS // len(FILES))), tmp_path) == []


@pytest.mark.parametrize("name", [name for name, (_, file) in FILES.items() if "json" in file])
def test_a_record_that_is_nested_deeply_is_refused_in_a_sentence(name, tmp_path):
    (path, *_) = written(tmp_path, name, [(step, FILES[name][0](step, g, k)) for step, g, k in ROLLOUTS])
    path.write_text("[" * 100_000 + "]" * 100_000 + "\n" + path.read_text())
    with pytest.raises(InputError, match="is no JSON"):
        read(tmp_path, tmp_path / "runs")


def test_a_bit_that_flipped_in_a_pytorch_file_is_found(tmp_path):
    (path, *_) = written(tmp_path, "slime", [(1, slime(1, 0, k)) for k in range(2)])
    content = bytearray(path.read_bytes())
    content[content.index(struct.pack(">d", 1.0))] ^= 1  # the reward
    path.write_bytes(content)
    with pytest.raises(InputError):
        read(path, tmp_path / "runs")


def test_an_infinite_reward_of_trl_is_a_sentence(tmp_path):
    rows = [(1, trl(1, g, k)) for _, g, k in ROLLOUTS[:4]]
    rows[0][1]["right"] = math.inf
    written(tmp_path / "trl", "trl", rows)
    with pytest.raises(InputError, match="right is inf"):
        read(tmp_path / "trl", tmp_path / "runs")


def test_a_group_that_is_not_a_number_is_refused(tmp_path):
    rows = [(1, texts(1, 0, k) | {"group": math.nan}) for k in range(2)]
    written(tmp_path / "texts", "texts", rows)
    with pytest.raises(InputError, match="group is nan"):
        read(tmp_path / "texts", tmp_path / "runs")
