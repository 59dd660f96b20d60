"""A service's memory is kept from other processes of the same user."""

import subprocess
import sys

import pytest

PR_GET_DUMPABLE = 3
PROGRAM = f"""
import ctypes
from shared.secrecy import keep_from_others
before = ctypes.CDLL(None).prctl({PR_GET_DUMPABLE}, 0, 0, 0, 0)
keep_from_others()
print(before, ctypes.CDLL(None).prctl({PR_GET_DUMPABLE}, 0, 0, 0, 0))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the call is Linux's")
def test_a_process_can_keep_its_memory_from_others() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["1", "0"]
