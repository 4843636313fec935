"""The import law: the core knows no I/O, and each big library is imported in one place."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("bus", "trainer_node", "rollout_node", "tools")
PURE = (
    *("errors", "events", "manifest", "capabilities", "membership", "quarantine", "protocol", "view", "update"),
    *("deliveries", "coordinator", "participant", "hearing"),
)
PURE_ALLOWED = {"blake3"} | {f"bus.{name}" for name in PURE}
PURE_STANDARD = {
    "__future__", "collections", "collections.abc", "dataclasses", "enum", "functools", "json", "math", "typing",
}  # fmt: skip
ONLY_IN = {
    "zmq": {"bus/transport.py"},
    "msgpack": {"bus/codec.py"},
    "sqlite3": {"bus/journal.py"},
    "safetensors": {"trainer_node/adapter_directory.py"},
    "peft": {"trainer_node/export.py", "tools/demo/learner.py"},
    "typer": {"tools/cli.py"},
    "plotly": {"tools/report.py"},
}


def modules() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def importers(library: str) -> set[str]:
    found = {path for path in modules() for name in imports(path) if name.split(".")[0] == library}
    return {str(path.relative_to(ROOT)) for path in found}


@pytest.mark.parametrize("name", PURE)
def test_the_pure_core_imports_no_io_no_clock_no_randomness_no_torch(name: str) -> None:
    allowed = PURE_ALLOWED | PURE_STANDARD
    assert set(imports(ROOT / "bus" / f"{name}.py")) <= allowed


@pytest.mark.parametrize("library", ONLY_IN)
def test_each_big_library_is_imported_in_one_place(library: str) -> None:
    assert importers(library) == ONLY_IN[library]


def test_the_bus_knows_torch_only_in_the_collective() -> None:
    assert {path for path in importers("torch") if path.startswith("bus/")} == {"bus/collective.py"}


def test_vllm_stays_inside_the_rollout_node() -> None:
    assert all(path.startswith("rollout_node/") for path in importers("vllm"))


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("bus", {"trainer_node", "rollout_node", "tools"}),
        ("trainer_node", {"rollout_node", "tools"}),
        ("rollout_node", {"trainer_node", "tools"}),
    ],
)
def test_packages_only_look_down(package: str, forbidden: set[str]) -> None:
    for path in (ROOT / package).rglob("*.py"):
        assert not {name.split(".")[0] for name in imports(path)} & forbidden, path


def test_nothing_unpickles() -> None:
    """B005."""
    assert not importers("pickle") | importers("marshal") | importers("shelve") | importers("dill")


def test_no_module_hides_behind_a_name_of_the_standard_library() -> None:
    assert not {path.stem for path in modules() if path.parent.name == "bus"} & set(sys.stdlib_module_names)
