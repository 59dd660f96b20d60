"""The script in docs/tinker.md does what it says, as it stands there, in the venv of either generation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cli.stack.bases import SMOLLM2_NAME
from tests.e2e.recipe_kit import NEWER, OLDER, Client, working_directory
from tests.stacks import StackProcess
from tests.tiny import TINY_NAME

PAGE = Path(__file__).parents[2] / "docs" / "tinker.md"


@pytest.mark.parametrize(("venv", "module"), [(NEWER, "tinker"), (OLDER, "tinker"), (OLDER, "mint")])
def test_the_script_learns_saves_and_samples(
    shared_stack: StackProcess, tmp_path: Path, venv: str, module: str
) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert SMOLLM2_NAME in script
    path = tmp_path / "script.py"
    path.write_text(script.replace(SMOLLM2_NAME, TINY_NAME).replace("import tinker", f"import {module} as tinker"))
    client = Client(venv, shared_stack.url, working_directory(tmp_path / "home", TINY_NAME))
    said = client.script(path)
    losses = [float(line) for line in re.findall(r"^\d+\.\d+(?:e-\d+)?$", said, re.MULTILINE)]
    assert len(losses) == 8, said
    assert losses[-1] < losses[0]
    assert re.search(r"^tinker://\S+/weights/taught tinker://\S+/sampler_weights/taught$", said, re.MULTILINE), said
