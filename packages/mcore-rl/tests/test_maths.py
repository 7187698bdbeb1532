# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Answers count by their value, whatever is written, and in bounded time."""

import asyncio
import dataclasses
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from mcore_rl import Problem, WeightedMultiTask
from mcore_rl.envs import Maths, MathsConfig
from mcore_rl.envs._maths_answer import same_answer, split_answer


@pytest.mark.parametrize(
    ("answer", "golden", "same"),
    [
        ("42", "42", True), ("42.0", "42", True), ("+42", "42", True), (" 42 . ", "42", True), ("42.", "42", True), ("-3", "3", False),
        ("1,000", "1000", True), ("1,000,000.50", "1000000.5", True), ("10,00", "1000", False), ("$1,250", "1250", True),
        (r"\$18", "18", True), ("18 dollars", "18", True), (r"18 \text{ cm}", "18", True), ("18cm", "18", True), ("18x", "18", False),
        ("50%", "50", True), (r"50\%", "50", True), (r"90^\circ", "90", True), (r"90^{\circ}", "90", True),
        ("1/2", "0.5", True), (r"\frac{1}{2}", "1/2", True), (r"\dfrac12", "0.5", True), (r"-\frac{3}{4}", "-3/4", True),
        (r"\frac{-3}{4}", "-0.75", True), ("2/4", "1/2", True), ("1/3", "0.333333", False), ("1/0", "0", False), ("1/0", "1/0", True),
        (r"\sqrt{2}", r"\sqrt {2}", True), (r"\sqrt{2}", r"\sqrt{3}", False), (r"2\pi", r"2 \pi", True), ("x = 5", "5", True),
        ("(1, 2)", "(1,2)", True), ("(1, 1/2)", "(1.0, 0.5)", True), ("(1, 2)", "(2, 1)", False), ("[1, 2)", "(1, 2)", False),
        (r"\left(1, 2\right)", "(1,2)", True), (r"\text{Tuesday}", "tuesday", True), ("yes", "no", False), ("", "", False),
        ("\u0664", "4", True), ("1e3", "1000", False), ("nan", "nan", True), ("9**9**9", "9", False),
        (r"-\frac{1}{2}", "-0.5", True), (r"-\frac{1}{2}", r"\frac{-1}{2}", True), (r"-\frac{-1}{2}", "1/2", True),
        (r"(-\frac{1}{2},3)", "(-0.5,3)", True), (r"-\frac{1}{2}", "0.5", False), (r"1\frac{1}{2}", "3/2", True),
        (r"1\frac12", "11/2", False),
        (r"-1\dfrac{1}{2}", "-1.5", True), ("1 1/2", "5.5", False), ("1 1/2", "11/2", False), (r"2^3\frac{1}{2}", r"2^{3}1/2", False),
        ("5 7", "57", False), (r"5 \text{ or } 7", "57", False), (r"5\text{ hours }30\text{ minutes}", "530", False), ("5~7", "57", False),
        (r"90^\circ 30", "9030", False), (r"1\,000", "1000", True), (r"1,\!000", "1000", True), (r"5\,7", "57", False),
        ("100, 200", "100200", False), ("100, 200", "100,200", True), (r"(\text{A})", r"(\text{B})", False), (r"(\text{A})", "(A)", True),
        (r"(5\text{ cm}, 3\text{ cm})", "(5, 3)", True), (r"\text{about }5", "5", True), (r"5\text{ cm}^2", "52", False),
    ],
)  # fmt: skip
def test_answers_are_the_same_by_value(answer: str, golden: str, same: bool) -> None:
    assert same_answer(answer, golden) is same_answer(golden, answer) is same


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("so <answer>4</answer>", "4"),
        ("<answer>3</answer> no, <answer>4</answer> it is", "4"),
        (r"\boxed{3}, then \boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{3} <answer>4</answer>", "4"),
        (r"\boxed{3} <answer>$\boxed{\frac{1}{2}}$</answer>", r"\frac{1}{2}"),
        (r"\boxed{3", None),
        ("<answer>4", None),
        ("4</answer>", None),
        ("4", None),
        ("Answer: 3\nNo.\nAnswer: $4$\n", "4"),
        ("Answer:4", "4"),
        ("so **Answer: 4**", None),
        ("Answer: 3\nso \\boxed{4}", "4"),
        ("Answer:\n4", None),
    ],
)
def test_the_last_answer_is_found(response: str, found: str | None) -> None:
    assert (split_answer(response) or (None,))[0] == found


