"""The gateway is light: no tensors and no model code reach its process."""

from __future__ import annotations

import subprocess
import sys


def test_no_torch_in_the_gateway() -> None:
    code = (
        "import sys, services.gateway.app; "
        "print(*sorted({'torch', 'transformers', 'peft', 'vllm', 'sqlalchemy'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.split() == []
