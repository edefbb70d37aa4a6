"""JSON for scripts follows the committed schemas, whatever the run is; a key more or less is found."""

import copy
import json
import re
import shlex
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from otb_analysis.commands.cli import main
from otb_analysis.config import EstimatorConfig, SampleConfig, TrainConfig, plain_config
from tests.answers.test_doors import SIZE, SOURCE, write
from tests.app.token_runs import write_token_run

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"
pytestmark = pytest.mark.skipif(not SCHEMAS.is_dir(), reason="installed without its repository")
jsonschema = pytest.importorskip("jsonschema")


@pytest.fixture(scope="module")
def root(tmp_path_factory, checkpoint):
    """Runs: plain, with a sampling alarm, of few prompts, with texts of tokens, audited; and recorded rollouts."""
    folder = tmp_path_factory.mktemp("schemas")
    config = plain_config(TrainConfig(estimator=EstimatorConfig(name="otb"), sample=SampleConfig(16, SIZE)))
    recorded = {name: config[name] for name in ("estimator", "model", "task")} | {"source": SOURCE}
    write(folder, "plain", config)
    write(folder, "few", config | {"seed": 1}, prompts=5, steps=2)
    write(folder, "alarm", recorded | {"rollouts": "rollouts.jsonl"}, alarm=True)
    write_token_run(folder, "texts", steps=40, dies=20)  # no step is measured, and an alarm fires
    random = np.random.default_rng(1)
    rows = [
        {"prompt": f"{g}+{g}=", "completion": f"{random.integers(100)}#{'1' * k}", "reward": float(k % 2), "group": g}
        for g in range(20)
        for k in range(4)
    ]
    (folder / "mine.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = ["audit", str(folder / "mine.jsonl"), "--model", str(checkpoint), "--root", str(folder), "--run", "audited"]
    assert main([*words, "--go"]) == 0
    return folder


@pytest.fixture
def printed(root, checkpoint, capsys):
    """What a command prints as JSON, without NaN."""

    def run(door, *words):
        capsys.readouterr()
        places = {"FILE": root / "mine.jsonl", "FOLDER": root, "MODEL": checkpoint}
        assert main([door, *(str(places.get(word, word)) for word in words), "--json", "--root", str(root)]) in (
            0,
            None,
        )
        return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)

    return run


@cache
def validator(door):
    schema = json.loads((SCHEMAS / f"{door}.json").read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


CALLS = [
    "compare plain", "compare alarm", "compare few", "compare texts", "compare audited", "compare plain few --curves",
    "compare plain --a rloo --b none --curves", "compare plain few alarm texts audited",
    "diagnose FOLDER", "diagnose plain few alarm audited", "diagnose texts --step 12",
    "diagnose audited --step 0 --curves",
    "tokens texts", "tokens audited --rollout 1 --t 0 --against rloo", "tokens audited --estimator otb",
    "audit --run plain", "audit --run alarm", "audit --run few", "audit --run texts", "audit --run audited",
    "audit FILE", "audit FILE --model MODEL", "audit FILE --model MODEL --run again --if-exists replace --go",
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_every_output_follows_its_schema(call, printed):
    door, *words = shlex.split(call)
    record = printed(door, *words)
    assert [f"{one.json_path}: {one.message[:200]}" for one in validator(door).iter_errors(record)] == []
    for one in record if isinstance(record, list) else [record]:
        assert next(iter(one)) == "schema" and one["schema"] == f"urn:otb-analysis:{door}:1"


def places(record, path=()):
    """Yield the path of every object."""
    if isinstance(record, dict):
        yield path
    for key, one in (
        record.items() if isinstance(record, dict) else enumerate(record) if isinstance(record, list) else ()
    ):
        yield from places(one, (*path, key))


OPEN = {"settings", "tokens", "columns", "numbers", "lines", "alike", "families", "left"}
"""Keys that are names: of runs, columns, estimators, causes."""


@pytest.mark.parametrize("call", ["compare plain few", "diagnose texts", "tokens texts", "audit --run alarm"])
def test_a_key_more_or_less_breaks_the_schema(call, printed):
    door, *words = shlex.split(call)
    record = printed(door, *words)
    held = {tuple(key for key in path if isinstance(key, str)): path for path in places(record)}  # one of each kind
    closed = [path for kind, path in held.items() if not OPEN & set(kind[-1:])]
    assert len(closed) > 3
    for path in closed:
        more, less = copy.deepcopy(record), copy.deepcopy(record)
        one, other = more, less
        for key in path:
            one, other = one[key], other[key]
        one["new"] = "text"
        other.popitem()
        assert not validator(door).is_valid(more) and not validator(door).is_valid(less), path


def test_a_loss_over_the_whole_batch_has_no_micro_batch(printed):
    loss = printed("audit", "--run", "plain")["bookkeeping"]["loss"]
    assert loss == {"aggregation": "sequence_sum", "micro_batch": None, "constant": 1024, "whole": True}


def test_an_audit_without_a_model_names_the_commands_that_go_on(root, printed):
    free, priced = printed("audit", "FILE"), printed("audit", "FILE", "--model", "MODEL")
    (command,) = free["next"]
    assert shlex.split(command["command"])[-3:] == ["--model", "DIR", "--go"] and command["seconds"] is None
    (command,) = priced["next"]
    assert shlex.split(command["command"])[-1] == "--go" and command["seconds"] > 0
    assert "80 rollouts" in free["cost"] and "80 rollouts" in priced["cost"] and free["traits"] == priced["traits"]
    assert main([*shlex.split(command["command"])[1:], "--run", "next"]) == 0
    assert (root / "next" / "audit.json").exists()


def within(quoted, whole):
    """Whether all that is quoted stands in the whole."""
    if isinstance(quoted, dict):
        return all(key in whole and within(one, whole[key]) for key, one in quoted.items())
    if isinstance(quoted, list):
        return len(quoted) == len(whole) and all(map(within, quoted, whole))
    return quoted == whole


def test_what_the_page_for_agents_quotes_is_printed(capsys, monkeypatch):
    page = (SCHEMAS.parent / "agents.md").read_text("utf-8")
    monkeypatch.chdir(SCHEMAS.parents[1])
    (command,) = re.findall("`otb (compare .* --json)` prints", page)
    assert main(shlex.split(command)) == 0
    (quoted,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    assert within(json.loads(quoted), json.loads(capsys.readouterr().out))
    assert len(page.splitlines()) <= 60


def test_the_audit_on_disk_is_the_one_that_is_printed(root, printed):
    record = printed("audit", "--run", "alarm")
    assert json.loads((root / "alarm" / "audit.json").read_text()) == record and record["alarms"]
