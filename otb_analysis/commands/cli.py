"""`otb`: one command per job. `otb COMMAND --help` explains each field."""

import os
import sys
import tomllib
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import is_dataclass, replace
from inspect import getdoc
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from rich.console import Console

from otb_analysis import __version__
from otb_analysis.commands.clone import bench_command, study_command
from otb_analysis.commands.diagnose import attribution_command, diagnose_command
from otb_analysis.commands.inspect import compare_command, report_command
from otb_analysis.commands.keeping import aggregate_command, compact_command, licences_command, model_command
from otb_analysis.commands.options import parsed
from otb_analysis.commands.query import query_command, tokens_command
from otb_analysis.commands.recorded import audit_command, import_command, score_command, tell
from otb_analysis.commands.screen import models_loading, print_all, shown
from otb_analysis.commands.serve import DashboardConfig, serve
from otb_analysis.commands.watch import watch_command
from otb_analysis.config import DemoConfig, TrainConfig
from otb_analysis.errors import STOPS, InputError, Interrupted, nearest
from otb_analysis.extras import require
from otb_analysis.phases import phase

USAGE = """\
otb measures how noisy the gradient is in LLM reinforcement learning, and which
baseline makes it less noisy.

  otb demo         train a small model twice, compare, serve the dashboard
  otb train        train one run and measure it: --config FILE.toml, or fields
  otb score        measure recorded rollouts: --model DIR --rollouts FILE
  otb import       read recorded rollouts without a model: rewards, alarms
  otb audit        what recorded rollouts show: FOLDER --model DIR
  otb model        fetch a pretrained model: otb model fetch smollm2
  otb compare      which baseline is less noisy, and what was learned
  otb diagnose     whether a run is in trouble: alarms, change points, advice
  otb query        one read-only SELECT over a run's tables: RUN "SELECT …"
  otb tokens       a token's formula: RUN --rollout 3 --t 5
  otb watch        follow a run or a folder, and say when an alarm fires
  otb attribution  the tokens that make up a step's gradient: RUN --step S
  otb report       what these commands say as one file: RUN… --out FILE
  otb dashboard    serve the dashboard on a folder of runs, on loopback
  otb compact      merge the many small files of finished runs into few
  otb aggregate    count, mean and variance of per-token columns
  otb licences     the packages that are installed, and the licence of each
  otb bench        time, memory and errors on this machine, in a clone
  otb study        repeat a study, or measure its missing cells, in a clone

`otb COMMAND --help` explains itself, `otb train --help-all` every field;
`otb --version` names the version.
"""

