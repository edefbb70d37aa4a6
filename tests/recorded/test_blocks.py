"""Blocks scored by several processes, machines and storages make the run of one process, each block once."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import duckdb
import fsspec
import numpy as np
import pandas as pd
import psutil
import pytest

from otb_analysis.config import BlocksConfig, MeasureConfig, Schedule, ScoreConfig
from otb_analysis.errors import InputError, ProcessError, StoreError
from otb_analysis.phases import NOTES
from otb_analysis.recorded import blocks
from otb_analysis.recorded.blocks import Parts, identity_of, score_in_blocks
from otb_analysis.recorded.score import score
from otb_analysis.store import RunStore

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def rollouts(jsonl, simple):
    """Five steps of 3 prompts with 3 rollouts, no two of them the same."""
    return jsonl([differing(row, step) for step in range(5) for row in simple(prompts=3)])


def differing(row, step):
    return {**row, "step": step, "prompt": f"{step}+{row['prompt']}"}


@pytest.fixture
def config(tmp_path, checkpoint, rollouts):
    measure = MeasureConfig(exact=Schedule(every=1, prompts=0))
    return ScoreConfig(rollouts=rollouts, model=str(checkpoint), root=tmp_path / "runs", run="blocks", measure=measure)


@pytest.fixture
def how(tmp_path):
    return BlocksConfig(parts=str(tmp_path / "parts"))


def same(one, two, but=("run",)):
    """Every table is the same to the last bit; tests of other weights learn from earlier blocks, so they are not."""
    one, two = RunStore(one), RunStore(two)
    for table in ("tokens", "rollouts", "steps", "gradients", "sampling"):
        frames = [store.frame(table) for store in (one, two)]
        if table == "sampling":
            frames = [frame[~frame["test"].str.contains("other_weights")].reset_index(drop=True) for frame in frames]
        frames = [frame.drop(columns=[c for c in frame if c.startswith("seconds_")]) for frame in frames]
        assert len(frames[0])
        pd.testing.assert_frame_equal(*frames, check_exact=True)
    for step, gram in one.grams(one.complete_steps()).items():
        np.testing.assert_array_equal(gram.inner, two.grams([step])[step].inner)
    for key in ("config", "machine", "status", "steps"):
        assert one.info[key] == two.info[key] or key == "config"
    assert one.info["config"] | dict.fromkeys(but) == two.info["config"] | dict.fromkeys(but)


def command(config, *words, code="from otb_analysis.commands.cli import main; sys.exit(main(sys.argv[1:]))"):
    """Run `otb score` in a process of its own."""
    options = ["--rollouts", config.rollouts, "--model", config.model, "--root", config.root, "--run", config.run]
    options += ["--measure.exact.every", 1, "--measure.exact.prompts", 0]
    return subprocess.run(
        [sys.executable, "-c", f"import sys; {code}", "score", *map(str, [*options, *words])],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.slow
def test_tasks_of_an_array_make_the_run_of_one_process(config, how):
    for task in (1, 0):
        told = command(config, "--parts", how.parts, "--task", task, "--tasks", 2)
        assert told.returncode == 0 and "--finish makes the run" in told.stderr.replace("\n", " "), told.stderr
        assert not (config.root / config.run).exists()
    told = command(config, "--parts", how.parts, "--finish")
    assert told.returncode == 0 and "blocks is complete" in told.stdout, told.stderr
    same(score(replace(config, run="one")), config.root / config.run)


KILLED = """
import os
from otb_analysis.recorded import blocks
from otb_analysis.commands.cli import main
left, replace = [2], os.replace
def killed(draft, path):
    left[0] -= "block-" in str(path)
    os.kill(os.getpid(), 9) if left[0] == 0 else replace(draft, path)
blocks.os.replace = killed
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_worker_that_was_killed_twice_leaves_the_same_rows_and_no_block_twice(config, how, monkeypatch):
    for there in (1, 2):
        told = command(config, "--parts", how.parts, code=KILLED)
        assert told.returncode == -signal.SIGKILL
        assert len(list(Path(how.parts).glob("block-*.parquet"))) == there
    made = []
    own = blocks.BlockScorer.score
    monkeypatch.setattr(blocks.BlockScorer, "score", lambda self, block: (made.append(block), own(self, block)))
    NOTES.clear()
    path = score_in_blocks(config, how)
    assert made == [2, 3, 4] and any(note.startswith("45 × completion without its end token") for note in NOTES)
    same(score(replace(config, run="one")), path)
    score_in_blocks(replace(config, if_exists="replace"), how)
    assert made == [2, 3, 4]


