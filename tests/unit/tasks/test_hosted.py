"""What a completion that is a program can do: nothing but score 0."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import shared.tasks.hosted
from shared.errors import Retryable
from shared.tasks.hosted import Hosted, HostError

pytestmark = [
    pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs reasoning-gym"),
    pytest.mark.skipif(sys.platform != "linux", reason="the bounds are Linux's"),
]


def evaluating(folder: Path, filtered: bool = True) -> Path:
    """A host whose verifier is Python's own `eval` of the completion: the worst that a library may ship."""
    real = Path(shared.tasks.hosted.__file__).parent
    score = 'float(dataset(request["entry"][0]).score_answer(request["score"], found))'
    install = "_prctl(PR_SET_SECCOMP, 2, self._header, 0, 0)"
    for name in ("host.py", "forks.py", "confine.py", "guarded.py"):
        text = (real / name).read_text()
        assert (score in text, install in text) == (name == "host.py", name == "confine.py")
        text = text.replace(score, 'float(eval(request["score"]))')
        (folder / name).write_text(text if filtered else text.replace(install, "return"))
    return folder / "host.py"


OPENING = {"kind": "gym", "stride": 7, "name": "chain_sum", "size": 20, "seed": 0, "config": {}}


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Hosted]]:
    patch = pytest.MonkeyPatch()
    patch.setattr(shared.tasks.hosted, "_HOST", evaluating(tmp_path_factory.mktemp("host")))
    yield lambda: Hosted(OPENING)
    patch.undo()


@pytest.fixture(scope="module")
def host(evaluator: Callable[[], Hosted]) -> Hosted:
    return evaluator()


