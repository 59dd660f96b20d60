"""Tasks: prompts with answers, split into train and held-out, and the reward that scores completions."""

from shared.tasks.digest import task_digest
from shared.tasks.jsonl import parse_messages_jsonl, parse_prompts_jsonl
from shared.tasks.load import TaskLoader, load_demonstrations, load_task
from shared.tasks.prompts import prompt_ids
from shared.tasks.rewards import RewardError, scorer_name
from shared.tasks.taskset import Chat, TaskItem, TaskSet, demonstrations

__all__ = [
    "Chat",
    "RewardError",
    "TaskItem",
    "TaskLoader",
    "TaskSet",
    "demonstrations",
    "load_demonstrations",
    "load_task",
    "parse_messages_jsonl",
    "parse_prompts_jsonl",
    "prompt_ids",
    "scorer_name",
    "task_digest",
]