Config = TypeVar("Config")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    What the user can mend ends as one sentence on stderr and code 2, Ctrl-C as 130; a bug keeps its traceback.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(USAGE)
        return 0 if words else 2
    if words[0] == "--version":
        sys.stdout.write(f"otb-analysis {__version__}\n")
        return 0
    try:
        if words[0] not in COMMANDS:
            raise InputError(f"command {words[0]!r} does not exist; {nearest(words[0], COMMANDS)}")
        return COMMANDS[words[0]](words[1:]) or 0
    except STOPS as error:
        sys.stderr.write(f"otb: {error}\n")
        return 2
    except KeyboardInterrupt as stop:
        sys.stderr.write(f"otb: {str(stop) or 'stopped.'}\n")
        return 130
    except BrokenPipeError:  # whoever reads has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def train_command(words: Sequence[str]) -> None:
    """Train one policy; --config FILE.toml gives any of the fields below, and the command line wins over it.

    The run.json of an earlier run does, too: --config runs/RUN/run.json --run ANOTHER trains it again.

    With --if-exists resume a run that was stopped goes on from its newest checkpoint, bit for bit. docs/train.toml is a
    commented example.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", nargs="?", const="")
    options, words = parser.parse_known_args(words)
    if options.config == "":
        raise InputError("--config needs a file; pass one, as in --config run.toml.")
    default = from_toml(TrainConfig, Path(options.config)) if options.config else TrainConfig()
    config = parsed(TrainConfig, "train", words, default, getdoc(train_command))
    first = os.environ.get("RANK", "0") == "0"  # only the first process prints
    with shown() if first else nullcontext(), phase("otb train") as whole:
        with models_loading("otb train"):
            from otb_analysis.training.loop import train
        try:
            path = train(config, whole)
        except KeyboardInterrupt as stop:  # the run itself says what it keeps
            raise Interrupted(str(stop) or "stopped; nothing was written.") from None
    if first:
        tell(path)


def demo_command(words: Sequence[str]) -> None:
    """Train twice, compare, serve."""
    config = parsed(DemoConfig, "demo", words, DemoConfig())
    if config.serve:
        require("streamlit", "the dashboard, which --no-serve leaves out")
    with shown(), models_loading("otb demo"):
        from otb_analysis.commands.demo import run_demo
    paths = run_demo(config)
    with shown(), phase("comparing runs"):
        from otb_analysis.answers import opened
        from otb_analysis.report.compare import comparison
        from otb_analysis.report.document import printed

        tables = printed(comparison(opened(paths), conclude_last=True))
    print_all(tables)
    if config.serve:
        serve(DashboardConfig(config.root, config.port))
    else:
        Console().print(f"Dashboard: otb dashboard --root {config.root}")


def dashboard_command(words: Sequence[str]) -> None:
    """Serve the dashboard."""
    serve(parsed(DashboardConfig, "dashboard", words, DashboardConfig()))


COMMANDS: dict[str, Callable[[Sequence[str]], int | None]] = {
    "demo": demo_command,
    "train": train_command,
    "score": score_command,
    "import": import_command,
    "audit": audit_command,
    "model": model_command,
    "compare": compare_command,
    "diagnose": diagnose_command,
    "query": query_command,
    "tokens": tokens_command,
    "watch": watch_command,
    "attribution": attribution_command,
    "report": report_command,
    "dashboard": dashboard_command,
    "compact": compact_command,
    "aggregate": aggregate_command,
    "licences": licences_command,
    "bench": bench_command,
    "study": study_command,
}


def from_toml(kind: type[Config], file: Path) -> Config:
    """Read a configuration, of TOML or of a run's run.json; fields that the file leaves out keep their defaults.

    Raises:
        InputError: The file cannot be read, names a field that does not exist, or holds a value of another type.
    """
    try:
        if file.name == "run.json":
            from otb_analysis.store.layout import read_run_file

            # The configuration of an earlier run, but for what it did with an even earlier one of its name.
            stored: Any = read_run_file(file.parent).get("config")
            values = {name: value for name, value in (stored or {}).items() if name != "if_exists"}
            return _filled(kind(), values, str(file))
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}); pass an existing TOML file.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is not valid TOML: {error}.") from error
    return _filled(kind(), values, str(file))


def _filled(default: Any, values: Mapping[str, Any], where: str) -> Any:
    kinds, changes = get_type_hints(type(default)), dict[str, Any]()
    for name, value in values.items():
        if name not in kinds:
            raise InputError(f"{where} has no field {name!r}; {nearest(name, kinds)}")
        changes[name] = _converted(kinds[name], getattr(default, name), value, f"{where}: {name}")
    return replace(default, **changes)


def _converted(kind: Any, old: Any, value: Any, where: str) -> Any:
    outer, inner = get_origin(kind) or kind, get_args(kind)
    if is_dataclass(kind) and isinstance(value, Mapping):
        return _filled(old, value, where)
    if (outer, type(value)) in ((Path, str), (float, int)):
        return outer(value)
    if kind == dict[str, str] and isinstance(value, Mapping):  # options: their estimator or ratio knows their types
        return {key: ",".join(map(str, x)) if isinstance(x, list) else str(x) for key, x in value.items()}
    if outer is dict and isinstance(value, Mapping):
        return {key: _converted(inner[1], None, x, f"{where}: {key}") for key, x in value.items()}
    if outer is tuple and isinstance(value, list) and (inner[-1] is ... or len(value) == len(inner)):
        return tuple(_converted(inner[0], None, x, where) for x in value)
    if outer is Literal and value not in inner:
        raise InputError(f"{where} is {value!r}; {nearest(str(value), inner)}")
    if outer is not Literal and type(value) is not outer:
        length = "" if outer is not tuple or inner[-1] is ... else f" of {len(inner)}"
        expected = {tuple: f"a list{length}", dict: "a table"}.get(outer, f"of type {outer.__name__}")
        raise InputError(f"{where} is {value!r}; it must be {'a table' if is_dataclass(kind) else expected}.")
    return value


if __name__ == "__main__":
    sys.exit(main())