@pytest.fixture(scope="module")
def hook_alone(tmp_path_factory: pytest.TempPathFactory) -> Hosted:
    """As in a kernel without filters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared.tasks.hosted, "_HOST", evaluating(tmp_path_factory.mktemp("host"), filtered=False))
        return Hosted(OPENING)


def asked(host: Hosted, completion: str) -> float:
    return float(host.ask({"entry": [0, 0], "score": completion})["score"])


def test_an_evaluated_completion_scores(host: Hosted) -> None:
    assert asked(host, "0.25") == 0.25
    assert asked(host, "__import__('math').cos(0)") == 1.0


ATTACKS = {
    "shell": "__import__('os').system('touch {mark}')",
    "program": "__import__('subprocess').run(['touch', '{mark}'])",
    "fork": "__import__('os').fork()",
    "execve": "__import__('os').execv('/bin/touch', ['touch', '{mark}'])",
    "raw fork": "__import__('_posixsubprocess').fork_exec([b'touch', b'{mark}'], [b'/bin/touch'])",
    "spawn": "__import__('os').posix_spawn('/bin/touch', ['touch', '{mark}'], {{}})",
    "write": "open('{mark}', 'w') and 1",
    "write in a library": "open(__import__('math').__spec__.origin or __import__('os').__file__, 'a') and 1",
    "remove": "__import__('os').remove('{kept}') or 1",
    "read": "len(open('{kept}').read())",
    "read upwards": "len(open(__import__('os').__file__ + '/../../../../../etc/passwd').read())",
    "environment of the parent": "len(open('/proc/{pid}/environ').read())",
    "list": "len(__import__('os').listdir('/'))",
    "socket": "__import__('socket').socket() and 1",
    "raw socket": "__import__('_socket').socket() and 1",
    "memory": "__import__('ctypes').string_at(1)",
    "library": "__import__('sys').modules['ctypes'].CDLL(None).getpid()",
    "kill": "__import__('os').kill({pid}, 9) or 1",
    "raise": "__import__('signal').raise_signal(9) or 1",
    "objects": "len(__import__('sys').modules['gc'].get_objects())",
    "caught": "[setattr(__import__('os'), '_exit', len), open('{kept}')] and 1",
    "exit": "__import__('os')._exit(0)",
    "abort": "__import__('os').abort()",
    "leave": "__import__('sys').exit(3)",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_completion_reaches_anything(host: Hosted, tmp_path: Path, attack: str) -> None:
    attempt(host, tmp_path, attack)


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_completion_reaches_anything_in_a_kernel_without_filters(
    hook_alone: Hosted, tmp_path: Path, attack: str
) -> None:
    attempt(hook_alone, tmp_path, attack)


def attempt(host: Hosted, folder: Path, attack: str) -> None:
    mark, kept = folder / "mark", folder / "kept"
    kept.write_text("secret")
    child = host._idle[0].process.pid
    with pytest.raises(HostError) as caught:
        asked(host, ATTACKS[attack].format(mark=mark, kept=kept, pid=os.getpid()))
    assert caught.value.over, caught.value
    assert not mark.exists()
    assert kept.read_text() == "secret"
    assert asked(host, "1.0") == 1.0
    assert host._idle[0].process.pid == child


def test_what_a_completion_changes_dies_with_its_fork(host: Hosted) -> None:
    assert asked(host, "[setattr(__import__('builtins'), 'float', lambda x: 1), 1][1]") == 1.0
    assert asked(host, "0.5") == 0.5


def test_the_pipes_of_others_are_closed_to_a_completion(host: Hosted) -> None:
    assert asked(host, "len(__import__('sys')._getframe(2).f_globals['_open_files']()) / 100") == 0.04


def test_only_a_number_between_0_and_1_is_believed(host: Hosted) -> None:
    assert asked(host, "1e9") == 1.0
    assert asked(host, "-3") == 0.0
    with pytest.raises(HostError) as caught:
        asked(host, "float('nan')")
    assert caught.value.over


def test_no_variable_of_the_service_reaches_the_process(
    evaluator: Callable[[], Hosted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINT_S3_SECRET_KEY", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    host = evaluator()
    assert asked(host, "float(any('secret' in v for v in __import__('os').environ.values()))") == 0.0
    pid = host._idle[0].process.pid
    status = Path(f"/proc/{pid}/status").read_text()
    assert "NoNewPrivs:\t1" in status
    assert "Seccomp:\t2" in status
    assert os.getsid(pid) == pid


def test_an_answer_that_sleeps_ends_within_the_bound_by_the_clock(
    evaluator: Callable[[], Hosted], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = evaluator()
    child = host._idle[0].process
    monkeypatch.setattr(shared.tasks.hosted, "WALL_FACTOR", 0.05)
    with pytest.raises(HostError, match=r"more than 0\.5 s") as caught:
        asked(host, "__import__('time').sleep(600)")
    assert caught.value.over
    assert child.returncode == -signal.SIGKILL
    monkeypatch.setattr(shared.tasks.hosted, "WALL_FACTOR", 10.0)
    assert asked(host, "1.0") == 1.0


def test_an_answer_that_closes_its_pipe_and_stays_ends_too(evaluator: Callable[[], Hosted]) -> None:
    host = evaluator()
    child = host._idle[0].process
    with pytest.raises(HostError, match="closed its answer and did not end") as caught:
        asked(host, "[__import__('os').closerange(3, 99), __import__('time').sleep(600)]")
    assert caught.value.over
    assert child.returncode == -signal.SIGALRM
    assert asked(host, "1.0") == 1.0


def test_a_process_killed_from_outside_is_the_machines_fault(
    evaluator: Callable[[], Hosted], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = evaluator()
    host._idle[0].process.kill()
    assert asked(host, "1.0") == 1.0
    monkeypatch.setattr(shared.tasks.hosted, "_HOST", Path("/nonexistent"))
    host._idle[0].process.kill()
    with pytest.raises(Retryable, match="a process that scores apart from the service failed"):
        asked(host, "1.0")


def test_a_fork_killed_from_outside_is_the_machines_fault(host: Hosted) -> None:
    from threading import Timer

    parent = host._idle[0].process.pid
    timer = Timer(0.5, lambda: [os.kill(child, signal.SIGKILL) for child in children(parent)])
    timer.start()
    with pytest.raises(Retryable, match="was killed; is the machine out of memory"):
        asked(host, "__import__('time').sleep(600)")


def children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


ORPHANS = """
import sys, threading, time
from pathlib import Path
import shared.tasks.hosted as hosted
hosted._HOST = Path(sys.argv[1])
host = hosted.Hosted({"kind": "gym", "stride": 7, "name": "chain_sum", "size": 20, "seed": 0, "config": {}})
pid = host._idle[0].process.pid
request = {"entry": [0, 0], "score": "__import__('time').sleep(600)"}
threading.Thread(target=host.ask, args=(request,), daemon=True).start()
children = Path(f"/proc/{pid}/task/{pid}/children")
while not (found := children.read_text().split()):
    time.sleep(0.01)
print(pid, found[0], flush=True)
time.sleep(600)
"""


def test_nothing_outlives_a_service_that_is_killed(evaluator: Callable[[], Hosted]) -> None:
    command = [sys.executable, "-c", ORPHANS, str(shared.tasks.hosted._HOST)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        pids = [int(pid) for pid in service.stdout.readline().split()]
        assert len(pids) == 2
        assert all(alive(pid) for pid in pids)
        service.kill()
    deadline = time.monotonic() + 20
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [pid for pid in pids if alive(pid)] == []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
