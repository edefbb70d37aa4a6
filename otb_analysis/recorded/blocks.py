"""`otb score` in blocks: a step's prompts are scored by themselves, into a Parquet file of their own, by any machine.

A part is named by the block's number and a digest of what it was made of: rollouts, checkpoint and settings. Whoever
finds it there does not make it again. Of all parts together comes the run that a single process makes.
"""

import atexit
import hashlib
import json
import logging
import os
import re
import socket
import warnings
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import product
from math import inf
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from otb_analysis import __version__
from otb_analysis.config import BlocksConfig, ScoreConfig, plain_config
from otb_analysis.errors import STOPS, InputError, ProcessError, StoreError
from otb_analysis.extras import require, require_models
from otb_analysis.phases import advance, count_to, note, phase, plural
from otb_analysis.recorded.records import Tally, first_line
from otb_analysis.recorded.runs import (
    PLACE,
    RecordedStep,
    check_settings,
    note_tally,
    read_steps,
    record_run,
    refuse_existing,
    run_path,
    source_of,
    stored_config,
)
from otb_analysis.rollouts.named_models import place_of
from otb_analysis.store import GRAM_TEXTS, RunStore, StepTables

if TYPE_CHECKING:
    from otb_analysis.recorded.score import Scorer

PART = re.compile(r"block-\d{8}-([0-9a-f]{16})\.parquet")
KEY = b"otb"
"""Where the footer of a part says what it was made of, by which machine, and what was seen on the way."""
TEXTS = [f"{table}.list.element.{name}" for table, name in product(("grams", "subgroups"), GRAM_TEXTS)]
"""Columns of a part that repeat few texts, in half a million rows."""
RETRIES = 3
"""Times that a block begins again whose actor was killed: one that kills them all must not go on for ever."""
PATIENCE = 10.0
"""Seconds within which a Ray address must answer; Ray itself asks for minutes."""


@contextmanager
def storage_errors(url: str, to: str) -> Iterator[None]:
    """Turn whatever a storage answers into a sentence.

    Raises:
        StoreError: It refuses.
    """
    try:
        yield
    except Exception as error:  # drivers of storages fail in ways of their own
        raise StoreError(
            f"{url} cannot {to} ({first_line(error):.200}); check the address and its rights, or pass another."
        ) from error


URL = re.compile(r"(\w[\w+.-]+):/+(.+)")
"""An address of fsspec, which a path holds with one slash less; a drive's letter alone is none."""


def url_of(place: str | Path) -> str:
    """Return the address that a setting names, empty where it names a path."""
    return f"{match[1]}://{match[2]}" if (match := URL.fullmatch(str(place))) else ""


def at_hand(config: ScoreConfig) -> ScoreConfig:
    """Return settings whose rollouts and checkpoint are on this machine; of an address a copy, while the process lives.

    Raises:
        StoreError: The storage refuses.
    """
    copies = dict[str, Any]()
    for name in ("rollouts", "model"):
        if url := url_of(getattr(config, name)):
            folder = mkdtemp(prefix="otb-")
            atexit.register(rmtree, folder, ignore_errors=True)
            with storage_errors(url, "be read"), phase(f"copying {url}"):
                storage, root = url_to_fs(url)
                copies[name] = f"{folder}/{Path(root).name}"
                storage.get(root, copies[name], recursive=True)
    return replace(config, **{name: Path(path) if name == "rollouts" else path for name, path in copies.items()})


