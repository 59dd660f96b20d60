"""A process of its own for one tenant's pattern, run as a script; the other side is `patterns.py`.

A short pattern can ask for all memory when it is compiled, and for years when it is matched. Here both are
bounded by the kernel: address space by a limit, CPU time by a timer whose signal ends the process.

In: lines of JSON, first the pattern, then texts. Out: a line of JSON for each. Ends with its input.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys

CPU_S = 1.0
MEMORY_BYTES = 512 * 1024**2


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    compiled: re.Pattern[str] | None = None
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        try:
            if compiled is None:
                compiled = re.compile(json.loads(line))
                answer: object = {"groups": compiled.groups}
            else:
                found = compiled.search(json.loads(line))
                answer = {"matched": found is not None, "group": found.group(1) if found and compiled.groups else None}
        except MemoryError:
            answer = {"error": f"it needs more than {MEMORY_BYTES // 1024**2} MiB"}
        except (re.error, RecursionError, OverflowError) as error:
            answer = {"error": str(error)}
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
