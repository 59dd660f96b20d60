"""The `mint` command against a running stack: what it prints, what it refuses, how it exits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.stacks import StackProcess
from tests.tiny import TINY_NAME


def _spec(path: Path, **changes: Any) -> str:
    data = {"kind": "task", "task": {"kind": "arithmetic"}}
    request: dict[str, Any] = {
        "policy": "acme/cli",
        "base": TINY_NAME,
        "method": {"kind": "sft", "steps": 2, "batch_size": 4, "data": data},
    }
    method = {**request["method"], **changes.pop("method", {})}
    path.write_text(json.dumps({**request, "method": method, **changes}))
    return str(path)


def test_train_follow_show_chat_and_report(shared_stack: StackProcess, tmp_path: Path) -> None:
    mint = shared_stack.mint
    spec = _spec(tmp_path / "spec.json")
    assert "valid: acme/cli" in mint("train", spec, "--dry-run").stdout
    followed = mint("train", spec, "--follow")
    assert "step 2: loss" in followed.stderr
    assert "completed" in followed.stdout

    run = shared_stack.mint_json("runs", "--policy", "acme/cli")[0]
    assert (run["state"], run["step"], run["revision"]) == ("completed", 2, "acme/cli@1")
    shown = mint("run", "show", run["run_id"]).stdout
    assert "acme/cli:live → acme/cli@1" in shown
    assert "trace" in shown
    assert "loss  last" in shown
    assert f"run {run['run_id']} completed" in mint("run", "watch", run["run_id"]).stdout
    assert any(it["policy"] == "acme/cli" for it in shared_stack.mint_json("policies"))
    assert shared_stack.mint_json("revisions", "acme/cli")[0]["aliases"] == ["live"]

    answer = shared_stack.mint_json("chat", "acme/cli", "--message", "hello", "--max-tokens", "4")
    assert answer["revision"] == "acme/cli@1"
    assert "acme/cli:canary → acme/cli@1" in mint("alias", "acme/cli", "canary", "1").stdout

    mint("report", run["run_id"], "--to", str(tmp_path / "report"))
    assert json.loads((tmp_path / "report" / "report.json").read_text())["runs"][0]["run_id"] == run["run_id"]


def test_a_grpo_run_is_looked_at_from_every_side(shared_stack: StackProcess, tmp_path: Path) -> None:
    mint = shared_stack.mint
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say {n}", "answer": "x"}) + "\n" for n in range(40)))
    ref = shared_stack.mint_json("data", "put", str(prompts), "--tenant", "acme")
    # About half of what an untrained policy says matches, so that there is something to learn from.
    task = {"kind": "jsonl", "data": ref, "reward": {"kind": "regex", "pattern": "[a-m]"}}
    sizes = {"prompts_per_step": 4, "group_size": 4, "max_tokens": 3, "minibatches": 2, "epochs": 1}
    method = {"kind": "grpo", "task": task, "steps": 4, **sizes}
    path = tmp_path / "grpo.json"
    path.write_text(json.dumps({"policy": "acme/looked-at", "base": TINY_NAME, "method": method}))
    assert (
        "grpo, 4 steps, 4 prompts × 4 samples a record, 2 steps a record, task jsonl"
        in mint("train", str(path), "--dry-run").stdout
    )
    run_id = json.loads(mint("train", str(path), "--follow", "--json").stdout)["run_id"]

    shown = mint("run", "show", run_id).stdout
    assert "reward  last" in shown
    assert "time per stage" in shown
    assert max(len(line) for line in shown.splitlines() if "┤" in line) <= 80

    steps = [json.loads(line) for line in mint("run", "metrics", run_id).stdout.splitlines()]
    assert [(step["step"], step["rollout"]["record_step"]) for step in steps] == [(1, 1), (2, 1), (3, 3), (4, 3)]
    assert all(step["committed"] and step["seconds"]["update"] > 0 for step in steps)
    mint("run", "plot", run_id, "--out", str(tmp_path / "run.png"))
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")

    worst = shared_stack.mint_json("rollouts", run_id, "--step", "4", "--worst", "--limit", "16")
    assert (worst["record_step"], worst["total"], len(worst["items"])) == (3, 16, 16)
    rewards = [item["reward"] for item in worst["items"]]
    assert rewards == sorted(rewards)
    assert all("say " in item["prompt"] and 1 <= item["tokens"] <= 3 for item in worst["items"])
    assert "step 4 (record of step 3): 16 samples of 4 prompts" in mint("rollouts", run_id, "--step", "4").stdout
    missing = mint("rollouts", run_id, "--step", "5", check=False)
    assert missing.returncode == 2
    assert "steps 1–4 have one" in missing.stderr


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"base": "no/such"}, TINY_NAME),
        ({"lora": {"rank": 64}}, "rank"),
        ({"lora": {"target_modules": ["lm_head"]}}, "lm_head"),
        (
            {"method": {"data": {"kind": "jsonl", "data": {"key": "data/acme/x", "sha256": "0" * 64, "size": 3}}}},
            "data",
        ),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(
    shared_stack: StackProcess, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    spec = _spec(tmp_path / "spec.json", **changes)
    for arguments in (("train", spec, "--dry-run"), ("train", spec)):
        done = shared_stack.mint(*arguments, check=False)
        assert done.returncode == 2
        assert said in done.stderr
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
    assert shared_stack.mint_json("runs", "--state", "queued") == []


def test_a_broken_line_of_data_is_named_by_number(shared_stack: StackProcess, tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    good = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    file.write_text(f"{good}\n{good}\n{{broken\n")
    ref = shared_stack.mint_json("data", "put", str(file), "--tenant", "acme")
    spec = _spec(tmp_path / "spec.json", method={"data": {"kind": "jsonl", "data": ref}})
    done = shared_stack.mint("train", spec, "--dry-run", check=False)
    assert done.returncode == 2
    assert "line 3" in done.stderr


def test_an_unknown_policy_names_near_ones(shared_stack: StackProcess) -> None:
    done = shared_stack.mint("chat", "acme/clii", "--message", "hello", check=False)
    assert done.returncode == 2
    assert "acme/cli" in done.stderr.replace("acme/clii", "")


def test_cancel_ends_a_run_and_keeps_what_was(shared_stack: StackProcess, tmp_path: Path) -> None:
    spec = _spec(tmp_path / "spec.json", policy="acme/cancelled", method={"steps": 5000})
    run_id = json.loads(shared_stack.mint("train", spec, "--json").stdout)["run_id"]
    cancelled = json.loads(shared_stack.mint("cancel", run_id, "--json").stdout)
    assert cancelled["state"] == "cancelled"
    assert shared_stack.mint("cancel", "no-such-run", check=False).returncode == 2


def test_without_a_stack_the_command_says_how_to_start_one(shared_stack: StackProcess, tmp_path: Path) -> None:
    done = shared_stack.run("runs", "--data", str(tmp_path))
    assert done.returncode == 3
    assert "mint up" in done.stderr
    done = shared_stack.run("runs", "--url", "http://127.0.0.1:1")
    assert done.returncode == 3
    assert "does not answer" in done.stderr