def score_in_blocks(config: ScoreConfig, how: BlocksConfig) -> Path | None:
    """Score the blocks that are due and missing; return the run made of them, None where other tasks have a share.

    Rollouts and checkpoint may be addresses of fsspec, of which each process makes a copy.

    Raises:
        InputError: Model, rollouts or a setting cannot work, parts are of others, or blocks are missing at the end.
        NonFiniteError: A logit is not finite.
        StoreError: A storage or the store refuses.
        ProcessError: A worker of Ray stopped.
    """
    given, config = config, at_hand(config)
    check_settings(config)
    if not 0 <= how.task < how.tasks:
        raise InputError(f"--task is {how.task} of {how.tasks} --tasks; pass a number from 0 up to below --tasks.")
    if how.actors and how.ray is None:
        raise InputError(f"--actors {how.actors} are processes of Ray; add --ray, or leave --actors out.")
    path, finishes = run_path(config.rollouts, config, "scored"), how.finish or how.tasks == 1
    if finishes:
        if config.if_exists == "error" and path.exists() and RunStore(path).live_status[0] in ("stopped", "failed"):
            config = replace(config, if_exists="resume")  # it was being made of these parts
        refuse_existing(path, config)
    parts = Parts(how.parts or f"{path}.parts", identity_of(config))
    with phase(f"counting the blocks of {config.rollouts}"):
        steps = [step.step for step in read_steps(source_of(config.rollouts, config), config)]
    asked = range(len(steps)) if finishes else range(how.task, len(steps), how.tasks)
    footers = {block: parts.footer(block) for block in asked}
    lacking = [block for block, footer in footers.items() if footer is None]
    if how.finish and lacking:
        raise InputError(
            f"{parts.url} lacks {plural(len(lacking), 'block')} of {len(steps)}, first block {lacking[0]} (step "
            f"{steps[lacking[0]]}); run the task that has it again, or leave --finish out to score what is missing."
        )
    on_ray = lacking and how.ray is not None
    scored = score_on_ray(given, parts, [*lacking], how) if on_ray else score_here(config, parts, [*lacking])

    def make(step: RecordedStep) -> StepTables:
        while step.block in lacking:
            lacking.remove(next(scored))
        tables, footers[step.block] = parts.read(step.block)
        return tables

    def machine() -> dict[str, str]:
        made = [footer for footer in footers.values() if footer is not None]
        return {name: ", ".join(sorted({one[name] for one in made})) for name in ("device", "precision")}

    with closing(scored):
        if not finishes:
            with phase("scoring in blocks"):
                count_to(len(lacking), "block")
                for _ in scored:
                    advance()
            note(f"{parts.url} has the blocks of task {how.task}; when every task has ended, --finish makes the run.")
            return None
        source = source_of(config.rollouts, config)
        stored = stored_config(config, source, "otb score", {"sample": {"temperature": config.temperature}})
        if config.model != given.model:  # a copy is gone when this is read
            stored["model"] = given.model
        if config.rollouts != given.rollouts:
            stored["rollouts"] = stored["source"]["path"] = url_of(given.rollouts)
        record_run(path, config, stored, source, make, machine, len(steps))  # while later ones are scored
    note_tally(Tally(sum((Counter(one["seen"]) for one in footers.values() if one), Counter())))
    return path


def identity_of(config: ScoreConfig) -> dict[str, Any]:
    """Return all that scores depend on: the settings, our version, and the contents of the rollouts and checkpoint."""
    place, contents = place_of(config.model), dict[str, str]()
    model = [place] if place.is_file() else sorted(file for file in place.iterdir() if file.is_file())
    for name, files in {"rollouts": source_of(config.rollouts, config).files, "checkpoint": model}.items():
        digest = hashlib.sha256()
        with phase(f"checksum of the {name}"):
            for file in files:
                with file.open("rb") as opened:
                    digest.update(file.name.encode() + hashlib.file_digest(opened, "sha256").digest())
        contents[name] = digest.hexdigest()
    settings = {name: value for name, value in plain_config(config).items() if name not in (*PLACE, "model")}
    return settings | contents | {"version": __version__}


