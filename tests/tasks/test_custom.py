"""A task of one's own by module:attribute: found here, checked, and every fault named."""

import sys

import pytest

from otb_analysis.config import TrainConfig
from otb_analysis.errors import InputError
from otb_analysis.tasks import make_task, task_files

MODULE = """
from otb_analysis.tasks import Prompt, Turn


class Parity:
    name, alphabet = "parity", "01=eo"

    def __init__(self, config):
        self.seed = config.seed

    def prompt(self, split, index):
        return Prompt(id=f"{split}{index}", text=f"{index:b}=", answer="eo"[index % 2])

    def demonstration(self, prompt):
        return [Turn(prompt.answer, True)]

    def reply(self, prompt, turns):
        return None

    def reward(self, prompt, turns):
        return [{"correct": float(turns[-1].text == prompt.answer)}]


def make(config):
    return Parity(config)


ready = Parity(type("C", (), {"seed": 7}))
number = 5


def broken(config):
    raise RuntimeError("no\\nluck")


class Half:
    name, alphabet = "half", "01"

    def __init__(self, config):
        pass
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory with modules, which the command runs in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_parity.py").write_text(MODULE)
    (tmp_path / "my_broken.py").write_text("import nothing_of_that_name")
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("my_"):
            del sys.modules[name]


@pytest.mark.parametrize("attribute", ["Parity", "make", "ready"])
def test_class_function_and_ready_made_task_are_loaded(here, attribute):
    path = list(sys.path)
    task = make_task(TrainConfig(task=f"my_parity:{attribute}", seed=7))
    assert (task.name, task.seed) == ("parity", 7)
    assert task.prompt("train", 3).answer == "o"
    assert sys.path == path
    assert task_files(TrainConfig(task=f"my_parity:{attribute}")) == [here / "my_parity.py"]


@pytest.mark.parametrize(
    ("task", "named"),
    [
        ("nowhere_at_all:Task", "cannot be imported (ModuleNotFoundError: No module named 'nowhere_at_all')"),
        ("my_broken:Task", "cannot be imported (ModuleNotFoundError: No module named 'nothing_of_that_name')"),
        (":Task", "cannot be imported (ValueError: Empty module name)"),
        ("my_parity:Nothing", "module my_parity has no 'Nothing'"),
        ("my_parity:", "module my_parity has no ''"),
        ("my_parity:broken", "cannot be made (RuntimeError: no luck); it is called with the TrainConfig"),
        ("my_parity:number", "has no name; a task has name, alphabet, prompt, demonstration, reply, reward"),
        ("my_parity:Half", "has no prompt; a task has"),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence(here, task, named):
    with pytest.raises(InputError) as caught:
        make_task(TrainConfig(task=task))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_name_of_the_run_is_a_directory_name():
    assert TrainConfig(task="my.parity:Parity").run_name == "my.parity.Parity-otb-s0"