UNLOADED = """
import sys
from otb_analysis.commands.cli import main
code = main(sys.argv[1:])
sys.exit(code or ", ".join({"torch", "transformers"} & sys.modules.keys()) or 0)
"""


@pytest.mark.slow
def test_the_run_is_made_of_its_parts_without_pytorch(config, how):
    score_in_blocks(config, replace(how, tasks=2, task=0))
    score_in_blocks(config, replace(how, tasks=2, task=1))
    finish = command(config, "--parts", how.parts, "--finish", code=UNLOADED)
    assert finish.returncode == 0, finish.stderr


def test_a_part_does_not_depend_on_what_its_worker_did_before(config, how, tmp_path):
    score_in_blocks(config, how)
    alone = Parts(str(tmp_path / "alone"), identity_of(config))
    blocks.BlockScorer(config, alone).score(3)
    one, two = (pd.DataFrame(parts.read(3)[0].sampling) for parts in (alone, Parts(how.parts, identity_of(config))))
    pd.testing.assert_frame_equal(one, two, check_exact=True)


def test_an_attempt_that_was_replaced_is_a_block_of_its_own(config, how, jsonl, simple):
    rows = [{**differing(row, step), "reward": k % 3} for k, step in enumerate((0, 1, 2, 1, 2)) for row in simple(3)]
    config = replace(config, rollouts=jsonl(rows))
    same(score(replace(config, run="one")), score_in_blocks(config, how))
    assert len(list(Path(how.parts).glob("block-*.parquet"))) == 5


def change(config, what, tmp_path):
    if what == "rollouts":
        config.rollouts.write_text(config.rollouts.read_text().replace('"reward": 1.0', '"reward": 2.0', 1))
    if what == "checkpoint":
        shutil.copytree(config.model, tmp_path / "other")
        with (tmp_path / "other" / "model.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x01")
        return replace(config, model=str(tmp_path / "other"))
    return replace(config, temperature=0.5) if what == "temperature" else config


@pytest.mark.parametrize("what", ["rollouts", "checkpoint", "temperature"])
@pytest.mark.parametrize("finish", [False, True])
def test_parts_of_other_rollouts_another_checkpoint_or_other_settings_are_refused(config, how, tmp_path, what, finish):
    score_in_blocks(config, replace(how, tasks=2))
    with pytest.raises(InputError, match=rf"made with .*{what}.*another --parts"):
        score_in_blocks(change(config, what, tmp_path), replace(how, finish=finish))
    assert not (config.root / config.run).exists()


def test_rollouts_and_checkpoint_in_another_place_are_no_change(config, how, tmp_path):
    score_in_blocks(config, replace(how, tasks=2))
    (tmp_path / "away").mkdir()
    model, rollouts = shutil.copytree(config.model, tmp_path / "away" / "m"), tmp_path / "away" / config.rollouts.name
    moved = replace(config, model=str(model), rollouts=config.rollouts.rename(rollouts), device="cpu")
    assert Parts(how.parts, identity_of(moved)).footer(0)


def test_a_missing_block_is_named_and_one_that_was_cut_short_is_made_again(config, how):
    score_in_blocks(config, replace(how, tasks=2))
    with pytest.raises(InputError, match=r"2 blocks of 5, first block 1"):
        score_in_blocks(config, replace(how, finish=True))
    score_in_blocks(config, replace(how, task=1, tasks=2))
    part = next(Path(how.parts).glob("block-00000003-*"))
    part.write_bytes(part.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"lacks 1 block of 5, first block 3"):
        score_in_blocks(config, replace(how, finish=True))
    same(score(replace(config, run="one")), score_in_blocks(config, how))