@pytest.fixture
def environment(tmp_path: Path) -> Maths:
    rows = [{"question": f"{n} + 1?", "answer": f"We add. #### {n + 1}"} for n in range(12)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return MathsConfig(path=str(tmp_path / "sums.jsonl"), num_evaluation=4, format_reward=0.1).build()


@pytest.mark.parametrize(
    "response",
    ["\\boxed{" * 5000, "<answer>" * 5000 + "</answer>", "\\boxed{" + "{" * 10_000 + "}" * 10_001, "<answer>" + "9" * 10_000 + "</answer>",
     "<answer>9**9**9</answer>", "<answer>" + "(" * 250 + "</answer>", "<answer>" + "\\frac" * 50 + "</answer>",
     "<answer>" + "1," * 120 + "</answer>", "\\boxed{" + "\\text{" * 40 + "}" * 41],
)  # fmt: skip
def test_hostile_answers_are_judged_at_once(environment: Maths, response: str) -> None:
    begin = time.process_time()
    assert asyncio.run(environment.get_reward(response, Problem(problem_id="", prompt="", golden="7"))) in (0.0, 0.1)
    assert time.process_time() - begin < 0.5


def test_each_problem_of_the_file_is_posed_once_in_another_order_each_time(environment: Maths) -> None:
    rounds = [[environment.problem(8 * epoch + place).problem_id for place in range(8)] for epoch in range(3)]
    assert all(sorted(ids) == sorted(f"maths/{row}" for row in range(4, 12)) for ids in rounds)
    assert len(set(map(tuple, rounds))) == 3
    evaluated = [environment.problem(environment.FIRST_EVALUATION + place).problem_id for place in range(5)]
    assert evaluated == ["maths/0", "maths/1", "maths/2", "maths/3", "maths/0"]


# A line of each, in the columns that it is published with; DAPO's instruction is shortened.
PUBLISHED: dict[str, tuple[dict[str, Any], str, str]] = {
    "GSM8K": ({"question": "How many?", "answer": "48/2 = <<48/2=24>>24.\n#### 1,024"}, "How many?", "1,024"),
    "MATH": (
        {"problem": "Find $x$.", "level": "Level 5", "type": "Algebra", "solution": r"We get \boxed{3}. So $x=\boxed{\frac{1}{2}}$."},
        "Find $x$.", r"\frac{1}{2}",
    ),
    "MATH-500": (
        {"problem": "P", "solution": r"Hence $\boxed{7}$", "answer": "8", "subject": "Algebra", "level": 2, "unique_id": "test/1.json"},
        "P", "8",
    ),
    "DAPO-Math-17k": (
        {"data_source": "math_dapo", "prompt": [{"content": "Solve.\n\nP\n\nAnswer after \"Answer:\".", "role": "user"}], "ability": "MATH",
         "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"}, "extra_info": {"index": "9a9b6eb4"}},
        "Solve.\n\nP\n\nAnswer after \"Answer:\".", "34",
    ),
    "DAPO-Math-17k-Processed": (
        {"prompt": "P", "solution": "34", "data_source": "math_dapo", "source_prompt": [{"content": "Q", "role": "user"}],
         "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"}, "extra_info": {"index": "9a9b6eb4"}},
        "P", "34",
    ),
    "AIME 2024": ({"ID": "2024-II-4", "Problem": "Let x", "Solution": "Denote ... 033", "Answer": 33}, "Let x", "33"),
    "AIMO AIME": ({"id": 0, "problem": "P", "solution": r"\boxed{116}", "answer": "116", "url": "u"}, "P", "116"),
    "Big-Math": (
        {"problem": "P", "answer": r"\frac{7}{2}", "source": "orca_math", "domain": ["Algebra"], "llama8b_solve_rate": 0.5},
        "P", r"\frac{7}{2}",
    ),
    "OpenMathInstruct-1": (
        {"question": "P", "expected_answer": "5", "predicted_answer": "6", "generated_solution": r"\boxed{6}", "is_correct": False},
        "P", "5",
    ),
    "OpenMathInstruct-2": (
        {"problem": "P", "generated_solution": r"\boxed{9}", "expected_answer": "-9", "problem_source": "augmented_math"}, "P", "-9",
    ),
    "OpenMathReasoning": (
        {"expected_answer": "10", "problem_type": "has_answer_extracted", "pass_rate_72b_tir": "0.9", "problem": "P"},
        "P", "10",
    ),
    "NuminaMath": (
        {"source": "olympiads", "problem": "P", "solution": r"so $\boxed{2}$", "messages": [{"content": "P", "role": "user"}]}, "P", "2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_columns_are_read_as_they_are(tmp_path: Path, name: str) -> None:
    row, question, answer = PUBLISHED[name]
    (tmp_path / "file.jsonl").write_text("\n".join(map(json.dumps, [{"problem": "other", "answer": "1"}, row])))
    problem = MathsConfig(path=str(tmp_path / "file.jsonl"), num_evaluation=1, prompt="{question}").build().problem(0)
    assert (problem.prompt, problem.golden) == (question, answer)


def test_other_columns_are_named(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    rows = [{"task": {"Text": f"P{n}", "key": f"so \\boxed{{{n}}}"}, "answer": "no", "solution": n} for n in range(3)]
    path.write_text("\n".join(map(json.dumps, rows)))
    config = MathsConfig(path=str(path), num_evaluation=1, prompt="{question}", question_field="task.text", answer_field="task.key")
    assert sorted((one.prompt, one.golden) for one in config.build().get_dataset()) == [("P1", "1"), ("P2", "2")]
    plain = dataclasses.replace(config, answer_field="solution").build()
    assert [one.golden for one in plain.get_dataset(validation=True)] == ["0"]
    with pytest.raises(ValueError, match="file.jsonl:1 has no task.value"):
        dataclasses.replace(config, answer_field="task.value").build()


def test_a_question_that_comes_again_counts_once_and_is_not_trained_on_where_it_is_evaluated(tmp_path: Path) -> None:
    rows = [{"problem": f"P{n % 3}", "expected_answer": str(n % 3), "generated_solution": f"way {n}"} for n in range(9)]
    (tmp_path / "file.jsonl").write_text("\n".join(map(json.dumps, rows)))
    environment = MathsConfig(path=str(tmp_path / "file.jsonl"), num_evaluation=1, prompt="{question}").build()
    evaluated, trained = ({one.prompt for one in environment.get_dataset(validation=flag)} for flag in (True, False))
    assert (evaluated, trained, len(environment.get_dataset())) == ({"P0"}, {"P1", "P2"}, 2)


def test_rewards_are_of_right_and_of_well_formed_answers(environment: Maths) -> None:
    problem = environment.problem(0)
    assert "1?" in environment.problem(environment.FIRST_EVALUATION + 1).prompt
    rewards = [
        asyncio.run(environment.get_reward(text, problem)) for text in (f"\\boxed{{{problem.golden}.0}}", "\\boxed{99}", problem.golden)
    ]
    assert rewards == [1.0, 0.1, 0.0]


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (r"so \(\boxed{G}\).", 1.0), (r"$\boxed{G}$ is the answer", 0.5), (r"<answer>G</answer>", 1.0), ("<answer>G</answer> or so", 0.5),
        (r"<answer>$\boxed{G}$</answer>.", 1.0), (r"<answer>\boxed{G}</answer> or so", 0.5), (r"<answer>\boxed{G} or so</answer>", 0.5),
        ("Answer: $G$", 1.0), ("Answer: G\nNo.", 0.5), (r"\boxed{99}", 0.1), (r"\boxed{99} it is", 0.1), ("G", -0.5), ("", -0.5),
    ],
)  # fmt: skip
def test_text_behind_an_answer_and_no_answer_have_rewards_of_their_own(environment: Maths, response: str, reward: float) -> None:
    config = dataclasses.replace(environment.config, negative_reward=-0.5, partial_end_reward=0.5)
    problem = environment.problem(0)
    assert asyncio.run(config.build().get_reward(response.replace("G", problem.golden), problem)) == reward


