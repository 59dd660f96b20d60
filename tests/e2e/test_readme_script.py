"""The script in the README does what it says, as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.stacks import StackProcess
from tests.tiny import TINY_NAME, TINY_TOKEN

README = Path(__file__).parents[2] / "README.md"


def test_the_script_publishes_a_request_and_prints_its_answer(shared_stack: StackProcess, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 1
    script = blocks[0]
    for given, ours in (
        ("HuggingFaceTB/SmolLM2-135M-Instruct", TINY_NAME),
        ("smollm2-135m", TINY_TOKEN),
        ("nats://127.0.0.1:4222", shared_stack.nats_url),
        ('"steps": 8', '"steps": 1'),
        ("acme/adder", "acme/readme"),
    ):
        assert given in script
        script = script.replace(given, ours)
    path = tmp_path / "publish.py"
    path.write_text(script)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("completed acme/readme@1 ")


def test_the_script_uses_the_slim_packages_only() -> None:
    script = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)[0]
    imported = set(re.findall(r"^(?:from|import) (.+?)(?: import .*)?$", script, re.MULTILINE))
    assert imported == {"asyncio, json, nats", "mint_schemas"}
