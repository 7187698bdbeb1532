# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The problems that the wheel brings along: their answers are computed here, and their tests are passed by programs that are right."""

import asyncio
import math
from collections.abc import Sequence
from fractions import Fraction
from importlib.resources import files

import pytest

from mcore_rl import Problem
from mcore_rl.envs import Code, CodeConfig, Maths, MathsConfig

# In the order of maths.jsonl.
ANSWERS: Sequence[float | Fraction] = (
    18 // 3 * 2,
    math.gcd(252, 198),
    Fraction(31 - 7, 3),
    Fraction(4, 36),
    11 * 8 // 2,
    Fraction(2100, 25),
    pow(7, 100, 13),
    114 // 3 + 1,
    Fraction(80 * 125 * 75, 10000),
    math.factorial(5),
    Fraction(2, 3) + Fraction(3, 4),
    2 * (7 + 84 // 7),
    sum(n % 6 == 0 or n % 10 == 0 for n in range(1, 201)),
    13 * 7,
    sum(range(1, 80, 2)),
    1 / (Fraction(1, 6) + Fraction(1, 3)),
    math.comb(9, 3),
    math.isqrt(9 * 9 + 12 * 12),
    math.lcm(12, 15, 20),
    7 * 7 - 5 * 7 + 6,
    6 // 2,
    Fraction(5, 8) * Fraction(4, 7),
    sum(360 % n == 0 for n in range(1, 361)),
    4 * 17 - 12 - 15 - 20,
    Fraction(15 * 240, 100),
    2**3,
    pow(3, 47, 10),
    Fraction(65 * 260, 1000),
    4 + 24 * 7,
    3 * (2**8 - 1),
    math.factorial(4) // 4,
    (10 + math.isqrt(100 - 84)) // 2,
    180 - 47 - 68,
    300 * 7 // 4,
    0b110101,
    sum(map(int, str(2**15))),
    180 // 4,
    5,
    next(n for n in range(91, 200) if all(n % d for d in range(2, n))),
    Fraction(1, 3),
    Fraction(14 * 100, 80),
    30 // 5 + 30 // 25,
    Fraction(11 - 3, 6 - 2),
    15 * 8 // 2,
    sorted([3, 9, 4, 15, 7])[2],
    Fraction(1, 9),
    30 - (18 + 15 - 7),
    10 * 10 // 2,
    sum(sum(map(int, str(n))) == 8 for n in range(10, 100)),
    sum(range(-10, 15)),
    Fraction(48 * 75, 100),
    Fraction(36 * 4, 3),
    math.comb(12, 2),
    -5,
)
# In the order of code.jsonl.
PROGRAMS = (
    "a, b = map(int, input().split()); print(a + b)",
    "print(input()[::-1])",
    "print(sum(map(int, input())))",
    "print(max(map(int, input().split())))",
    "n = int(input()); print('prime' if all(n % d for d in range(2, int(n**0.5) + 1)) else 'composite')",
    "w = input(); print('yes' if w == w[::-1] else 'no')",
    "import math; print(math.factorial(int(input())))",
    "print(len(input().split()))",
    "print(*sorted(map(int, input().split())))",
    "import math; print(math.gcd(*map(int, input().split())))",
    "for n in range(1, int(input()) + 1): print('Fizz' * (n % 3 == 0) + 'Buzz' * (n % 5 == 0) or n)",
    "print(sum(c in 'aeiou' for c in input().lower()))",
    "a, b = 0, 1\nfor _ in range(int(input())): a, b = b, a + b\nprint(a)",
    "print(f'{int(input()):b}')",
    "print(sum(n for n in map(int, input().split()) if n % 2 == 0))",
    "print(' '.join(w[:1].upper() + w[1:].lower() for w in input().split()))",
    "n = int(input()); print(f'{sum(int(input()) for _ in range(n)) / n:.2f}')",
    "a, b = input().split(); print('yes' if sorted(a) == sorted(b) else 'no')",
    "n, d, f = int(input()), 2, []\nwhile n > 1:\n    while n % d == 0: f.append(d); n //= d\n    d += 1\nprint(*f)",
    "v = list(map(int, input().split())); print(max(v) - min(v))",
    "w = input(); print(min(sorted(set(w)), key=lambda c: -w.count(c)))",
    "print(*dict.fromkeys(input().split()))",
    "d, ok = 0, True\nfor c in input():\n    d += 1 if c == '(' else -1\n    ok = ok and d >= 0\nprint('yes' if ok and d == 0 else 'no')",
    "y = int(input()); print('leap' if y % 4 == 0 and (y % 100 or y % 400 == 0) else 'common')",
    "k = int(input()); print(''.join(chr((ord(c) - 97 + k) % 26 + 97) if c != ' ' else c for c in input()))",
    "print(sorted(set(map(int, input().split())))[-2])",
    "for k in range(1, int(input()) + 1): print('*' * k)",
    "import itertools; print(''.join(f'{c}{len(list(g))}' for c, g in itertools.groupby(input())))",
    (
        "best = now = None\n"
        "for n in map(int, input().split()):\n"
        "    now = n if now is None else max(n, now + n)\n"
        "    best = now if best is None else max(best, now)\n"
        "print(best)"
    ),
    "s = int(input()); print(f'{s // 3600}:{s // 60 % 60:02}:{s % 60:02}')",
    "n, k = int(input()), 0\nwhile n != 1: n, k = (n // 2 if n % 2 == 0 else 3 * n + 1), k + 1\nprint(k)",
    "both = set(map(int, input().split())) & set(map(int, input().split())); print(*sorted(both)) if both else print('none')",
    (
        "n, r = int(input()), ''\n"
        "for v, s in zip((1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1), 'M CM D CD C XC L XL X IX V IV I'.split()):\n"
        "    while n >= v: r += s; n -= v\n"
        "print(r)"
    ),
    "r, _ = map(int, input().split()); print(*map(sum, zip(*(map(int, input().split()) for _ in range(r)))))",
    "n, k = int(input()), 0\nfor c in (50, 20, 10, 5, 2, 1): k, n = k + n // c, n % c\nprint(k)",
    "import sys; print(sum(bool(l.strip()) for l in sys.stdin))",
)


def in_order(environment: Maths | Code) -> list[Problem]:
    """All problems of the file."""
    problems = [*environment.get_dataset(validation=True), *environment.get_dataset()]
    return sorted(problems, key=lambda problem: int(problem.problem_id.rpartition("/")[2]))


def test_the_maths_problems_have_the_answers_that_are_computed_here() -> None:
    environment = MathsConfig(prompt="{question}").build()
    problems = in_order(environment)
    assert len(problems) == len(ANSWERS) == len({problem.prompt for problem in problems}) == 54
    for problem, answer in zip(problems, ANSWERS, strict=True):
        assert asyncio.run(environment.get_reward(f"\\boxed{{{answer}}}", problem)) == 1.0, problem.prompt
        assert asyncio.run(environment.get_reward(f"\\boxed{{{answer + 1}}}", problem)) == 0.0, problem.prompt


@pytest.mark.parametrize("number", range(0, 36, 9))
def test_programs_that_are_right_pass_the_tests_of_their_problems(number: int) -> None:
    environment = CodeConfig(prompt="{question}").build()
    problems = in_order(environment)
    assert len(problems) == len(PROGRAMS) == len({problem.prompt for problem in problems}) == 36

    async def judged() -> list[float]:
        pairs = list(zip(problems, PROGRAMS, strict=True))[number : number + 9]
        return await asyncio.gather(*(environment.get_reward(f"```python\n{program}\n```", problem) for problem, program in pairs))

    assert asyncio.run(judged()) == [1.0] * 9
    assert asyncio.run(environment.get_reward("```python\nprint()\n```", problems[number])) == 0.0


def test_the_files_are_small() -> None:
    sizes = [len(files("mcore_rl.envs").joinpath(name).read_bytes()) for name in ("maths.jsonl", "code.jsonl")]
    assert all(4000 < size < 30_000 for size in sizes)
