"""The import rules of ARCHITECTURE.md, read from the source so that no import has to run."""

import ast
import graphlib
import sys
import tomllib
from pathlib import Path

import pytest

from otb_analysis.extras import EXTRAS

ROOT = Path(__file__).parent.parent
LIBRARY = ROOT / "otb_analysis"

FLOORS = (
    {"types", "schema", "config", "errors", "extras", "phases"},
    {"arrays", "atomic", "custom", "devices", "trackers"},
    {"processes"},
    {"energies", "objectives"},
    {"estimators", "statistics"},
    {"diagnostics"},
    {"store", "figures"},
    {"logit_stats", "gradients", "tasks"},
    {"rollouts"},
    {"measurement"},
    {"checks"},
    {"training", "integrations"},
    {"answers", "recorded"},
    {"report"},
    {"commands"},
    {"__main__"},
)
"""A room imports from lower floors and from itself; the leaves may import each other."""
LEAVES = FLOORS[0]
ALLOWED_ROOMS = {
    room: set().union(*FLOORS[:height]) | (LEAVES if room in LEAVES else {room})
    for height, rooms in enumerate(FLOORS)
    for room in rooms
}
INNER_FLOORS = {
    "gradients": ({"batch"}, {"exact"}, {"manual"}, {"groups"}, {"sketched"}),
}
"""The folders of a room, lowest first; its own files stand above them."""
HEAVY = {
    "torch",
    "transformers",
    "streamlit",
    "plotly",
    "pyarrow",
    "duckdb",
    "pandas",
    "accelerate",
    "peft",
    "trl",
    "vllm",
}
ALLOWED_PACKAGES = (
    {key: set() for key in set().union(*FLOORS[:6])}
    | {"figures": {"plotly", "pandas"}, "store": {"pyarrow", "duckdb", "pandas"}}
    | {key: {"torch", "transformers", "peft"} for key in ("logit_stats", "gradients", "rollouts", "measurement")}
    | {"tasks": {"torch", "transformers", "pyarrow"}}
    | {"training": {"torch", "transformers", "accelerate", "peft", "pandas", "pyarrow"}}
    | {"recorded": {"torch", "transformers", "pyarrow"}}
    | {"integrations": {"torch", "transformers", "accelerate", "trl", "pandas"}}
    | {"processes": {"torch", "accelerate"}, "devices": {"torch"}, "trackers": {"torch", "pandas"}}
    | {"report": {"plotly", "pandas"}, "answers": {"pandas"}, "checks": {"torch"}}
    | {key: HEAVY - {"streamlit"} for key in ("commands", "__main__")}
)
CLONE_COMMANDS = {"benchmarks", "studies"}
"""The folders beside the package that `commands/clone.py` opens."""
OUTSIDE = {"app", "benchmarks", "studies", "tests"}
APP_ROOMS = LEAVES | {"answers", "store", "figures", "statistics", "diagnostics", "estimators", "energies", "arrays"}


