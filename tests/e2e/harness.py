"""lm-eval against a gateway, and the same scores computed from the base model's files alone.

In: a gateway's url, a model, its base's directory. Out: of every (question, choice) the loglikelihood and
whether greedy decoding would say it, by both ways. Nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.openai_surface import KEY

TASK = "mint_capitals"
DIRECTORY = Path(__file__).parent / "lm_eval_task"
TIMEOUT_S = 400


@dataclass(frozen=True)
class Scores:
    """Per document, per choice: (loglikelihood, greedy). `accuracy` is of the likeliest choices."""

    choices: list[list[tuple[float, bool]]]
    accuracy: float


def documents() -> list[dict[str, Any]]:
    lines = (DIRECTORY / "capitals.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def by_lm_eval(url: str, model: str, base: Path, work: Path) -> Scores:
    """lm-eval's `local-completions` in a process of its own, as people run it."""
    arguments = {
        "model": model,
        "base_url": f"{url}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": str(base),
        "num_concurrent": 2,
        "max_retries": 1,
    }
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--tasks", TASK]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
    command += ["--include_path", ".", "--batch_size", "4", "--output_path", str(work / "out"), "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(work / "hf"), "OPENAI_API_KEY": KEY}
    done = subprocess.run(
        command,
        cwd=DIRECTORY,
        env=os.environ | offline,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return _written(work / "out")


def _written(out: Path) -> Scores:
    (samples,) = out.rglob(f"samples_{TASK}_*.jsonl")
    (results,) = out.rglob("results_*.json")
    lines = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    lines.sort(key=lambda line: line["doc_id"])
    choices = [[_response(response) for response in line["filtered_resps"]] for line in lines]
    return Scores(choices, json.loads(results.read_text())["results"][TASK]["acc,none"])


def _response(response: list[Any]) -> tuple[float, bool]:
    logprob, greedy = response
    return float(logprob), str(greedy) == "True"


def by_transformers(base: Path) -> Scores:
    """The sum of the continuation's logprobs given the question, one sequence at a time, in fp32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()

    def score(context: str, choice: str) -> tuple[float, bool]:
        whole = tokenizer(f"{context} {choice}", add_special_tokens=False).input_ids
        start = len(tokenizer(context, add_special_tokens=False).input_ids)
        with torch.inference_mode():
            logprobs = torch.log_softmax(model(torch.tensor([whole])).logits[0, start - 1 : -1], -1)
        wanted = torch.tensor(whole[start:])
        total = logprobs.gather(1, wanted[:, None]).sum().item()
        return total, bool((logprobs.argmax(-1) == wanted).all())

    found = [[score(f"Question: {doc['question']}\nAnswer:", c) for c in doc["choices"]] for doc in documents()]
    best = [max(range(len(row)), key=lambda i: row[i][0]) for row in found]
    right = [choice == doc["answer"] for choice, doc in zip(best, documents(), strict=True)]
    return Scores(found, sum(right) / len(right))
