"""`python -m tests.e2e.tinker_matrix`: write `docs/tinker-compatibility.md` from a stack of its own.

Needs `make setup tinker-clients`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.e2e.conftest import FP32
from tests.e2e.tinker_matrix.columns import columns
from tests.e2e.tinker_matrix.render import PAGE, rendered
from tests.stacks import StackProcess, tiny_bases


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="mint-matrix-") as scratch:
        work = Path(scratch)
        stack = StackProcess(work / "data", "transformers", tiny_bases(work / "bases"), FP32)
        try:
            PAGE.write_text(rendered(columns(stack.up(), work)), encoding="utf-8")
        finally:
            stack.down()
    sys.stdout.write(f"wrote {PAGE}\n")


if __name__ == "__main__":
    main()
