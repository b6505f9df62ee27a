"""The workflows keep the rules that no one workflow can check for itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

WORKFLOWS = Path(__file__).resolve().parents[2] / ".github" / "workflows"
NAMES = sorted(path.name for path in WORKFLOWS.glob("*.yml"))
GPU_CALLERS = ("gpu-pr.yml", "nightly.yml")


def _load(name):
    workflow = yaml.safe_load((WORKFLOWS / name).read_text(encoding="utf-8"))
    workflow["on"] = workflow.pop(True)  # YAML 1.1 reads the key `on` as a truth value
    return workflow


def _jobs(name):
    return _load(name)["jobs"].values()


def test_the_expected_workflows_exist():
    assert {"ci.yml", "docs.yml", "fuzz.yml", "gpu-pr.yml", "gpu.yml", "nightly.yml", "release.yml"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_workflow_grants_nothing_by_default(name):
    assert _load(name)["permissions"] == {}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gpu.yml"])
def test_a_workflow_limits_its_concurrency(name):
    assert "group" in _load(name)["concurrency"]


@pytest.mark.parametrize("name", NAMES)
def test_a_workflow_is_short(name):
    assert len((WORKFLOWS / name).read_text(encoding="utf-8").splitlines()) < 90


@pytest.mark.parametrize("name", NAMES)
def test_every_action_is_pinned_by_hash(name):
    used = re.findall(r"uses: (\S+)", (WORKFLOWS / name).read_text(encoding="utf-8"))
    assert all(action.startswith("./") or re.fullmatch(r"\S+@[0-9a-f]{40}", action) for action in used)


@pytest.mark.parametrize("name", NAMES)
def test_checkout_leaves_no_credentials(name):
    for job in _jobs(name):
        for step in job.get("steps", []):
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


def test_only_the_gpu_workflow_takes_runners_from_the_gpu_matrix():
    users = {name for name in NAMES for job in _jobs(name) if "matrix.runner" in str(job.get("runs-on"))}
    assert users <= {"ci.yml", "gpu.yml", "nightly.yml"}
    for name in ("ci.yml", "nightly.yml"):
        text = (WORKFLOWS / name).read_text(encoding="utf-8")
        assert set(re.findall(r"make_matrix\.py (\w+)", text)) == {"cpu"}


def test_a_pull_request_never_reaches_a_self_hosted_runner():
    reach_gpus = {"gpu.yml"} | {
        name for name in NAMES if any(str(job.get("uses", "")).endswith("gpu.yml") for job in _jobs(name))
    }
    assert set(GPU_CALLERS) < reach_gpus
    for name in NAMES:
        if {"pull_request", "pull_request_target"} & set(_load(name)["on"]):
            assert name not in reach_gpus
            assert "self-hosted" not in (WORKFLOWS / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", GPU_CALLERS)
def test_both_gpu_vendors_are_called_and_their_start_is_checked(name):
    jobs = _load(name)["jobs"]
    called = {
        job["with"]["vendor"]: key for key, job in jobs.items() if str(job.get("uses", "")).endswith("gpu.yml")
    }
    assert set(called) == {"nvidia", "amd"}
    checks = [job for job in jobs.values() if "check_started.py" in str(job.get("steps"))]
    (check,) = checks
    assert set(called.values()) <= set(check["needs"])
    assert check["if"] == "always()"


def test_no_job_may_fail_in_silence():
    for name in NAMES:
        assert "continue-on-error" not in (WORKFLOWS / name).read_text(encoding="utf-8")


def test_every_change_runs_the_demonstration_at_its_default_size():
    jobs = _load("ci.yml")["jobs"]
    runs = [step["run"] for step in jobs["demo"]["steps"] if "tox run -e demo" in step.get("run", "")]
    (run,) = runs
    assert "--size" not in run
    assert "--steps" not in run


@pytest.mark.parametrize(("name", "examples", "inductor"), [("ci.yml", 500, 20), ("nightly.yml", 10_000, 200)])
def test_random_programs_are_tried_by_the_hundred_and_at_night_by_the_thousand(name, examples, inductor):
    (job,) = [job for job in _jobs(name) if str(job.get("uses", "")).endswith("fuzz.yml")]
    assert (int(job["with"]["examples"]), int(job["with"]["inductor"])) == (examples, inductor)
    text = (WORKFLOWS / "fuzz.yml").read_text(encoding="utf-8")
    assert "DEVSTREAM_FUZZ: ${{ inputs.examples }}" in text
    assert "DEVSTREAM_FUZZ_INDUCTOR: ${{ inputs.inductor }}" in text


def test_the_required_check_waits_for_every_other_job():
    jobs = _load("ci.yml")["jobs"]
    assert set(jobs["done"]["needs"]) == set(jobs) - {"done"}
    (step,) = jobs["done"]["steps"]
    assert step["run"].count("success") == len(jobs["done"]["needs"])
