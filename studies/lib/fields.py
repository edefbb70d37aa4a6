"""`docs/fields.md`, generated: `python -m studies.lib.fields` rewrites it from what the readers do with example rows.

Every field of an example is taken out, and changed: what the record then lacks or has otherwise is what it becomes.
"""

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from otb_analysis.errors import InputError
from otb_analysis.recorded.formats import FORMATS, NOT_AS_WRITTEN, Format
from otb_analysis.recorded.records import Fields, Place, Tally

FILE = 7
"""Number in the name of the file of the examples."""
IDS, LOGPROBS = [7, 8, 9], [-0.5, -0.25, -0.75]
LIST, GIVEN = [0, 0, *LOGPROBS], [0.5, 0.5, 0.5]
MESSAGES = [("user", "q", False), ("assistant", "a", True)]
CALL = '{"type": "function", "function": {"name": "add", "arguments": "{}"}}'
EXAMPLES: dict[str, dict[str, Any]] = {
    "trl": {"step": 1, "prompt": "p", "completion": "c", "right": 1.0, "advantage": 0.5},
    "verl": {"input": "p", "output": "c", "gts": "1", "score": 1.0, "step": 1, "num_turns": 2, "uid": "u0_0_0"},
    "art": {
        "group_index": 0, "reward": 1.0, "metrics": None, "tools": f"[{CALL}]",
        "messages": [
            {"role": r, "content": c, "tool_calls": f"[{CALL}]" if t else None, "trainable": t} for r, c, t in MESSAGES
        ],
    },
    "areal": {
        "task_id": 0, "sample_idx": 0, "seqlen": 5, "prompt_len": 2, "head_version": 1, "tail_version": 1,
        "reward": 1.0, "prompt": "p", "completion": "c",
    },
    "prime_rl": {
        "token_ids": [5, 6, *IDS], "loss_mask": [0, 0, 1, 1, 1], "inference_logprobs": LIST, "trainer_logprobs": LIST,
        "entropy": [0, 0, 1, 1, 1], "advantages": [0, 0, *GIVEN], "rewards": [1.0] * 5, "step": 1, "export_step": 1,
        "rank": 0, "export_sequence_idx": 0,
    },
    "prime_rl_traces": {},
    "verifiers": {
        "group": {"id": "g"}, "run": {"type": "train", "work": {"type": "train", "step": 1}},
        "traces": [{
            "agent": {"trainable": True}, "rewards": {"right": {"score": 1.0, "weight": 1.0}},
            "nodes": [
                {"parent": None, "token_ids": [5, 6], "mask": [False, False], "logprobs": []},
                {"parent": 0, "token_ids": IDS, "mask": [True] * 3, "logprobs": LOGPROBS, "advantages": GIVEN},
            ],
            "calls": [{"finish_reason": "stop"}],
        }],
    },
    "nemo_rl": {
        "rewards": 1.0, "token_ids": [5, 6, *IDS, 0], "input_lengths": 5, "sample_loss_mask": 1.0,
        "token_loss_mask": [0, 0, 1, 1, 1, 0], "advantages": [0.5] * 6, "generation_logprobs": [*LIST, 0],
        "prev_logprobs": [*LIST, 0],
    },
    "open_instruct": {
        "step": 1, "sample_idx": 0, "prompt_idx": 0, "prompt_tokens": [5, 6], "response_tokens": IDS, "reward": 1.0,
        "advantage": 0.5, "finish_reason": "stop", "logprobs": LOGPROBS,
    },
    "slime": {
        "group_index": 0, "index": 0, "prompt": "p", "tokens": [5, 6, *IDS], "response": "xyz", "response_length": 3,
        "reward": 1.0, "loss_mask": [1, 1, 1], "rollout_log_probs": LOGPROBS, "log_probs": LOGPROBS,
        "advantages": GIVEN, "status": "completed", "truncated": 0, "file_step": 1,
    },
    "verifiers_results": {
        "example_id": 0, "reward": 1.0, "answer": "1", "info": {}, "task": "t", "step": 2,
        "prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}],
    },
    "lm_eval": {
        "doc_id": 0, "target": "1", "arguments": {"gen_args_0": {"arg_0": "p"}}, "resps": [["c"]],
        "filtered_resps": ["c"], "filter": "none", "metrics": ["exact_match"], "exact_match": 1.0,
    },
    "inspect": {
        "id": 1, "epoch": 1, "input": "q", "target": "1", "scores": {"match": {"value": 1.0}}, "limit": None,
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
    },
    "plain": {
        "prompt": "p", "completion": "c", "reward": 1.0, "group": 0, "step": 1, "answer": "1", "prompt_ids": [5, 6],
        "ids": IDS, "mask": [1, 1, 0], "logprobs": LOGPROBS, "trainer_logprobs": LOGPROBS, "advantages": GIVEN,
        "finish_reason": "stop", "grad_norm": 0.5,
    },
}  # fmt: skip
"""A row of each format, as its trainer writes it, with all that is read."""
EXAMPLES["prime_rl_traces"] = {"id": "a", "step": 1, "group": "g", **EXAMPLES["verifiers"]["traces"][0]}
ODD = (5, 0.0, "eval", "aborted", False, [{}])
"""Values that tell whether a field is looked at, where it becomes no part of the record."""
WORDS = {
    "behavior_logprob": "sampler's log-probabilities", "logprob": "trainer's log-probabilities",
    "entropy": "entropies", "advantage": "advantages", "ids": "completion's ids", "prompt_ids": "prompt's ids",
    "messages": "chat", "tools": "tools of the chat template", "finish_reason": "how it ended",
    "reward_parts": "named rewards", "grad_norm": "gradient norm", "n_tokens": "number of completion tokens",
}  # fmt: skip
"""What parts of a record are called where their names do not say it."""
PAGE = """# Fields of every format

Generated by `python -m studies.lib.fields` from what the readers do with example rows; a test fails when it is stale.

You learn here which fields of each format are read, whether a record can do without them, and what they become.
*Checked* fields decide whether the record is read; `right` stands for any reward. What the formats are, and what is
refused: [formats.md](formats.md).

{}
"""
Path_ = tuple[str | int, ...]


