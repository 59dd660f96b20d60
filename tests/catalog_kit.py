"""A catalog in a test: bases without files, a database in a directory, and results as workers make them."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mint_schemas.cloudevents import run_id_for
from mint_schemas.commands import (
    CheckpointRef,
    Command,
    EvaluationRequested,
    ExportRequested,
    RolloutRequested,
    UpdateRequested,
)
from mint_schemas.common import FileRef
from mint_schemas.training import TrainRequested
from sqlalchemy import select
from sqlalchemy.orm import Session

from services.catalog import commands, leases, runs
from services.catalog.advance import Surroundings, advance
from services.catalog.commits import CommitRefused, commit
from services.catalog.database import Database, sqlite_url
from services.catalog.leases import LeaseRules
from services.catalog.migrate import migrate
from services.catalog.readiness import Readiness
from services.catalog.situation import ReadyRules
from services.catalog.tables import CommandRow, RevisionRow
from shared.adapters import layout
from shared.adapters.manifest import Manifest, TensorSpec
from shared.bases import DENSE_TARGETS, Base
from shared.catalog.api import (
    CommitAnswer,
    CommitRequest,
    EvaluationResult,
    ExportResult,
    Result,
    RolloutResult,
    TakeRequest,
    UpdateResult,
)
from shared.rl.seeds import derive_seed
from shared.store import keys
from shared.tasks import scorer_name, task_digest

TINY = "tiny/llama"


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def make_base(name: str = TINY, token: str = "tiny-llama", **other: Any) -> Base:
    fields: dict[str, Any] = {
        "name": name,
        "token": token,
        "directory": Path("/nowhere"),
        "max_rank": 32,
        "target_modules": DENSE_TARGETS,
        "sha256": sha(name),
        "tokenizer_sha256": sha("tokenizer"),
        "chat_template_sha256": sha("template"),
        "max_context": 2048,
        "bytes": 1000,
    }
    return Base(**{**fields, **other})


def bases_by_name(*bases: Base) -> dict[str, Base]:
    return {base.name: base for base in bases or (make_base(),)}


def sft(policy: str = "acme/adder", steps: int = 2, **other: Any) -> dict[str, Any]:
    method = {"kind": "sft", "steps": steps, "data": {"kind": "task", "task": {"kind": "arithmetic"}}}
    return {"policy": policy, "base": TINY, "method": method, **other}


def grpo(policy: str = "acme/adder", steps: int = 2, **other: Any) -> dict[str, Any]:
    method = {"kind": "grpo", "steps": steps, "task": {"kind": "arithmetic"}, "group_size": 2, "prompts_per_step": 2}
    return {"policy": policy, "base": TINY, "method": method, **other}


def evaluation(**gate: Any) -> dict[str, Any]:
    return {"task": {"kind": "arithmetic"}, "items": 16, "gate": gate}


class Clock:
    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def put_nothing(key: str, data: bytes) -> FileRef:
    """A reference as if the bytes were stored."""
    return FileRef(key=key, sha256=hashlib.sha256(data).hexdigest(), size=len(data))


class FakeWorker:
    """Results for commands, deterministic, with files through `put`. `score` maps a revision (None = the
    base) to its score; `change` edits a result before it is handed out."""

    def __init__(self, put: Callable[[str, bytes], FileRef] = put_nothing) -> None:
        self.put = put
        self.score: Callable[[str | None], float] = lambda revision: 0.5
        self.change: Callable[[Result], Result] = lambda result: result
        self.attempts = 0

    def result(self, command: Command, base: Base) -> Result:
        self.attempts += 1
        match command:
            case RolloutRequested():
                made: Result = self._rollout(command)
            case UpdateRequested():
                made = self._update(command)
            case ExportRequested():
                made = self._export(command, base)
            case EvaluationRequested():
                made = self._evaluation(command)
        return self.change(made)

    def _file(self, command: Command, name: str) -> FileRef:
        key = keys.attempt(command.run_id, command.command_id, f"a{self.attempts}", name)
        return self.put(key, f"{command.command_id} {name}".encode())

    def _rollout(self, command: RolloutRequested) -> RolloutResult:
        return RolloutResult(
            record=self._file(command, "record.json.gz"),
            revision=command.revision,
            adapter_sha256=command.adapter_sha256,
            groups=command.prompts,
            trajectories=command.prompts * command.group_size,
            tokens=100,
            reward_mean=0.25,
            seconds=0.1,
        )

    def _update(self, command: UpdateRequested) -> UpdateResult:
        names = ["adapter.safetensors", "optimizer.safetensors", "state.json"]
        files = {name: self._file(command, name) for name in (*names, *(["probe.json"] if command.export else []))}
        return UpdateResult(
            checkpoint=CheckpointRef(files=files, step=command.step),
            adapter_changed=True,
            metrics={"loss": 1.0, "grad_norm": 0.5, "learning_rate": 1e-3},
            seconds=0.1,
        )

    def _export(self, command: ExportRequested, base: Base) -> ExportResult:
        files = {}
        for name in (layout.CONFIG_FILE, layout.TENSOR_FILE):
            data = f"{command.command_id} {name}".encode()
            files[name] = self.put(keys.blob(hashlib.sha256(data).hexdigest()), data)
        manifest = Manifest(
            revision="",
            policy=command.policy,
            base=command.base,
            base_sha256=base.sha256,
            tokenizer_sha256=base.tokenizer_sha256,
            chat_template_sha256=base.chat_template_sha256,
            rank=command.lora.rank,
            alpha=command.lora.alpha,
            use_rslora=command.lora.use_rslora,
            target_modules=command.lora.target_modules,
            tensors=(TensorSpec(name="x", shape=(1,), dtype="F32"),),
            files=files,
            adapter_sha256=layout.adapter_sha256({name: ref.sha256 for name, ref in files.items()}),
            parent=command.parent,
            run_id=command.run_id,
            step=command.step,
            zero_delta=False,
            probe=None,
        )
        key = keys.attempt(command.run_id, command.command_id, f"a{self.attempts}", "manifest.json")
        return ExportResult(manifest=self.put(key, manifest.model_dump_json().encode()), content=manifest, seconds=0.1)

    def _evaluation(self, command: EvaluationRequested) -> EvaluationResult:
        return EvaluationResult(
            revision=command.revision,
            adapter_sha256=command.adapter_sha256,
            task_sha256=task_digest(command.task),
            scorer=scorer_name(command.task.reward),
            sampling={"temperature": 0.0},
            items=command.items,
            score=self.score(command.revision),
            details=self._file(command, "details.json"),
            seconds=0.1,
        )


class Lab:
    """The catalog's transactions without a bus: every registered revision is ready at once, unless named
    in `unready`."""

    def __init__(self, directory: Path, bases: dict[str, Base] | None = None) -> None:
        self.bases = bases or bases_by_name()
        self.database = Database(sqlite_url(directory))
        migrate(self.database.engine, str(directory))
        self.clock = Clock()
        self.worker = FakeWorker()
        self.rules = LeaseRules()
        self.ready_rules = ReadyRules()
        self.unready: set[str] = set()
        self.failed: dict[str, str] = {}
        self._ids = 0

    def request(self, body: dict[str, Any], id: str | None = None, source: str = "test") -> str:
        """Accept a request that is known to be valid; returns the run id."""
        self._ids += 1
        id = id or f"request-{self._ids}"
        run_id = run_id_for(source, id)
        trace = f"00-{derive_seed(id):032x}-00000000000000aa-01"
        arrival = runs.Arrival(run_id, source, id, "tiny-llama", trace, body)
        request = TrainRequested.model_validate(body)
        scoring = None
        if request.evaluation is not None:
            task = request.evaluation.task
            scoring = runs.Scoring(task_digest(task), scorer_name(task.reward))
        self.database.write_now(runs.accept, arrival, request, scoring, self.bases, self.clock())
        self.advance(run_id)
        return run_id

    def readiness(self) -> Readiness:
        def names(session: Any) -> list[str]:
            return [row.revision for row in session.query(RevisionRow)]

        known = self.database.read_now(names)
        return Readiness({name: ("r1",) for name in known if name not in self.unready}, self.failed)

    def advance(self, run_id: str) -> None:
        for _ in range(3):
            around = Surroundings(self.bases, self.readiness(), self.ready_rules, 120.0, self.clock())
            self.database.write_now(advance, run_id, around)

    def run(self, run_id: str) -> Any:
        return self.database.read_now(runs.find, run_id)

    def open(self, run_id: str) -> str | None:
        """The command that has been open for longest."""
        return next(iter(self.database.read_now(open_commands, run_id)), None)

    def take(self, command_id: str, worker: str = "w1") -> Any:
        return self.database.write_now(
            leases.take, TakeRequest(command_id=command_id, worker=worker), self.rules, self.clock()
        )

    def body(self, command_id: str) -> Command:
        def body(session: Any) -> Command:
            return commands.body_of(session.get(CommandRow, command_id))

        return self.database.read_now(body)

    def commit(self, command_id: str, epoch: int, worker: str = "w1") -> CommitAnswer | CommitRefused:
        result = self.worker.result(self.body(command_id), self.bases[TINY])
        request = CommitRequest(command_id=command_id, worker=worker, epoch=epoch, result=result)
        return self.database.write_now(commit, request, self.bases, self.clock())

    def work(self, run_id: str) -> str | None:
        """Do the run's open command, as a worker and the bus would. Returns its id, None if there is none."""
        command_id = self.open(run_id)
        if command_id is None:
            return None
        taken = self.take(command_id)
        assert taken.status == "granted", taken
        answer = self.commit(command_id, taken.epoch)
        if isinstance(answer, CommitAnswer):
            self.advance(run_id)
        return command_id

    def finish(self, run_id: str, most: int = 200) -> list[str]:
        """Work until nothing is open; the commands in order, without the run's id."""
        done = []
        for _ in range(most):
            command_id = self.work(run_id)
            if command_id is None:
                return done
            done.append(command_id.split(":", 1)[1])
        raise AssertionError(f"still not over after {most} commands: {done}")

    def rows(self, table: Any) -> list[Any]:
        def every(session: Any) -> list[Any]:
            return list(session.query(table).order_by(*table.__table__.primary_key.columns))

        return self.database.read_now(every)

    def close(self) -> None:
        self.database.close()


async def eventually(holds: Callable[[], Any], timeout_s: float = 20.0) -> None:
    """Until `holds()`, which may be a coroutine, is true. Raises AssertionError when it does not become so."""
    for _ in range(int(timeout_s / 0.02)):
        answer = holds()
        if await answer if inspect.isawaitable(answer) else answer:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"not true after {timeout_s} s")


def open_commands(session: Session, run_id: str) -> list[str]:
    """Oldest first, and of those that were issued together the earliest step."""
    query = select(CommandRow.command_id).where(CommandRow.run_id == run_id, CommandRow.state == "open")
    return list(session.scalars(query.order_by(CommandRow.issued_at, CommandRow.step, CommandRow.command_id)))
