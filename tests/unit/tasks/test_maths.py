"""What math_verify takes as equal, and that no completion takes more than it may."""

from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import pytest
from mint_schemas.common import FileRef
from mint_schemas.training import ArithmeticTask, JsonlPrompts, MathVerify

from shared.tasks import RewardError, TaskItem, TaskSet, load_task, scorer_name
from shared.tasks.maths import MathReward
from shared.tasks.reward import OneByOne
from tests.unit.tasks.test_taskset import nothing, reader


@pytest.fixture(scope="module")
def reward() -> OneByOne:
    return MathReward(concurrency=2)


@pytest.mark.parametrize(
    ("answer", "completion", "value"),
    [
        ("46", "46", 1.0),
        ("46", "12+34=46", 1.0),
        ("46", "The answer is 46.", 1.0),
        ("46", "47", 0.0),
        ("46", "46 or perhaps 47", 0.0),
        ("46", "", 0.0),
        ("46", "I do not know", 0.0),
        ("46", "<answer>46</answer>, not 47", 1.0),
        ("-4", r"\boxed{-4}", 1.0),
        ("1/2", r"so it is \boxed{\frac{1}{2}}", 1.0),
        (r"\frac{1}{2}", "0.5", 1.0),
        (r"\frac{3}{4}", "75%", 1.0),
        ("1/3", "0.34", 0.0),
        ("3", r"first \boxed{2}, no: \boxed{3}", 1.0),
        ("2", r"first \boxed{2}, no: \boxed{3}", 0.0),
        (r"\boxed{3}", "3", 1.0),
        ("$3$", "$x = 3$", 1.0),
        (r"\{1,2\}", r"\boxed{\{2,1\}}", 1.0),
        (r"\{1,2\}", r"\boxed{\{2,3\}}", 0.0),
        ("(1,2)", r"\boxed{(1,2)}", 1.0),
        ("(1,2)", r"\boxed{(2,1)}", 0.0),
        ("[0,1)", r"$[0,1)$", 1.0),
        ("[0,1)", r"$[0,1]$", 0.0),
        ("5", r"\boxed{5\text{ cm}}", 1.0),
        ("5 cm", "5 cm", 1.0),
        ("1000", "1,000", 1.0),
        ("1e3", "1000", 1.0),
        ("2e-05", "0.00002", 1.0),
        ("x^2+2x+1", r"\boxed{(x+1)^2}", 1.0),
        ("x^2+2x+1", r"\boxed{(x-1)^2}", 0.0),
        (r"\sqrt{8}", r"$2\sqrt{2}$", 1.0),
    ],
)
def test_mathematics_is_compared_as_mathematics(reward: OneByOne, answer: str, completion: str, value: float) -> None:
    assert reward(completion, answer) == value


@pytest.mark.parametrize("completion", [r"$9^{9^{9^{9}}}$", "$" + "(" * 3000 + "$", "\\boxed{" * 2000, "\ud800"])
def test_what_cannot_be_read_within_bounds_is_worth_nothing(reward: OneByOne, completion: str) -> None:
    assert reward(completion, "5") == 0.0
    assert reward("5", "5.0") == 1.0


def test_scores_are_the_same_from_many_threads(reward: OneByOne) -> None:
    with ThreadPoolExecutor(6) as threads:
        scores = list(threads.map(lambda i: reward(str(i), f"{2 * i}/2"), range(60)))
    assert scores == [1.0] * 60


@pytest.mark.parametrize("answer", ["", "$$"])
def test_an_answer_that_is_no_mathematics_names_the_prompt(reward: OneByOne, answer: str) -> None:
    task = TaskSet((), (), reward, "math", "y")
    with pytest.raises(RewardError, match=r"prompt line-3: ValueError: the answer .* is no mathematical expression"):
        task.score(TaskItem("line-3", (), answer), "5")


async def test_a_file_with_an_answer_that_is_no_mathematics_is_refused_by_its_line() -> None:
    file = FileRef(key="data/acme/x", sha256="a" * 64, size=3)
    task = JsonlPrompts(kind="jsonl", data=file, reward=MathVerify(kind="math_verify"))
    lines = b'{"prompt": "p", "answer": "1/2"}\n\n{"prompt": "q", "answer": " "}\n'
    with pytest.raises(ValueError, match="line-3: the answer ' ' is no mathematical expression"):
        await load_task(task, reader(lines))
    with pytest.raises(ValueError, match=r"line-1: the answer .* cannot be read: it took more than 2 s of CPU time"):
        await load_task(task, reader(rb'{"prompt": "p", "answer": "9^{9^{9^{9}}}"}'))


async def test_a_task_names_the_librarys_release() -> None:
    maths = MathVerify(kind="math_verify")
    assert scorer_name(maths) == f"math_verify@{version('math-verify')}"
    task = await load_task(ArithmeticTask(kind="arithmetic", reward=maths), nothing)
    item = task.train_items[0]
    assert await task.score_batch([(item, f"it is {item.answer}.0"), (item, "none")]) == [1.0, 0.0]
