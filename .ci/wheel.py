"""The wheel where there is no clone: built, installed into fresh environments, and used elsewhere.

Without extras it reads a run, imports rollouts, compares and reports, and asks for the extra of what needs one. With
the extras torch and dashboard it trains a few steps, on an estimator of one's own too; compares; asks for a study
and a benchmark; opens and serves the dashboard. Fails at the first thing that is not as promised.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILT = ROOT / ".cache" / "wheel-built"
BASE, WHOLE = ROOT / ".cache" / "wheel-base" / "bin", ROOT / ".cache" / "wheel" / "bin"
"""Of an environment with the wheel alone, and of one with the extras torch and dashboard."""
SMALL = "--small-model.layers 1 --small-model.width 32 --small-model.feed-forward 48 --chain-sum.terms-max 2 "
SMALL += "--warm-start.success-low 0.01 --warm-start.success-high 0.95 --warm-start.check-prompts 64 "
SMALL += "--sample.prompts 4 --sample.group-size 4 --evaluate.prompts 16"
OWN = """
def plain(inputs):
    return inputs.reward.sum(axis=1, keepdims=True) * inputs.mask
"""
DEMO = """
import sys

from otb_analysis.commands import cli, demo

demo.STEPS, demo.PROMPTS = 2, 16
sys.exit(cli.main(["demo", "--no-serve"]))
"""
"""The demo with two steps of 16 prompts instead of 31 of 32: the first is measured."""
OPEN_PAGES = """
import sys
from pathlib import Path

import otb_analysis
from streamlit.testing.v1 import AppTest

app = AppTest.from_file(Path(otb_analysis.__file__).parent / "_app" / "streamlit_app.py", default_timeout=120).run()
for page in (None, "run", "rollouts", "tokens", "estimators", "compare", "studies"):
    opened = app.run() if page is None else app.switch_page(f"views/{page}.py").run()
    assert not opened.exception, (page, opened.exception)