class Parts:
    """The parts of one identity in a folder, local or on a storage that fsspec knows.

    Raises:
        InputError: It holds parts of another identity.
        StoreError: The storage refuses to be written.
    """

    def __init__(self, url: str, identity: Mapping[str, Any]) -> None:
        self.url, self.identity, others = url, identity, list[Any]()
        text = json.dumps(identity, sort_keys=True)
        self.digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        with storage_errors(self.url, "be used"):
            self.storage, self.root = url_to_fs(url, use_listings_cache=False)
            self.local = isinstance(self.storage, LocalFileSystem)
            # Now, so that a storage that refuses says so before anything is scored
            self._put(f"{self.digest}.json", text.encode())
            names = {Path(name).name for name in self.storage.ls(self.root, detail=False)}
            digests = {match[1] for name in names if (match := PART.fullmatch(name))} - {self.digest}
            known = sorted(one for one in digests if f"{one}.json" in names)
            others = [json.loads(self.storage.cat_file(f"{self.root}/{one}.json")) for one in known]
        if len(known) < len(digests):
            raise InputError(f"{url} has parts that were made otherwise; pass another --parts, or remove these.")
        for other in others:
            self.compare(other, f"{url} has parts that were made with", "pass another --parts, or remove these.")

    def compare(self, other: Mapping[str, Any], who: str, remedy: str) -> None:
        """Refuse what was made of something else.

        Raises:
            InputError: A setting differs, or what the rollouts or the checkpoint hold.
        """
        for name, value in self.identity.items():
            if other.get(name) != value:
                known = {"rollouts": "rollouts of other contents", "checkpoint": "a checkpoint of other contents"}
                what = known.get(name, f"{name} {other.get(name)!r} where this command has {value!r}")
                raise InputError(f"{who} {what}; {remedy}")

    def name(self, block: int) -> str:
        """Return the file name of a block's part."""
        return f"block-{block:08d}-{self.digest}.parquet"

    def footer(self, block: int) -> dict[str, Any] | None:
        """Return what a part says of itself; None where it is missing, or a storage kept only some of it."""
        with storage_errors(self.url, "be read"):
            try:
                with self.storage.open(f"{self.root}/{self.name(block)}", "rb") as file:
                    footer = json.loads((pq.read_schema(file).metadata or {}).get(KEY, b"{}"))
            except (FileNotFoundError, pa.ArrowInvalid):
                return None
        return footer if footer.get("digest") == self.digest else None

    def write(self, block: int, rows: Mapping[str, pa.Table], about: Mapping[str, object]) -> None:
        """Write a part, which appears whole or not at all: one row, each table a list of its rows."""
        lists = {
            name: pa.ListArray.from_arrays([0, len(table)], table.to_struct_array().combine_chunks())
            for name, table in rows.items()
        }
        part = pa.table(lists).replace_schema_metadata({KEY: json.dumps({"digest": self.digest, **about})})
        content = pa.BufferOutputStream()
        pq.write_table(part, content, compression="zstd", write_page_checksum=True)
        with storage_errors(self.url, "be written"):
            self._put(self.name(block), content.getvalue().to_pybytes())

    def read(self, block: int) -> tuple[StepTables, dict[str, Any]]:
        """Return everything to store of a block's step, and what its part says of itself."""
        with storage_errors(self.url, "be read"), self.storage.open(f"{self.root}/{self.name(block)}", "rb") as file:
            part = pq.read_table(file, page_checksum_verification=True, read_dictionary=TEXTS)
            about = json.loads((part.schema.metadata or {})[KEY])
        lists = {name: part[name].combine_chunks() for name in part.column_names}
        tables = {name: pa.Table.from_struct_array(some.values) for name, some in lists.items()}
        return StepTables.decoded(tables), about

    def _put(self, name: str, content: bytes) -> None:
        """Write a file: under another name first where that can be changed at once, elsewhere by one put."""
        path = f"{self.root}/{name}"
        draft = f"{self.root}/.{name}.{uuid4().hex}.tmp" if self.local else path
        if self.local:
            Path(self.root).mkdir(parents=True, exist_ok=True)
        self.storage.pipe_file(draft, content)
        if self.local:
            os.replace(draft, path)