def test_no_changed_byte_of_a_part_changes_a_row_unnoticed(config, how):
    score_in_blocks(config, replace(how, tasks=5))
    parts = Parts(how.parts, identity_of(config))
    path, whole, refused = next(Path(how.parts).glob("block-*")), parts.read(0)[0].encoded(0), 0
    content = path.read_bytes()
    rows = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    for place in range(4, rows, rows // 100):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            assert parts.read(0)[0].encoded(0) == whole, place
        except StoreError:
            refused += 1
    assert refused > 50


def test_parts_may_lie_on_a_storage_without_folders(config):
    same(score(replace(config, run="one")), score_in_blocks(config, BlocksConfig(parts="memory://there/parts")))
    assert len(fsspec.filesystem("memory").glob("/there/parts/block-*.parquet")) == 5


@pytest.mark.parametrize("parts", ["FILE/parts", "nothing://bucket/parts", "memory://readable/parts"])
def test_a_storage_that_refuses_says_so_before_a_model_is_loaded(config, tmp_path, monkeypatch, parts):
    (tmp_path / "file").touch()
    (memory := fsspec.filesystem("memory")).makedirs("/readable/parts", exist_ok=True)
    monkeypatch.setattr(type(memory), "pipe_file", Mock(side_effect=PermissionError("read only")))
    monkeypatch.setattr(blocks.BlockScorer, "begin", lambda scorer: pytest.fail("loaded"))
    with pytest.raises(StoreError, match=r"parts cannot be used"):
        score_in_blocks(config, BlocksConfig(parts=parts.replace("FILE", str(tmp_path / "file"))))


def test_actors_without_ray_and_parts_whose_identity_is_gone_are_a_sentence(config, tmp_path):
    with pytest.raises(InputError, match=r"--actors 2 .*--ray"):
        score_in_blocks(config, BlocksConfig(actors=2))
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / f"block-00000000-{'0' * 16}.parquet").touch()
    with pytest.raises(InputError, match=r"made otherwise; .*another --parts"):
        score_in_blocks(config, BlocksConfig(parts=str(tmp_path / "parts")))


