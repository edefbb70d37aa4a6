"""An estimator of one's own in a run: it trains, is compared under its name, and readers do not need its module."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from otb_analysis.commands.cli import main
from otb_analysis.config import EstimatorConfig, MeasureConfig, Schedule
from otb_analysis.errors import InputError
from otb_analysis.store import RunStore
from otb_analysis.training.loop import train
from tests.app.test_pages import open_page

ROOT = Path(__file__).parents[2]
NAME = "my_estimators:shrunken"
TEXT = (ROOT / "docs" / "own_estimator.md").read_text(encoding="utf-8")
CODE = TEXT.split("```python\n")[1].split("```")[0]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_estimators.py").write_text(CODE, encoding="utf-8")
    yield tmp_path
    sys.modules.pop("my_estimators", None)


@pytest.fixture(scope="module")
def made(tmp_path_factory, checkpoint, half_task):
    """The run that the page's command makes, at the size of a test; its module is gone."""
    root = tmp_path_factory.mktemp("own")
    (root / "my_estimators.py").write_text(CODE, encoding="utf-8")
    (written,) = [line for line in TEXT.splitlines() if line.startswith("otb train")]
    words = f"{written.removeprefix('otb ')} --model {checkpoint} --sample.prompts 4 --sample.group-size 4 "
    words += "--sample.max-new-tokens 6 --optimize.steps 3 --measure.exact.every 1 --measure.exact.prompts 0 "
    words += "--evaluate.prompts 8 --task half --measure.attribution.every 1"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert main(words.split()) == 0
    (root / "my_estimators.py").unlink()
    del sys.modules["my_estimators"]
    return root


@pytest.fixture
def forgotten(made, monkeypatch):
    monkeypatch.chdir(made)
    return made / "runs" / "mine"


def test_example_has_ten_lines():
    assert len([line for line in CODE.splitlines() if line.strip()]) <= 10


def test_documented_run_trains_on_it_and_compares_it_with_all_others(forgotten):
    store = RunStore(forgotten)
    assert store.info["config"]["estimator"]["name"] == NAME
    assert store.info["config"]["estimator"]["options"] == {"share": "0.8"}
    assert store.complete_steps() == [0, 1, 2]
    labels = [label for gram in store.grams().values() for label in gram.labels]
    assert labels.count((NAME, "none")) == 3 and len(set(labels)) > 30
    assert (NAME, "none") in store.subgroup_grams()[2][0].labels
    tokens = store.tokens_df([0])
    total = tokens.groupby(["group", "rollout"])["reward"].sum().rename("total").reset_index()
    assert 0 < total["total"].mean() < 1
    others = (total.groupby("group")["total"].transform("sum") - total["total"]) / 3
    total["expected"] = total["total"] - 0.8 * others
    both = tokens.merge(total, on=["group", "rollout"])
    np.testing.assert_allclose(both["advantage"], both["expected"], atol=1e-6)
    np.testing.assert_allclose(both["baseline"], both["total"] - both["expected"], atol=1e-6)


def test_every_reader_shows_it_under_its_name_without_its_module(forgotten, capsys):
    for words in ("compare mine", "diagnose mine", "attribution mine", "report mine --out own.md"):
        assert main(words.split()) == 0, words
        printed = capsys.readouterr().out
        if words.startswith("compare"):
            assert printed.count(NAME) >= 2  # what trains, and a row among all
        if words.startswith("diagnose"):
            assert "the run's configuration has the estimator" not in printed
    assert NAME in Path("own.md").read_text(encoding="utf-8").replace("\\", "")
    assert "my_estimators" not in sys.modules


@pytest.mark.parametrize("page", ["triage", "run", "rollouts", "tokens", "estimators"])
def test_every_page_opens_it_without_its_module(forgotten, page, monkeypatch):
    app = open_page(forgotten.parent, page, monkeypatch)
    assert not app.exception and not app.error
    shown = " ".join(element.value for element in [*app.caption, *app.markdown, *app.info]).replace("\\", "")
    frames = " ".join(frame.value.to_string() for frame in app.dataframe)
    assert page not in ("triage", "estimators") or NAME in shown + frames


def test_it_is_compared_while_another_one_trains(here, tiny_config):
    measure = replace(tiny_config.measure, subgroups=(NAME,))
    path = train(replace(tiny_config, root=here / "runs", run="beside", measure=measure))
    gram = RunStore(path).grams()[0]
    assert {(NAME, "none"), ("otb", "proxy")} <= set(gram.labels)


def test_one_that_reads_energies_is_measured_under_proxy_and_exact_ones(here, tiny_config):
    Path("my_estimators.py").write_text(CODE + "\n\ndef heavy(inputs):\n    return shrunken(inputs) * inputs.energy\n")
    own = EstimatorConfig(name="my_estimators:heavy", energy="exact")
    path = train(replace(tiny_config, root=here / "runs", run="", estimator=own))
    assert path.name == "half-my_estimators.heavy-s0"
    labels = RunStore(path).grams()[0].labels
    assert {("my_estimators:heavy", "proxy"), ("my_estimators:heavy", "exact")} <= set(labels)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (
            "return inputs.reward[:, 0]",
            r"^estimator 'my_estimators:wrong' returned an array of shape \(16,\) in a trial",
        ),
        ("return inputs.reward / 0.0 * np.nan", r"^estimator 'my_estimators:wrong' returned nan at rollout"),
        ("return np.ones(inputs.mask.shape)", r"^estimator 'my_estimators:wrong' returned 1 at .* outside the mask"),
        ("raise KeyError('gold')", r"^estimator 'my_estimators:wrong' failed in a trial .* \(KeyError: 'gold'\)"),
        ("return inputs.position_baseline", r"which needs position_baseline; training cannot provide it"),
        ("return inputs.ratio", r"which needs importance ratios; set objective.ratio"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_one_that_cannot_train_is_refused_before_anything_is_written(here, tiny_config, body, sentence):
    Path("my_estimators.py").write_text(f"import numpy as np\n\n\ndef wrong(inputs):\n    {body}\n")
    own = EstimatorConfig(name="my_estimators:wrong")
    with pytest.raises(InputError, match=sentence):
        train(replace(tiny_config, root=here / "runs", run="refused", estimator=own))
    assert not (here / "runs").exists()


def test_one_that_fails_at_a_later_step_ends_the_run_with_its_name_and_keeps_what_was_complete(here, tiny_config):
    fails = "calls = []\n\n\ndef tiring(inputs):\n    calls.append(len(inputs.mask) == 12)\n"
    fails += "    if sum(calls) > 2:\n        raise OSError('tired')\n    return inputs.reward\n"
    Path("my_estimators.py").write_text(fails)
    config = replace(tiny_config, root=here / "runs", run="tired", estimator=EstimatorConfig("my_estimators:tiring"))
    config = replace(config, measure=MeasureConfig(exact=Schedule(every=0)))
    with pytest.raises(
        InputError, match=r"^estimator 'my_estimators:tiring' failed on the rollouts it was given \(OSErr"
    ):
        train(config)
    store = RunStore(here / "runs" / "tired")
    assert store.complete_steps() == [0, 1]
    assert str(store.info["reason"]).startswith("estimator 'my_estimators:tiring' failed")