def test_the_first_problems_of_a_file_are_evaluated_a_fifth_of_it_and_128_at_most(tmp_path: Path) -> None:
    for count, wanted in ((2, 1), (12, 2), (1000, 128)):
        (tmp_path / "file.jsonl").write_text("\n".join(json.dumps({"question": f"{n}?", "answer": n}) for n in range(count)))
        environment = MathsConfig(path=str(tmp_path / "file.jsonl"), prompt="{question}").build()
        evaluated, trained = environment.get_dataset(validation=True), environment.get_dataset()
        assert [one.golden for one in evaluated] == [str(n) for n in range(wanted)]
        assert sorted(int(one.golden) for one in trained) == list(range(wanted, count))


def two_files(folder: Path) -> tuple[str, str]:
    """Problems 0 to 9, and problems 8 to 12."""
    paths = []
    for name, numbers in (("dapo", range(10)), ("aime", range(8, 13))):
        paths.append(folder / f"{name}.jsonl")
        paths[-1].write_text("\n".join(json.dumps({"problem": f"{n}?", "answer": str(n)}) for n in numbers))
    return str(paths[0]), str(paths[1])


@pytest.mark.parametrize(("num_evaluation", "evaluated"), [(None, ["8", "9", "10", "11", "12"]), (2, ["8", "9"])])
def test_a_file_of_its_own_is_evaluated_and_nothing_of_it_is_trained_on(
    tmp_path: Path, num_evaluation: int | None, evaluated: list[str]
) -> None:
    trained, own = two_files(tmp_path)
    config = MathsConfig(
        path=trained, evaluation_path=own, num_evaluation=num_evaluation, prompt="{question}", evaluation_prompt="{question} Box it."
    )
    environment = config.build()
    kept, rest = environment.get_dataset(validation=True), environment.get_dataset()
    assert [one.golden for one in kept] == evaluated and {one.prompt[-8:] for one in kept} == {" Box it."}
    assert sorted(one.prompt for one in rest) == [f"{n}?" for n in range(8)]
    assert len({one.problem_id for one in (*kept, *rest)}) == len(kept) + len(rest)