class BlockScorer:
    """Scores blocks by their numbers; loads the model at the first one, and reads the file on from one to the next."""

    def __init__(self, config: ScoreConfig, parts: Parts) -> None:
        self.config, self.parts = config, parts
        self.scorer: Scorer | None = None
        self.steps: Iterator[RecordedStep] = iter(())
        self.last = inf  # Block that was read last: any is before it until the file is opened

    def begin(self) -> "Scorer":
        """Load the model, and PyTorch, which nobody needs who counts blocks and makes a run of their parts."""
        require_models("otb score")
        from otb_analysis.recorded.score import Scorer, check, load
        from otb_analysis.rollouts.models import quiet_loading

        quiet_loading()
        check(self.config)
        stored = stored_config(self.config, source_of(self.config.rollouts, self.config), "otb score", {})
        self.scorer = Scorer(self.config, *load(self.config), Tally(), stored)
        return self.scorer

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Score a block as an actor of Ray Data; return its number and the sentence of what stopped it."""
        try:
            if self.scorer is None:  # begun anew, too, perhaps on another machine
                self.config, here = at_hand(self.config), f"the machine {socket.gethostname()} has"
                self.parts.compare(identity_of(self.config), here, "give all machines the same files and packages.")
            self.score(row["block"])
        except STOPS as error:
            return dict(row) | {"error": str(error)}
        return dict(row) | {"error": ""}

    def score(self, block: int) -> None:
        """Score a block and write its part.

        Raises:
            InputError: A record is refused, or the model cannot be loaded.
            NonFiniteError: A logit is not finite.
            StoreError: The storage refuses.
        """
        scorer = self.scorer or self.begin()
        if block <= self.last:
            self.steps = read_steps(source_of(self.config.rollouts, self.config), self.config)
        self.last = block
        step = next(step for step in self.steps if step.block == block)
        scorer.forget()  # which blocks came before must not matter
        rows = scorer.tables(step).encoded(step.step)
        self.parts.write(block, rows, scorer.machine | {"seen": dict(scorer.encoder.tally)})


def score_here(config: ScoreConfig, parts: Parts, blocks: Sequence[int]) -> Generator[int]:
    """Score blocks by this process; yield each."""
    scorer = BlockScorer(config, parts)
    for block in blocks:
        scorer.score(block)
        yield block


def score_on_ray(config: ScoreConfig, parts: Parts, blocks: Sequence[int], how: BlocksConfig) -> Generator[int]:
    """Score blocks by actors of Ray Data, each with a model of its own; yield each.

    A block whose actor is killed begins again.

    A Ray that begins here listens on the loopback interface only, unless it was imported before.

    Raises:
        InputError: Ray is not installed, or nothing answers at the address.
        ProcessError: A worker stopped; the parts of the others stay.
    """
    require("ray", "otb score --ray")
    address = " ".join(how.ray or ()) or os.environ.get("RAY_ADDRESS", "local")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # of what fails, we say a sentence
    if address == "local":  # else Ray listens on every address of this machine, whatever it is told; it reads this once
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    import ray.data  # pyright: ignore[reportMissingImports]
    from ray.exceptions import RayError  # pyright: ignore[reportMissingImports]

    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdigit():
            socket.create_connection((host, int(port)), PATIENCE).close()
        options = {"num_cpus": how.actors or None, "include_dashboard": False} if address == "local" else {}
        ray.init(address, log_to_driver=False, logging_level="ERROR", **options)
    except Exception as error:  # of many kinds
        raise InputError(
            f"Ray cannot be reached at {address} ({error}); pass the address of a cluster that runs, or --ray local to "
            "begin one here."
        ) from error
    try:
        there = ray.cluster_resources()
        gpus = int("GPU" in there and config.device in ("auto", "cuda"))
        size = min(how.actors or int(there.get("GPU" if gpus else "CPU", 1)), len(blocks))
        # On another machine a relative path is one of another folder.
        paths: dict[str, Any] = {} if url_of(config.rollouts) else {"rollouts": config.rollouts.resolve()}
        paths |= {} if url_of(config.model) else {"model": str(place_of(config.model).resolve())}
        same = replace(config, **paths)
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = context.print_on_execution_start = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        # A block is a task: whichever actor has its model gets the next one.
        rows = ray.data.from_items([{"block": block} for block in blocks], override_num_blocks=len(blocks))
        actors = {"compute": ray.data.ActorPoolStrategy(size=size), "num_cpus": 1, "num_gpus": gpus}
        with warnings.catch_warnings(action="ignore"):  # Ray 2.63 calls these deprecated, and has nothing instead
            actors |= {"max_restarts": -1, "max_task_retries": RETRIES}
            scored = rows.map(BlockScorer, fn_constructor_args=(same, parts), **actors)
        for row in scored.iter_rows():
            if row["error"]:
                raise ProcessError(f"a worker of Ray stopped: {row['error']}")
            yield row["block"]
    except RayError as error:
        why = str(error).strip().splitlines()[-1]
        raise ProcessError(f"Ray at {address} stopped ({why}); the blocks that are there stay.") from error
    finally:
        ray.shutdown()