@pytest.mark.slow
def test_processes_that_were_launched_together_must_have_a_share_each(config, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    told = command(config)
    assert told.returncode and "give each a share: --task $RANK --tasks $WORLD_SIZE" in told.stderr
    assert not config.root.exists()


def test_a_share_that_is_none_is_refused(config, how):
    for task, tasks in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(InputError, match="pass a number from 0"):
            score_in_blocks(config, replace(how, task=task, tasks=tasks))


@pytest.fixture
def s3(monkeypatch):
    """The address of a bucket on an S3 server of this process."""
    for name in ("moto.server", "s3fs"):
        pytest.importorskip(name)
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": url, "key": "a", "secret": "b"})
    keys = dict(aws_access_key_id="a", aws_secret_access_key="b", region_name="us-east-1")
    boto3.client("s3", endpoint_url=url, **keys).create_bucket(Bucket="bucket")
    yield "s3://bucket/parts"
    server.stop()


@pytest.mark.filterwarnings("default")
def test_64_tasks_write_their_parts_on_object_storage(config, s3, jsonl, simple):
    config = replace(config, rollouts=jsonl([differing(row, step) for step in range(64) for row in simple(prompts=1)]))
    for task in range(64):
        score_in_blocks(config, BlocksConfig(parts=s3, task=task, tasks=64))
    same(score(replace(config, run="one")), score_in_blocks(config, BlocksConfig(parts=s3, finish=True)))
    (database := duckdb.connect()).register_filesystem(fsspec.filesystem("s3"))  # as docs/distributed.md has it
    rows = "SELECT count(*), sum(logprob) FROM (SELECT unnest(tokens, recursive := true) FROM '%s/block-*.parquet')"
    one = RunStore(config.root / "one").tokens_df(columns=["logprob"])["logprob"]
    assert database.sql(rows % s3).fetchall() == [(len(one), pytest.approx(one.sum()))]
    with pytest.raises(StoreError, match="s3://elsewhere/parts cannot be used"):
        score_in_blocks(replace(config, run="two"), BlocksConfig(parts="s3://elsewhere/parts"))


def test_a_run_that_goes_on_keeps_the_paths_it_was_begun_with(config, how, monkeypatch):
    monkeypatch.chdir(config.rollouts.parent)
    relative = replace(config, rollouts=Path(config.rollouts.name))
    made = score_in_blocks(relative, how)
    stored = RunStore(made).info["config"]
    monkeypatch.setattr(RunStore, "live_status", ("stopped", ""))
    assert RunStore(score_in_blocks(relative, how)).info["config"] == stored


def test_rollouts_and_checkpoint_may_lie_on_a_storage(config, how):
    memory = fsspec.filesystem("memory")
    memory.put(str(config.rollouts), "/bucket/rollouts/rollouts.jsonl")
    memory.put(config.model, "/bucket/checkpoint", recursive=True)
    away = replace(config, rollouts=Path("memory://bucket/rollouts/rollouts.jsonl"), model="memory://bucket/checkpoint")
    made = score_in_blocks(away, how)
    same(score(replace(config, run="one")), made, ("run", "rollouts", "model", "source"))
    stored, url = RunStore(made).info["config"], "memory://bucket/rollouts/rollouts.jsonl"
    assert (stored["rollouts"], stored["source"]["path"], stored["model"]) == (url, url, away.model)
    assert RunStore(score_in_blocks(replace(away, if_exists="resume"), how)).info["config"] == stored
    with pytest.raises(StoreError, match=r"memory://bucket/gone cannot be read"):
        score_in_blocks(replace(away, run="two", model="memory://bucket/gone"), how)


def test_ray_that_is_not_installed_is_asked_for(config, how, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install '\.\[ray\]'"):
        score_in_blocks(config, replace(how, ray=()))


def test_an_actor_without_the_model_or_with_another_one_answers_with_a_sentence(config, how, tmp_path):
    parts = Parts(how.parts, identity_of(config))
    gone = blocks.BlockScorer(replace(config, model=str(tmp_path / "gone")), parts)
    assert "gone does not exist" in gone({"block": 0})["error"]
    other = blocks.BlockScorer(change(config, "checkpoint", tmp_path), parts)
    assert "a checkpoint of other contents" in other({"block": 0})["error"] and parts.footer(0) is None


@pytest.fixture
def ray():
    """Skip where Ray is not installed; not imported here, since it reads once where it may listen."""
    if find_spec("ray") is None:
        pytest.skip("ray is not installed; `make test-ray` has it")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_two_actors_on_ray_one_of_them_killed_twice_make_the_run_of_one_process(
    ray, config, how, tmp_path, monkeypatch
):
    folder = tmp_path / "killed"
    folder.mkdir()

    class Killed(blocks.BlockScorer):
        def score(self, block):
            mark = folder / str(block)
            if block in (1, 3) and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            super().score(block)

    listening = set()

    def look(parts, block, read=Parts.read):
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                sockets = process.net_connections("tcp")
                ours = [one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN]
                listening.update(ip.removeprefix("::ffff:") for ip in ours)
        return read(parts, block)

    monkeypatch.setattr(blocks, "BlockScorer", Killed)
    monkeypatch.setattr(Parts, "read", look)
    same(score(replace(config, run="one")), score_in_blocks(config, replace(how, ray=("local",), actors=2)))
    assert len(list(folder.iterdir())) == 2 and listening == {"127.0.0.1"}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_block_that_kills_every_actor_ends_the_command_and_another_goes_on(ray, config, how, monkeypatch):
    class Killed(blocks.BlockScorer):
        def score(self, block):
            if block == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            super().score(block)

    with monkeypatch.context() as patch:
        patch.setattr(blocks, "BlockScorer", Killed)
        patch.setattr(blocks, "RETRIES", 1)
        with pytest.raises(ProcessError, match=r"Ray at local stopped .* stay\."):
            score_in_blocks(config, replace(how, ray=("local",), actors=1))
    same(score(replace(config, run="one")), score_in_blocks(config, how))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_worker_of_ray_without_the_model_ends_the_command_with_its_sentence(ray, config, how, tmp_path, monkeypatch):
    identity = identity_of(config)
    monkeypatch.setattr(blocks, "identity_of", lambda config: identity)
    monkeypatch.setattr(blocks, "place_of", lambda model: tmp_path / "gone")
    with pytest.raises(ProcessError, match=r"Ray stopped: .*gone does not exist"):
        score_in_blocks(config, replace(how, ray=("local",), actors=1))


def test_a_ray_address_that_does_not_answer_is_refused_in_seconds(ray, config, how):
    for address in ("127.0.0.1:9", "ray://127.0.0.1:9", "nonsense"):
        with pytest.raises(InputError, match=f"Ray cannot be reached at {address}"):
            score_in_blocks(config, replace(how, ray=(address,)))