def page() -> str:
    """Return the whole page as Markdown."""
    return PAGE.format("\n\n".join(section(name, example) for name, example in EXAMPLES.items()))


def section(name: str, example: Mapping[str, Any]) -> str:
    """Return a format's heading, how its files are found, and its table of fields."""
    kind = FORMATS[name]
    rows, whole = dict[str, tuple[str, str]](), record_of(kind, example)
    assert isinstance(whole, dict), whole
    for path in places(example):
        label = ".".join(str(key) for key in path if isinstance(key, str))
        gone = record_of(kind, changed(example, path))
        # Another value, and in a list another one in every place
        ways = (_other, lambda x: [_other(one) for one in x] if isinstance(x, list) else _other(x))
        alike = [record_of(kind, changed(example, path, way)) for way in ways]
        read = [one for one in (gone, *alike) if isinstance(one, dict)]
        keys = [key for one in read for key in whole if one.get(key) != whole[key]]
        if not keys and any(record_of(kind, changed(example, path, lambda _, x=odd: x)) != whole for odd in ODD):
            keys = ["checked"]
        needed = "no" if isinstance(gone, dict) else "yes"
        before, words = rows.get(label, ("no", ""))
        listed = dict.fromkeys([*filter(None, words.split(", ")), *(WORDS.get(key, key) for key in keys)])
        if len(listed) > 1:
            listed.pop("checked", None)
        rows[label] = (max(needed, before), ", ".join(listed))
    lines = [f"| `{label}` | {needed} | {words or 'not read'} |" for label, (needed, words) in rows.items()]
    called = " or ".join(f"`{one}`" for one in kind.names)
    # The file that is read has a number in its name.
    step = whole.get("step") == repr(FILE) and not any("step" in words.split(", ") for _, words in rows.values())
    where = f"Files: {called}{'; the step is in the name' * step}."
    head = [f"## `{name}`: {kind.about}", "", where, "", "| field | needed | becomes |", "|---|---|---|"]
    return "\n".join([*head, *lines])


def record_of(kind: Format, row: Mapping[str, Any]) -> dict[str, Any] | str:
    """Return what is read of a row, by name; or why nothing is."""
    try:
        (one,) = kind.unfold(row)
        tally = Tally()
        record = kind.read(Fields(Place(Path(f"{FILE}.jsonl"), 1), one), tally, {})
    except (InputError, *NOT_AS_WRITTEN) as error:
        return str(error)
    if record is None:
        return "left out"
    parts = {name: value for name, value in vars(record).items() if name not in ("place", "columns", "special")}
    known = {name: x for name, x in {**parts, **record.columns, "note": +tally}.items() if x is not None}
    return {name: repr(x.tolist() if isinstance(x, np.ndarray) else x) for name, x in known.items()}


def places(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Yield the fields of nested objects, those of every object in a list; a list of numbers is one field."""
    if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(one, dict) for one in value)):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(one, (*path, key))
    else:
        yield path


def changed(example: Mapping[str, Any], path: Path_, change: Callable[[Any], Any] | None = None) -> dict[str, Any]:
    """Return an example with another value in a field, or without the field."""
    row: dict[str, Any] = copy.deepcopy(dict(example))
    holder: Any = row
    for key in path[:-1]:
        holder = holder[key]
    value = holder.pop(path[-1])
    if change is not None:
        holder[path[-1]] = change(value)
    return row


def _other(value: Any) -> Any:
    if isinstance(value, list):
        return [*value[:-1], _other(value[-1])] if value else value
    if isinstance(value, bool) or value is None:
        return value if value is None else not value
    if isinstance(value, str):
        return "length" if value in ("stop", "completed") else f"1{value}"
    return value - 0.25 if isinstance(value, float) else 1 - value if value in (0, 1) else value + 1


def main(path: Path = Path("docs/fields.md")) -> None:
    """Write the page."""
    path.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
