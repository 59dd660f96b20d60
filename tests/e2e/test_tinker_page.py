"""The script in docs/tinker.md does what it says, as it stands there, with each client."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cli.stack.bases import SMOLLM2_NAME
from tests.e2e.tinker_clients.clients import CLIENTS, Client, Desk, write_tokenizer
from tests.stacks import StackProcess
from tests.tiny import TINY_NAME

PAGE = Path(__file__).parents[2] / "docs" / "tinker.md"
OLDER_TINKER = Client("mint022", "tinker", "TINKER")


@pytest.mark.parametrize("client", [*CLIENTS, OLDER_TINKER], ids=lambda client: f"{client.name}-{client.sdk}")
def test_the_script_learns_saves_and_samples(shared_stack: StackProcess, tmp_path: Path, client: Client) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert SMOLLM2_NAME in script
    path = tmp_path / "script.py"
    path.write_text(script.replace(SMOLLM2_NAME, TINY_NAME).replace("import tinker", f"import {client.sdk} as tinker"))
    write_tokenizer(tmp_path, TINY_NAME)
    said = Desk(client, shared_stack, shared_stack.url, tmp_path).python(str(path))
    losses = [float(line) for line in re.findall(r"^\d+\.\d+(?:e-\d+)?$", said, re.MULTILINE)]
    assert len(losses) == 8, said
    assert losses[-1] < losses[0]
    assert re.search(r"^tinker://\S+/weights/taught tinker://\S+/sampler_weights/taught$", said, re.MULTILINE), said
