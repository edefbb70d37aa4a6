"""The wheel where there is no clone: built, installed without extras into .cache/wheel, and used elsewhere.

Trains a few steps, on an estimator of one's own too; compares; asks for a study and a benchmark; opens and serves the
dashboard. Fails at the first thing that is not as promised.
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
VENV, BUILT = ROOT / ".cache" / "wheel", ROOT / ".cache" / "wheel-built"
PYTHON, OTB = VENV / "bin" / "python", VENV / "bin" / "otb"
SMALL = "--small-model.layers 1 --small-model.width 32 --small-model.feed-forward 48 --chain-sum.terms-max 2 "
SMALL += "--warm-start.success-low 0.01 --warm-start.success-high 0.95 --warm-start.check-prompts 64 "
SMALL += "--sample.prompts 4 --sample.group-size 4 --evaluate.prompts 16"
OWN = """
def plain(inputs):
    return inputs.reward.sum(axis=1, keepdims=True) * inputs.mask
"""
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


def install() -> None:
    """Build the wheel and install it; torch is the one that constraints.txt names."""
    shutil.rmtree(BUILT, ignore_errors=True)
    if not PYTHON.exists():
        run(sys.executable, "-m", "venv", VENV)
    pip = (PYTHON, "-m", "pip", "--quiet")
    run(*pip, "wheel", "--no-deps", "--wheel-dir", BUILT, ROOT)
    (wheel,) = BUILT.glob("*.whl")
    run(*pip, "install", "-c", ROOT / "constraints.txt", wheel)
    run(*pip, "install", "--no-deps", "--force-reinstall", wheel)  # of an unchanged version, too
    inside = set(zipfile.ZipFile(wheel).namelist())
    tracked = run("git", "-C", ROOT, "ls-files", "otb_analysis", "app").splitlines()
    expected = {re.sub("^app/", "otb_analysis/_app/", name) for name in tracked}
    assert expected <= inside, f"the wheel lacks {sorted(expected - inside)}"
    missing = "import importlib.util as u; print([m for m in ('accelerate', 'peft', 'math_verify') if u.find_spec(m)])"
    assert run(PYTHON, "-c", missing, cwd="/").strip() == "[]", "the environment has extras; delete .cache/wheel"


def use(folder: Path) -> None:
    """Use the installed commands in an empty folder outside of any repository."""
    work, home, scratch = (folder / name for name in ("work", "home", "scratch"))
    for made in (work, home, scratch):
        made.mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "OTB_", "XDG_"))}
    environment |= {"HOME": str(home), "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"}

    def otb(words: str, code: int = 0) -> str:
        return run(OTB, *words.split(), code=code, cwd=work, env=environment)

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
    shutil.rmtree(work / "runs")
    concluded = otb("demo --no-serve")
    assert "Next: " in concluded and "Estimators on the same rollouts" in concluded, concluded
    run(PYTHON, "-c", OPEN_PAGES, cwd=work, env=environment)
    dashboard(work, environment)


def dashboard(work: Path, environment: dict[str, str]) -> None:
    """Serve the dashboard, ask it for its health, and stop it."""
    command = [str(OTB), "dashboard", "--port", "8901"]
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
    install()
    with tempfile.TemporaryDirectory() as folder:
        use(Path(folder))
    print("The wheel works where there is no clone.")
