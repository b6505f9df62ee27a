"""devstream/cli/_racecheck.py: a program under the race checker, its exit code and its report."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from devstream.cli._racecheck import RACES_FOUND

RACY = """
import sys
import torch
import devstream

side = devstream.Stream("cpu")
x = torch.ones(8)
with devstream.stream(side):
    y = x * 2
print(sys.argv[1:], y.sum().item())
"""
CORRECT = RACY.replace("with devstream", "side.wait_stream(devstream.current_stream())\nwith devstream").replace(
    "print(", "devstream.current_stream().wait_stream(side)\nprint("
)


def run(*arguments, env=None, check_code=None):
    done = subprocess.run(
        [sys.executable, "-m", "devstream", "racecheck", *map(str, arguments)],
        capture_output=True, text=True, check=False, env={**os.environ, **(env or {})},
    )  # fmt: skip
    assert check_code is None or done.returncode == check_code, done.stderr
    return done


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "program.py"
        path.write_text(text)
        return path

    return write


def test_a_race_gives_its_exit_code_and_its_report(script):
    path = script(RACY)
    done = run(path, "--fast", "3", check_code=RACES_FOUND)
    assert done.stdout == "['--fast', '3'] 16.0\n"
    assert done.stderr.startswith("2 races found")
    assert f"{path}:9, in <module>\n              y = x * 2" in done.stderr
    assert "missing" in done.stderr


def test_a_correct_program_gives_0_and_no_word(script):
    done = run(script(CORRECT), check_code=0)
    assert done.stdout == "[] 16.0\n"
    assert done.stderr == ""


def test_the_program_s_own_exit_code_stays(script):
    assert "2 races" in run(script(RACY + "sys.exit(7)"), check_code=7).stderr


def test_a_program_that_raises_shows_its_traceback_and_its_races(script):
    done = run(script(RACY + "raise KeyError('mine')"), check_code=1)
    assert "KeyError: 'mine'" in done.stderr
    assert "2 races found" in done.stderr


def test_the_races_are_written_as_json(script, tmp_path):
    run("--json", tmp_path / "races.json", script(RACY), check_code=RACES_FOUND)
    document = json.loads((tmp_path / "races.json").read_text())
    assert (document["kind"], document["schema"]) == ("devstream.races", 1)
    first = document["races"][0]
    assert (first["fault"], first["count"], first["rank"]) == ("read before write", 1, None)
    assert (first["first"]["name"], first["second"]["name"]) == ("ones", "mul")
    assert first["second"]["site"]["line"] == 9
    run("--json", tmp_path / "none.json", script(CORRECT), check_code=0)
    assert json.loads((tmp_path / "none.json").read_text())["races"] == []


def test_a_module_runs_by_its_name(script):
    path = script(RACY)
    done = subprocess.run(
        [sys.executable, "-m", "devstream", "racecheck", "-m", "program", "x"],
        capture_output=True, text=True, check=False, cwd=path.parent,
    )  # fmt: skip
    assert done.returncode == RACES_FOUND
    assert done.stdout == "['x'] 16.0\n"


def test_poison_is_given_on(script):
    done = run("--poison", script("import torch\nprint(torch.empty(1).item())"), check_code=0)
    assert done.stdout == "nan\n"


def test_a_missing_script_is_said_in_one_line():
    done = run("nowhere.py", check_code=2)
    assert done.stderr.count("\n") == 1
    assert "nowhere.py" in done.stderr


RANKS = """
import torch
import torch.distributed as dist
import devstream

dist.init_process_group("gloo")
side = devstream.Stream("cpu")
bucket = torch.zeros(64)
side.wait_stream(devstream.current_stream())
for step in range(10):
    with devstream.stream(side):
        dist.all_reduce(bucket)
    bucket.add_(1)
    side.wait_stream(devstream.current_stream())
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_two_ranks_give_a_report_each_for_ten_steps_of_the_same_race(script):
    """B96, deepspeedai/DeepSpeed#5545: 2 reports in all, ranks 0 and 1."""
    reports = run_ranks(script(RANKS))
    found = [line for line in reports.splitlines() if line.startswith("[rank ")]
    assert sorted(line[:8] for line in found) == ["[rank 0]", "[rank 1]"]
    assert all("(9 times)" in line or "(10 times)" in line for line in found)


def run_ranks(path: Path, code: int = RACES_FOUND) -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "devstream", "racecheck", str(path)]
    ranks = [
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **env, "RANK": str(rank)})
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [code, code], said
    return "\n".join(said)


DDP = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import devstream

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
work = dist.all_reduce(torch.ones(4), async_op=True)
work.wait()
gathered = [torch.zeros(4) for _ in range(2)]
dist.all_gather(gathered, torch.ones(4))
dist.barrier()
total = torch.cat(gathered).sum().item()
assert total == 8
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_ddp_and_collectives_that_are_waited_for_have_no_race(script):
    assert "race" not in run_ranks(script(DDP), code=0)


def on_two_gpus(program):
    """Return *program* with NCCL, each rank on a GPU of its own."""
    return (
        program.replace('init_process_group("gloo")', 'init_process_group("nccl")')
        .replace("import devstream\n", "import devstream, os\ntorch.cuda.set_device(int(os.environ['RANK']))\n"
                 "torch.set_default_device('cuda')\n")
        .replace('Stream("cpu")', "Stream()")
    )  # fmt: skip


@pytest.mark.distributed
@pytest.mark.multi_gpu
@pytest.mark.cuda
def test_ddp_over_nccl_has_no_race(script):
    assert "race" not in run_ranks(script(on_two_gpus(DDP)), code=0)


@pytest.mark.distributed
@pytest.mark.multi_gpu
@pytest.mark.cuda
def test_a_race_with_a_collective_of_nccl_is_found_on_both_ranks(script):
    """B96, deepspeedai/DeepSpeed#5545, over NCCL."""
    reports = run_ranks(script(on_two_gpus(RANKS)))
    found = [line[:8] for line in reports.splitlines() if line.startswith("[rank ")]
    assert set(found) == {"[rank 0]", "[rank 1]"}
