"""Rewards: exact match, and patterns that are bounded in time."""

import contextlib
import resource
import signal
import time

import pytest
from mint_schemas.training import ExactMatch, Regex, Reward

from shared.errors import Fatal
from shared.tasks import RewardError, TaskItem, TaskSet, scorer_name
from shared.tasks.hosted import HostError
from shared.tasks.patterns import Pattern
from shared.tasks.reward import OneByOne, RewardSettings, said
from shared.tasks.rewards import reward_function


def one_by_one(reward: Reward) -> OneByOne:
    function = reward_function(reward)
    assert callable(function)
    return function


@pytest.mark.parametrize(
    ("pattern", "completion", "answer", "value"),
    [
        (r"\d+", "it is 46", "ignored", 1.0),
        (r"\d+", "no number", "ignored", 0.0),
        (r"#### (\d+)", "so #### 46", "46", 1.0),
        (r"#### (\d+)", "so #### 47", "46", 0.0),
        (r"(a)|b", "b", "a", 0.0),
        (r"^yes$", "yes", "", 1.0),
        (r"(?i)(paris)", "It is Paris.", "Paris", 1.0),
    ],
)
def test_a_pattern_scores_its_first_group_against_the_answer(
    pattern: str, completion: str, answer: str, value: float
) -> None:
    assert one_by_one(Regex(kind="regex", pattern=pattern))(completion, answer) == value


def test_a_pattern_that_does_not_compile_is_refused() -> None:
    with pytest.raises(ValueError, match=r"pattern '\(' does not compile"):
        reward_function(Regex(kind="regex", pattern="("))


def test_a_pattern_that_runs_away_is_stopped_and_names_the_prompt() -> None:
    reward = Regex(kind="regex", pattern=r"^(a|aa)+$")
    task = TaskSet((), (), reward_function(reward), scorer_name(reward), "y")
    began = time.monotonic()
    with pytest.raises(RewardError, match="prompt line-3: HostError: it took more than 1 s of CPU time") as caught:
        task.score(TaskItem("line-3", (), "x"), "a" * 100 + "!")
    assert time.monotonic() - began < 10
    assert isinstance(caught.value, Fatal)


BOMBS = ["((a{1000}){1000}){1000}", "(?:" * 3000 + "a" + ")" * 3000, "a{99999999999999999999}"]


@pytest.mark.parametrize("pattern", BOMBS)
def test_a_pattern_that_asks_for_too_much_stays_in_its_bounds(pattern: str) -> None:
    """The child is bounded by the kernel; this process keeps its memory, whatever the answer is."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.suppress(HostError):
        Pattern(pattern).search("a" * 2000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


def test_a_match_that_needs_all_memory_is_refused() -> None:
    with pytest.raises(HostError, match="more than 512 MiB"):
        Pattern("(?:(a)|(b)|.)*" * 300).search("ab" * 2_000_000)


def test_a_pattern_goes_on_after_a_runaway_text_and_after_its_process_was_ended() -> None:
    pattern = Pattern("^(a|aa)+$")
    with pytest.raises(HostError):
        pattern.search("a" * 100 + "!")
    assert pattern.search("aaa") == (True, "a")
    pattern.host._idle[0].process.kill()
    assert pattern.search("aaa") == (True, "a")


def test_a_patterns_process_ends_with_it() -> None:
    pattern = Pattern("a")
    child = pattern.host._idle[0].process
    assert child.poll() is None
    del pattern
    assert child.wait(20) == -signal.SIGKILL


def test_any_text_reaches_the_pattern_whole() -> None:
    text = "line\nnext \u2028 \ud800 😀\r\n\x00end"
    assert Pattern(r"(?s)^(.*)$").search(text) == (True, text)


def test_scorers_have_names_that_tell_them_apart() -> None:
    assert scorer_name(ExactMatch()) == "exact_match"
    one, two = (scorer_name(Regex(kind="regex", pattern=p)) for p in ("a", "b"))
    assert one != two
    assert one.startswith("regex:")


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("46", "46"),
        ("  46\n", "46"),
        ("so <answer> 46 </answer> then", "46"),
        ("<answer>1</answer> no, <answer>46\n</answer>", "46"),
        ("<answer>46", "<answer>46"),
        ("<answer>1 <answer>46</answer>", "46"),
        ("<answer></answer>", ""),
    ],
)
def test_what_a_completion_says_is_inside_its_last_answer_tags(completion: str, answer: str) -> None:
    assert said(completion) == answer


def test_hosts_are_listed_with_commas_in_any_case() -> None:
    assert RewardSettings.parsed(" Rewards.Internal:8080,, other ", 7) == RewardSettings(
        frozenset({"rewards.internal:8080", "other"}), 7
    )
    assert RewardSettings.parsed("").hosts == frozenset()
