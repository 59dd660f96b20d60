"""Tasks: prompts with answers, split into train and held-out, and the rewards that score completions;
chats and preferences to learn from."""

from shared.tasks.chat import Chat, Messages
from shared.tasks.digest import task_digest
from shared.tasks.jsonl import parse_messages_jsonl, parse_prompts_jsonl
from shared.tasks.load import TaskLoader, load_demonstrations, load_pairs, load_task
from shared.tasks.pairs import Pair, parse_pairs_jsonl
from shared.tasks.prompts import prompt_ids
from shared.tasks.reward import RewardError, RewardSettings
from shared.tasks.rewards import scorer_name
from shared.tasks.taskset import TaskItem, TaskSet, demonstrations

__all__ = [
    "Chat",
    "Messages",
    "Pair",
    "RewardError",
    "RewardSettings",
    "TaskItem",
    "TaskLoader",
    "TaskSet",
    "demonstrations",
    "load_demonstrations",
    "load_pairs",
    "load_task",
    "parse_messages_jsonl",
    "parse_pairs_jsonl",
    "parse_prompts_jsonl",
    "prompt_ids",
    "scorer_name",
    "task_digest",
]