def test_an_environment_of_evaluations_alone_has_weight_0_and_a_name_of_its_own(tmp_path: Path) -> None:
    trained, own = two_files(tmp_path)
    dapo, aime = MathsConfig(path=trained).build(), MathsConfig(path=own, env_id="aime", num_evaluation=5).build()
    mixed = WeightedMultiTask([dapo, aime], [1, 0])
    assert mixed.env_ids == ("maths", "aime") and {mixed.problem(n).env_id for n in range(8)} == {"maths"}
    evaluated = asyncio.run(mixed.evaluation_prompts(5))
    assert [one.problem_id for one in evaluated if one.env_id == "aime"] == [f"aime/aime/{n}" for n in range(5)]
    with pytest.raises(ValueError, match="environment 'aime' has no problems to train on; give it weight 0"):
        WeightedMultiTask([dapo, aime], [1, 1])
    with pytest.raises(ValueError, match="environment 'aime' evaluates all problems of its file; train on another one"):
        aime.problem(0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"env_id": "a/b"}, "env_id='a/b' must be a name without /"),
        ({"evaluation_prompt": "{question}"}, "evaluation_prompt='{question}' must hold {question}, and is for an evaluation_path"),
        ({"evaluation_path": "no/file"}, "maths.evaluation_path='no/file' is no file"),
        ({"evaluation_path": "AIME", "num_evaluation": 6}, "has 5 problems, and num_evaluation=6; lower it"),
        ({"path": "AIME", "num_evaluation": 6}, "has 5 problems, num_evaluation=6 of which are kept back; lower it"),
    ],
)
def test_evaluations_that_cannot_be_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    _, own = two_files(tmp_path)
    with pytest.raises(ValueError, match=re.escape(message)):
        MathsConfig(**{name: own if value == "AIME" else value for name, value in fields.items()}).build()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"question": "a", "answer": "b"}\n{"question": "a"}', r'file.jsonl:2 must be \{"question": ..., "answer": ...\}'),
        ("question: a", "file.jsonl:1 is no JSON; write one problem a line"),
        ("[1, 2]", r'file.jsonl:1 must be \{"question": ..., "answer": ...\}'),
        ('{"question": "a", "answer": true}', "file.jsonl:1 must have a text or a number in answer"),
        ('{"question": "a", "answer": " #### "}', "file.jsonl:1 must have an answer in answer"),
        ('{"question": 3, "answer": "b"}', "file.jsonl:1 must have a text in question, or one message of the user"),
        (
            '{"prompt": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], "answer": "c"}',
            "file.jsonl:1 must have a text in prompt, or one message of the user",
        ),
        (
            '{"problem": "a", "solution": "It is 4."}',
            r"file.jsonl:1 must have a \\boxed answer in solution; name the field of the final answer by maths.answer_field",
        ),
        ('{"question": "a", "answer": "b"}', "has 1 problems, num_evaluation=1 of which are kept back; lower it, or name a longer file"),
    ],
)
def test_files_that_hold_no_problems_are_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "file.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        MathsConfig(path=str(tmp_path / "file.jsonl")).build()