def imported(path: Path) -> set[str]:
    """Full dotted names a file imports, at any depth; a relative import is resolved within the repository."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = list(path.relative_to(ROOT).with_suffix("").parts[: -node.level]) if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{stem}.{alias.name}" for alias in node.names}
    return names


def outside(path: Path) -> set[str]:
    """What a file imports from the clone but from outside of the library."""
    return {n for n in imported(path) if n.split(".")[0] in OUTSIDE}


def room(path: Path) -> str:
    return path.relative_to(LIBRARY).parts[0].removesuffix(".py")


def rooms_of(names: set[str]) -> set[str]:
    return {n.split(".")[1] for n in names if n.startswith("otb_analysis.") and n.split(".")[1] != "__version__"}


FILES = sorted(p for p in LIBRARY.rglob("*.py") if p != LIBRARY / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(LIBRARY)))
def test_library_file_imports_only_what_its_room_may(path):
    names = imported(path)
    assert room(path) in ALLOWED_ROOMS, f"{path.name} is in no known room; add it to ARCHITECTURE.md and to this test"
    assert rooms_of(names) - {room(path)} <= ALLOWED_ROOMS[room(path)]
    assert {n.split(".")[0] for n in names} & HEAVY <= ALLOWED_PACKAGES[room(path)]
    in_a_clone = CLONE_COMMANDS if path == LIBRARY / "commands" / "clone.py" else set()
    assert not {n.split(".")[0] for n in names} & {"app", "benchmarks", "studies", "tests"} - in_a_clone


def test_no_file_imports_itself_through_others():
    """Inside rooms, too, and where an import stands in a function."""
    modules = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in FILES}

    def module(name: str) -> str:
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return name

    graph = {name: {module(n) for n in imported(path)} - {"", name} for name, path in modules.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises with the files of a circle


def folder(path: Path) -> tuple[str, str | None]:
    """The room of a file, and the folder of it that the file is in, if its room has folders."""
    inside = path.relative_to(LIBRARY).parts
    return inside[0].removesuffix(".py"), inside[1] if len(inside) > 2 else None


@pytest.mark.parametrize(
    "path", [p for p in FILES if folder(p)[0] in INNER_FLOORS], ids=lambda p: "/".join(p.parts[-3:])
)
def test_file_imports_only_lower_folders_of_its_room(path):
    name, own = folder(path)
    floors = INNER_FLOORS[name]
    if own is None:
        return
    height = next(i for i, floor in enumerate(floors) if own in floor)
    inner = {n.split(".")[2] for n in imported(path) if n.startswith(f"otb_analysis.{name}.")}
    assert inner <= set().union(*floors[:height]) | {own}, f"{path.name} reaches out of {name}/{own}"


@pytest.mark.parametrize("path", sorted((ROOT / "app").rglob("*.py")), ids=lambda p: p.name)
def test_app_file_imports_only_readers_and_figures(path):
    names = imported(path)
    assert rooms_of(names) <= APP_ROOMS
    assert not {n.split(".")[0] for n in names} & {"torch", "transformers", "duckdb", "pyarrow"}


@pytest.mark.parametrize("path", sorted((ROOT / "app" / "views").rglob("*.py")), ids=lambda p: p.name)
def test_page_has_no_loose_text_which_streamlit_would_show(path):
    body = ast.parse(path.read_text(encoding="utf-8")).body[1:]
    assert not [n.lineno for n in body if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]


STUDIES = ROOT / "studies"


@pytest.mark.parametrize("path", sorted(STUDIES.glob("[0-9]*/*.py")), ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_study_file_imports_the_library_what_studies_share_and_its_own_folder(path):
    assert all(n.startswith(("studies.lib.", f"studies.{path.parent.name}.")) for n in outside(path))


@pytest.mark.parametrize("path", sorted((STUDIES / "lib").rglob("*.py")), ids=lambda p: str(p.relative_to(STUDIES)))
def test_what_studies_share_names_no_study_and_enumeration_stands_alone(path):
    enumerated = path.parent.name == "enumeration"
    assert all(n.startswith("studies.lib.enumeration." if enumerated else "studies.lib.") for n in outside(path))
    if enumerated:
        assert rooms_of(imported(path)) <= set().union(*FLOORS[:5])
        assert not {n.split(".")[0] for n in imported(path)} & HEAVY


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda p: p.stem)
def test_benchmark_imports_the_library_other_benchmarks_and_enumeration(path):
    assert all(n.startswith(("benchmarks.", "studies.lib.enumeration.")) for n in outside(path))


def packages_a_base_install_has() -> set[str]:
    """Top-level modules of the standard library, of this package and of its dependencies without an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {requirement.partition(">")[0] for requirement in project["dependencies"]}
    return named | set(sys.stdlib_module_names) | {"otb_analysis", "app"} | {p.stem for p in (ROOT / "app").iterdir()}


MODELS = {"torch", "transformers", "tokenizers", "safetensors", "fsspec"}
"""What the extra `torch` brings; rooms that work on models import it when they are loaded."""
MODEL_ROOMS = {"devices", "logit_stats", "gradients", "rollouts", "measurement", "checks", "recorded", "training"}
MODEL_ROOMS |= {"integrations"}
PEERS = {"trl", "datasets", "deepspeed", "verl"}
"""What `integrations` plugs into; they run in interpreters that have them."""


def when_loaded(tree: ast.AST) -> set[int]:
    """Imports that run when the module is imported: those outside of functions and of `if TYPE_CHECKING`."""
    found: set[int] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.add(id(node))
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and "TYPE_CHECKING" not in ast.unparse(
            getattr(node, "test", ast.Constant(""))
        ):
            found |= when_loaded(node)
    return found


@pytest.mark.parametrize(
    "path", [*FILES, *sorted((ROOT / "app").rglob("*.py"))], ids=lambda p: str(p.relative_to(ROOT))
)
def test_optional_packages_are_imported_where_they_are_used(path):
    tree, base = ast.parse(path.read_text(encoding="utf-8")), packages_a_base_install_has()
    if path.is_relative_to(LIBRARY) and (room(path) in MODEL_ROOMS or path.name == "demo.py"):
        base |= MODELS
    elif path.is_relative_to(ROOT / "app"):
        base |= {"streamlit", "markdown_it"}
    loaded = when_loaded(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            foreign = {str(name).split(".")[0] for name in names} - base
            plugged_in = path.parent == LIBRARY / "integrations" and foreign <= PEERS  # imported by its peer only
            used_late = id(node) not in loaded and foreign <= set(EXTRAS) | PEERS | set(CLONE_COMMANDS)
            assert not foreign or plugged_in or used_late, (node.lineno, foreign)
