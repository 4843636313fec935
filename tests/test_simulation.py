"""The simulation itself: its invariants hold, it repeats itself, it injects every fault, and it tells what broke."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from hashlib import sha256

import pytest
from typer.testing import CliRunner

from bus.coordinator import Coordinator
from tools.cli import app
from tools.simulation.faults import EVENTS, STEP_FAULTS, SUBJECTS
from tools.simulation.run import run_simulation, simulate, summarised

SEEDS = 1000
STEPS = {f"{SUBJECTS[step]} {kind}" for step, kinds in STEP_FAULTS.items() for kind in kinds}
MESSAGES = {"message lost", "message duplicated", "message delayed", "message reordered"}
PARTED = {"held by a partition", "swallowed by a partition"}


def trace_of(seed: int) -> str:
    outcome = simulate(seed, 5, traced=True)
    return sha256("\n".join(map(str, outcome.trace)).encode()).hexdigest()


@pytest.mark.timeout(300)
def test_every_invariant_holds_and_every_kind_of_fault_occurs() -> None:
    report = run_simulation(SEEDS, start=0, nodes=5)
    assert not [f"seed {outcome.seed}: {outcome.violation}" for outcome in report.violating]
    assert report.schedules == SEEDS
    missing = {*EVENTS, *STEPS, *MESSAGES, *PARTED} - report.faults.keys()
    assert not missing
    assert min(report.faults.values()) >= 10


@pytest.mark.parametrize("nodes", [1, 2, 8])
def test_fleets_of_other_sizes_keep_the_invariants(nodes: int) -> None:
    assert not run_simulation(50, start=0, nodes=nodes, processes=1).violating


def test_the_same_seed_is_the_same_run() -> None:
    """Also under another hash seed, so no set's or dict's order decides anything."""
    seeds = range(20)
    here = [trace_of(seed) for seed in seeds]
    assert here == [trace_of(seed) for seed in seeds]
    assert len(set(here)) == len(here)
    script = f"from tests.test_simulation import trace_of; print(*[trace_of(seed) for seed in {seeds!r}])"
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
        assert told.stdout.split() == here, told.stderr


def test_the_report_is_one_json_object() -> None:
    result = CliRunner().invoke(app, ["simulate", "--seeds", "5", "--start", "3", "--nodes", "2", "--json"])
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert {"schedules", "steps", "violations", "faults", "schedules_per_second"} <= report.keys()
    assert report["schedules"] == 5
    assert report["violations"] == 0


def test_one_seed_shows_its_whole_trace() -> None:
    result = CliRunner().invoke(app, ["simulate", "--seeds", "1", "--start", "3"])
    assert result.exit_code == 0
    assert result.stdout.count("\n") > 100
    assert "faults end here" in result.stdout


def test_a_violation_ends_in_exit_code_1_with_seed_invariant_and_story(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Coordinator, "restore", lambda self, events: [])
    seed = next(seed for seed in range(200) if simulate(seed, 5).violation)
    one = CliRunner().invoke(app, ["simulate", "--seeds", "1", "--start", str(seed)])
    assert one.exit_code == 1
    assert f"seed {seed} violates I7" in one.stdout
    many = CliRunner().invoke(app, ["simulate", "--seeds", "2", "--start", str(seed)])
    assert many.exit_code == 1
    assert f"the whole trace: adapterbus simulate --seeds 1 --start {seed}" in many.stdout
    assert "controller run" in many.stdout
    assert len(many.stdout) < len(one.stdout)
    assert summarised(run_simulation(2, seed, processes=1))["violations"] >= 1