"""


def run(*words: object, code: int = 0, **settings: object) -> str:
    """Run a command and return what it printed; fail with that unless it ends with this code."""
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, **settings)  # type: ignore[call-overload]
    said = done.stdout + done.stderr
    assert done.returncode == code and "Traceback" not in said, f"{words} ended with {done.returncode}:\n{said}"
    return said


def build() -> Path:
    """Build the wheel, look at what is in it, and return it."""
    shutil.rmtree(BUILT, ignore_errors=True)
    run(sys.executable, "-m", "pip", "--quiet", "wheel", "--no-deps", "--wheel-dir", BUILT, ROOT)
    (wheel,) = BUILT.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    tracked = run("git", "-C", ROOT, "ls-files", "otb_analysis", "app").splitlines()
    expected = {re.sub("^app/", "otb_analysis/_app/", name) for name in tracked}
    assert expected <= inside, f"the wheel lacks {sorted(expected - inside)}"
    others = {name for name in inside if not name.startswith(("otb_analysis/", "otb_analysis-"))}
    assert not others, f"the wheel has {sorted(others)}"
    return wheel


def install(wheel: Path, extras: str, bin: Path, absent: tuple[str, ...]) -> None:
    """Install the wheel with some extras, as constraints.txt has them; modules that it must not bring are absent."""
    if not (bin / "python").exists():
        run(sys.executable, "-m", "venv", bin.parent)
    pip = (bin / "python", "-m", "pip", "--quiet", "install")
    run(*pip, "-c", ROOT / "constraints.txt", f"{wheel}{extras}")
    run(*pip, "--no-deps", "--force-reinstall", wheel)  # of an unchanged version, too
    missing = f"import importlib.util as u; print([m for m in {absent!r} if u.find_spec(m)])"
    assert run(bin / "python", "-c", missing, cwd="/").strip() == "[]", f"it has extras; delete {bin.parent}"


def read(folder: Path, run_folder: Path) -> None:
    """Use the wheel without extras on a run that another environment trained, and on rollouts."""
    work = folder / "base"
    shutil.copytree(run_folder, work / "runs" / run_folder.name)
    rows = ({"prompt": f"{i // 4}+1=", "completion": str(i % 4), "reward": float(i % 4 == 1)} for i in range(32))
    (work / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def otb(*words: str, code: int = 0) -> str:
        return run(BASE / "otb", *words, code=code, cwd=work)

    assert "otb import" in otb("--help")
    assert "mine-imported is complete" in otb("import", "mine.jsonl").replace("\n", " ")
    assert run_folder.name in otb("compare", run_folder.name)
    otb("diagnose", run_folder.name)
    otb("report", run_folder.name, "mine-imported", "--out", "page.html")
    assert otb("train", code=2).strip().endswith("'FILE.whl[torch]' from a wheel.")
    assert otb("dashboard", code=2).strip().endswith("'FILE.whl[dashboard]' from a wheel.")


def use(folder: Path) -> Path:
    """Use the commands with a model in an empty folder outside of any repository; return a run that they trained."""
    work, home, scratch = (folder / name for name in ("work", "home", "scratch"))
    for made in (work, home, scratch):
        made.mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "OTB_", "XDG_"))}
    environment |= {"HOME": str(home), "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"}

    def otb(words: str, code: int = 0) -> str:
        return run(WHOLE / "otb", *words.split(), code=code, cwd=work, env=environment)

    assert otb("--version").startswith("otb-analysis ")
    otb(f"train --run first --optimize.steps 3 --measure.exact.every 1 --measure.exact.prompts 0 {SMALL}")
    written = {path.name for path in work.iterdir()}
    elsewhere = [
        path for place in (home, scratch) for path in place.rglob("*") if path.is_file()
    ]  # torch makes folders
    assert (written, elsewhere) == ({"runs", ".cache"}, []), f"otb train wrote elsewhere: {written} {elsewhere}"
    info = json.loads((work / "runs" / "first" / "run.json").read_text())
    assert (info["status"], info["git"]) == ("complete", None), (info["status"], info["git"])

    (work / "my_estimators.py").write_text(OWN)
    otb(f"train --estimator.name my_estimators:plain --run own --optimize.steps 1 --measure.exact.every 0 {SMALL}")
    compared = otb("compare --top 0")
    assert "first" in compared and "my_estimators:plain" in compared and "token_optimal_loo" in compared, compared
    otb("diagnose first")
    otb("report first --out report.html")
    for words in ("study", "study 00_training --quick", "bench alarms"):
        said = otb(words, code=2)
        assert "works in a clone" in said and said.count("\n") == 1, said
    said = otb("train --lora.rank 2", code=2)
    assert said.splitlines()[-1].endswith("pip install '.[train]' in a clone, 'FILE.whl[train]' from a wheel."), said
    kept = shutil.copytree(work / "runs" / "first", folder / "first")
    shutil.rmtree(work / "runs")
    concluded = run(WHOLE / "python", "-c", DEMO, cwd=work, env=environment)
    assert re.search(r"^(Keep|Train with) ", concluded, re.M), concluded
    assert "Estimators on the same rollouts" in concluded, concluded
    run(WHOLE / "python", "-c", OPEN_PAGES, cwd=work, env=environment)
    dashboard(work, environment)
    return kept


def dashboard(work: Path, environment: dict[str, str]) -> None:
    """Serve the dashboard, ask it for its health, and stop it."""
    command = [str(WHOLE / "otb"), "dashboard", "--port", "8901"]
    with subprocess.Popen(command, cwd=work, env=environment, stdout=subprocess.PIPE, text=True) as serving:
        try:
            assert serving.stdout is not None
            found = re.search(r"http://127\.0\.0\.1:\d+", serving.stdout.readline())
            assert found, "otb dashboard printed no link"
            assert answered(f"{found[0]}/_stcore/health", 60) == "ok", "the dashboard does not answer"
        finally:
            serving.terminate()
            serving.wait(30)
    assert answered(f"{found[0]}/_stcore/health", 0) is None, "the dashboard outlived its command"


def answered(address: str, patience: float) -> str | None:
    """Return what an address answers, asked again until it does; None when it never did."""
    until = time.monotonic() + patience
    while True:
        try:
            with urllib.request.urlopen(address, timeout=5) as response:
                return response.read().decode()
        except OSError:
            if time.monotonic() > until:
                return None
            time.sleep(0.5)


if __name__ == "__main__":
    built = build()
    install(built, "", BASE, ("torch", "transformers", "streamlit"))
    install(built, "[torch,dashboard]", WHOLE, ("accelerate", "peft", "math_verify"))
    with tempfile.TemporaryDirectory() as folder:
        read(Path(folder), use(Path(folder)))
    print("The wheel works where there is no clone.")
