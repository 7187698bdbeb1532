# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Programs of a model: right ones earn 1, hostile ones nothing, and nothing of them is left."""

import asyncio
import dataclasses
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from mcore_rl import JudgeLimits, JudgeProcessError, NumberedProblems, ProcessJudge
from mcore_rl.envs import Code, CodeConfig

SQUARE = [{"input": "3\n", "output": "9\n"}, {"input": "12\n", "output": "144"}]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where programs lie while they run: those of other processes of tests do not."""
    (tmp_path / "programs").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "programs"))
    return tmp_path / "programs"


@pytest.fixture
def environment(tmp_path: Path, programs: Path) -> Code:
    (tmp_path / "code.jsonl").write_text("\n".join(json.dumps({"question": f"Square {n}?", "tests": SQUARE}) for n in range(6)) + "\n\n")
    return CodeConfig(path=str(tmp_path / "code.jsonl"), num_evaluation=2, format_reward=0.1, time_s=3.0, memory_gb=0.2).build()


def reward(environment: NumberedProblems, program: str) -> float:
    return asyncio.run(environment.get_reward(f"I write:\n```python\n{program}\n```\n", environment.problem(0)))


@pytest.mark.parametrize(
    ("program", "earned"),
    [
        ("print(int(input()) ** 2)", 1.0),
        ("print(str(int(input()) ** 2) + '  \\n')", 1.0),
        ("print(9)", 0.1),
        ("print(input())", 0.1),
        ("print(int(input()) ** 2); raise SystemExit(1)", 0.1),
        ("def", 0.1),
        pytest.param("while True: pass", 0.1, marks=pytest.mark.journey),
        pytest.param("import time; time.sleep(60)", 0.1, marks=pytest.mark.journey),
        ("x = bytearray(1 << 30); print(int(input()) ** 2)", 0.1),
        ("print('9' * (2 << 20))", 0.1),
        ("import sys; sys.stdout.buffer.write(bytes([255, 254]))", 0.1),
        ("import socket; socket.create_connection(('127.0.0.1', 9))", 0.1),
        ("import os; os.kill(os.getppid(), 9)", 0.1),
        ("open('x', 'wb').write(bytes(64 << 20)); print(int(input()) ** 2)", 0.1),
    ],
)
def test_programs_earn_what_their_outputs_are_worth(environment: Code, program: str, earned: float) -> None:
    begin = time.monotonic()
    assert reward(environment, program) == earned
    assert time.monotonic() - begin < 20


def test_the_network_is_another_one(environment: Code) -> None:
    names = "import os; n = int(input()); print(n * n if os.listdir('/sys/class/net') else n * n)"
    assert reward(environment, names) == 1.0
    alone = "import socket; n = int(input()); print(n * n if [name for _, name in socket.if_nameindex()] == ['lo'] else 0)"
    assert reward(environment, alone) == 1.0


@pytest.mark.journey
def test_nothing_is_left_of_a_program(environment: Code, programs: Path, tmp_path: Path) -> None:
    left = tmp_path / "alive"
    child = (
        f"import os, time\nif os.fork() == 0:\n os.setsid()\n time.sleep(1.5)\n open({str(left)!r}, 'w')\nelse:\n print(int(input()) ** 2)"
    )
    assert reward(environment, child) == 1.0
    assert not [*programs.iterdir()]
    time.sleep(2.0)
    assert not left.exists()


def test_responses_without_a_program_earn_nothing_and_the_last_one_counts(environment: Code) -> None:
    problem = environment.problem(0)
    right = "```python\nprint(int(input()) ** 2)\n```"
    for response, earned in (
        ("9", 0.0),
        ("```python\nprint(9)", 0.0),
        (f"```\nprint(1)\n```\nNo:\n{right}", 1.0),
        (f"{right}\n```\n1\n```", 0.1),
    ):
        assert asyncio.run(environment.get_reward(response, problem)) == earned, response
    begin = time.process_time()
    assert asyncio.run(environment.get_reward("```" * 20000, problem)) == 0.0
    # At most 20 ms on a quiet machine, and garbage of other tests may be collected meanwhile.
    assert time.process_time() - begin < 0.5


def test_only_so_many_programs_run_at_a_time(environment: Code, monkeypatch: pytest.MonkeyPatch) -> None:
    running, most = [0], [0]

    def passes(program: str, tests: Any) -> bool:
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.02)
        running[0] -= 1
        return True

    monkeypatch.setattr(environment, "_passes", passes)

    async def many() -> list[float]:
        return await asyncio.gather(*(environment.get_reward("```\n1\n```", environment.problem(n)) for n in range(12)))

    for _ in range(2):
        assert asyncio.run(many()) == [1.0] * 12 and 1 < most[0] <= 4


def test_each_problem_of_the_file_is_posed_once_a_round(environment: Code) -> None:
    rounds = [sorted(environment.problem(4 * epoch + place).problem_id for place in range(4)) for epoch in range(3)]
    assert rounds == [[f"code/{row}" for row in range(2, 6)]] * 3
    assert environment.problem(1 << 32).problem_id == "code/0" and "Square 0?" in environment.problem(1 << 32).prompt


@pytest.mark.parametrize(
    ("line", "words"),
    [("{", "is no JSON"), ('{"question": "?"}', "must be"), ('{"question": "?", "tests": []}', "must be"),
     ('{"question": "?", "tests": [{"input": 1, "output": ""}]}', "must be"), ("[]", "must be")],
)  # fmt: skip
def test_files_that_hold_no_problems_are_refused_by_line(line: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "code.jsonl").write_text(json.dumps({"question": "?", "tests": SQUARE}) + "\n" + line)
    with pytest.raises(ValueError, match=f"code.jsonl:2 {words}"):
        CodeConfig(path=str(tmp_path / "code.jsonl"), num_evaluation=1).build()


@pytest.mark.parametrize(
    ("field", "value"),
    [("prompt", "?"), ("format_reward", 1.0), ("time_s", 0.0), ("memory_gb", -1.0), ("max_programs", 0), ("num_evaluation", 0)],
)
def test_fields_out_of_their_range_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field}="):
        CodeConfig(**{field: value})


@pytest.mark.journey
def test_a_program_does_not_outlive_its_limit_by_any_request_of_its_own(environment: Code, tmp_path: Path) -> None:
    left = tmp_path / "alive"
    lasting = f"import ctypes, time\nctypes.CDLL(None).prctl(1, 0)\ntime.sleep(4.5)\nopen({str(left)!r}, 'w')"
    assert reward(environment, lasting) == 0.1
    time.sleep(2.5)
    assert not left.exists()


@pytest.mark.journey
def test_a_program_makes_its_judge_neither_refuse_nor_fail(environment: Code, programs: Path) -> None:
    refusal = "import sys; print('a process without network', file=sys.stderr); raise SystemExit(125)"
    deep = "import os\nfor _ in range(1200):\n os.mkdir('dddd')\n os.chdir('dddd')\nprint(int(input()) ** 2)"
    shut = "import os\nos.makedirs('a/b')\nos.chmod('a/b', 0)\nos.symlink('/', 'a/c')\nos.chmod('..', 0o500)\nprint(int(input()) ** 2)"
    signals = "import os, signal; os.kill(0, signal.SIGUSR1)"
    # So many folders take seconds; they are deeper than Python recurses, and their path is longer than the system takes.
    patient = dataclasses.replace(environment.config, time_s=60.0).build()
    assert [reward(patient, program) for program in (refusal, deep, shut, signals)] == [0.1, 1.0, 1.0, 0.1]
    assert not [*programs.iterdir()]


@pytest.mark.journey
def test_programs_are_judged_alike_in_processes_of_their_own_and_end_with_them(environment: Code, tmp_path: Path) -> None:
    left = tmp_path / "alive"
    lasting = f"import time\ntime.sleep(6.0)\nopen({str(left)!r}, 'w')"
    config = dataclasses.replace(environment.config, time_s=30.0)
    judge = ProcessJudge(config.build, JudgeLimits(num_workers=1, time_s=4.0))
    try:
        programs = ("print(int(input()) ** 2)", "print(int(input()) ** 2); raise SystemExit(1)", "print(9)")
        assert [reward(judge, program) for program in programs] == [1.0, 0.1, 0.1]
        with pytest.raises(JudgeProcessError, match="time_s=4"):
            reward(judge, lasting)
        time.sleep(2.5)
        assert not left.exists()
    finally:
        judge.close()
