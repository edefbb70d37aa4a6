"""requirements.lock names every package of the extra `all`, in the tested version, with hashes and no place."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text):
    """Package → version of every line NAME==VERSION."""
    return {canonical(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)}


def test_every_package_of_all_is_locked_in_its_tested_version_with_hashes_only():
    text, tested = (ROOT / "requirements.lock").read_text(), pins((ROOT / "constraints.txt").read_text())
    locked, project = pins(text), tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    (own,) = extras["all"]
    asked = sum((extras[name] for name in re.findall(r"\w+", own.partition("[")[2])), project["dependencies"])
    todo, names = [Requirement(one) for one in asked if not one.startswith("otb-analysis")], set()
    while todo:
        one = todo.pop()
        if (key := (canonical(one.name), *sorted(one.extras))) in names:
            continue
        names.add(key)
        try:
            brought = map(Requirement, requires(one.name) or ())
        except PackageNotFoundError:  # what is not installed brings nothing that is known here
            continue
        extras_of = one.extras or {""}
        todo += [r for r in brought if not r.marker or any(r.marker.evaluate({"extra": name}) for name in extras_of)]
    assert {name for name, *_ in names} <= set(locked)
    assert not {name for name in locked.keys() & tested.keys() if locked[name] != tested[name]}
    body = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    for block in re.split(r"\n(?=\S)", body.strip()):
        head, *hashes = block.split("\n")
        assert re.fullmatch(r"[\w.-]+==[\w.]+( ; [\w\s'.=!<>()]+?)? \\", head), head
        assert hashes and all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line) for line in hashes), head
