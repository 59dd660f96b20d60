"""How vLLM is started, asked and patched here: each default that is a trap on CPU, by its argument.

Whether the arguments do what they are for is the contract suite's matter; here each is seen in seconds.
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
import time
import warnings
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shared.adapters.host import host_of
from shared.bases import Base
from shared.engine.port import AdapterRefused, EngineDead, EngineError, Grammar, SampleRequest, SamplingSettings
from shared.engine.settings import EngineSettings
from tests.serving_kit import make_base

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.fixture(scope="module")
def vllm() -> Any:
    """The modules under test; what they import warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

        from shared.engine.vllm import engine, executor, grouped, start, translate
    return SimpleNamespace(
        engine=engine, executor=executor, grouped=grouped, start=start, translate=translate, punica=PunicaWrapperCPU
    )


@pytest.fixture
def base(tmp_path: Path) -> Base:
    return make_base(tmp_path / "base")


def _arguments(vllm: Any, base: Base, tmp_path: Path, *, spare: bool = False, **settings: Any) -> Any:
    chosen = EngineSettings(tmp_path, **({"slots": 2, "max_resident": 5, "max_rank": 9} | settings))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return vllm.start.engine_args(base, chosen, host_of(base, chosen.max_rank), spare=spare)


def test_a_prefill_is_never_split(vllm: Any, base: Base, tmp_path: Path) -> None:
    """Split, it rewinds the generator of a seeded request, and on CPU that ends the engine."""
    arguments = _arguments(vllm, base, tmp_path)
    assert arguments.enable_chunked_prefill is False
    assert arguments.max_num_batched_tokens >= arguments.max_model_len


def test_a_group_shares_its_prompt_in_small_blocks(vllm: Any, base: Base, tmp_path: Path) -> None:
    """128 tokens, the default on CPU, are longer than most prompts, and only whole blocks are shared."""
    assert _arguments(vllm, base, tmp_path).block_size == (32 if vllm.start.current_platform.is_cpu() else None)


def test_on_cpus_nobody_waits_by_spinning(vllm: Any, base: Base, tmp_path: Path, monkeypatch: Any) -> None:
    chosen = vllm.executor.SparingExecutor if vllm.start.current_platform.is_cpu() else None
    assert _arguments(vllm, base, tmp_path).distributed_executor_backend is chosen
    monkeypatch.setattr(vllm.executor, "VERSIONS", frozenset())
    assert _arguments(vllm, base, tmp_path).distributed_executor_backend is None


def test_a_reader_goes_to_sleep_soon_after_a_message(vllm: Any, monkeypatch: Any) -> None:
    condition_type = vllm.executor.SpinCondition
    monkeypatch.setattr(condition_type, "record_read", condition_type.record_read)
    vllm.executor.spin_shortly()
    condition = SimpleNamespace(busy_loop_s=1.0)
    began = time.monotonic()
    condition_type.record_read(condition)
    left = condition.last_read + condition.busy_loop_s - began
    assert vllm.executor.SPIN_S <= left < vllm.executor.SPIN_S + 0.5


def test_lm_head_is_never_wrapped(vllm: Any, base: Base, tmp_path: Path) -> None:
    """vllm#16668, vllm#51594: with lm_head under LoRA, two prompt-logprob requests at once end the engine."""
    wrapped = set(_arguments(vllm, base, tmp_path).lora_target_modules)
    assert wrapped == {*base.target_modules, "qkv_proj", "gate_up_proj"}


def test_no_default_decides_memory_logprobs_or_slots(vllm: Any, base: Base, tmp_path: Path) -> None:
    arguments = _arguments(vllm, base, tmp_path, kv_cache_bytes=2**28)
    assert arguments.kv_cache_memory_bytes == 2**28
    assert arguments.logprobs_mode == "processed_logprobs"
    assert (arguments.max_loras, arguments.max_cpu_loras) == (2, 5)
    spare = _arguments(vllm, base, tmp_path, spare=True)
    assert (spare.max_loras, spare.max_cpu_loras) == (3, 6)


@pytest.mark.parametrize(("asked", "given"), [(1, 1), (2, 8), (8, 8), (9, 16), (32, 32)])
def test_the_maximum_rank_is_the_next_that_vllm_knows(
    vllm: Any, base: Base, tmp_path: Path, asked: int, given: int
) -> None:
    """The cost of its own operators grows with it, so that it is no larger than need be."""
    assert _arguments(vllm, base, tmp_path, max_rank=asked).max_lora_rank == given


def test_each_sequence_is_a_request_with_its_seed(vllm: Any) -> None:
    settings = SamplingSettings(max_tokens=3, temperature=0.6, logprobs=0, prompt_logprobs=0)
    first = vllm.translate.sampling_params(settings, 11, with_prompt=True)
    other = vllm.translate.sampling_params(settings, 12, with_prompt=False)
    assert (first.n, first.seed, first.logprobs, first.prompt_logprobs) == (1, 11, 0, 0)
    assert (other.n, other.seed, other.prompt_logprobs) == (1, 12, None)


def test_a_temperature_that_vllm_would_raise_gives_no_logprobs(vllm: Any) -> None:
    """It samples at 0.01 whatever lies between 0 and that, and a learner would divide by what was asked for."""
    cold = SamplingSettings(max_tokens=1, temperature=0.001, logprobs=0)
    with pytest.raises(ValueError, match=r"temperature is 0\.001; with logprobs it must be 0 or at least 0\.01"):
        vllm.translate.sampling_params(cold, 1, with_prompt=True)
    for fine in (replace(cold, logprobs=None), replace(cold, temperature=0.0), replace(cold, temperature=0.01)):
        assert vllm.translate.sampling_params(fine, 1, with_prompt=True).max_tokens == 1


def test_a_grammar_travels_and_its_end_is_a_stop_token(vllm: Any) -> None:
    """Once a grammar is fulfilled vLLM allows one token alone, which would be drawn until the length is reached."""
    settings = SamplingSettings(max_tokens=3, stop_token_ids=(5,), grammar=Grammar("regex", "a+"))
    params = vllm.translate.sampling_params(settings, 1, with_prompt=False, grammar_end=2)
    assert (params.structured_outputs.regex, params.structured_outputs.json) == ("a+", None)
    assert params.stop_token_ids == [5, 2]
    schema = replace(settings, stop_token_ids=(2,), grammar=Grammar("json_schema", "{}"))
    params = vllm.translate.sampling_params(schema, 1, with_prompt=False, grammar_end=2)
    assert (params.structured_outputs.regex, params.structured_outputs.json) == (None, "{}")
    assert params.stop_token_ids == [2]
    plain = vllm.translate.sampling_params(replace(settings, grammar=None), 1, with_prompt=False, grammar_end=2)
    assert (plain.structured_outputs, plain.stop_token_ids) == (None, [5])


def test_one_backend_compiles_grammars_and_priorities_count(vllm: Any, base: Base, tmp_path: Path) -> None:
    arguments = _arguments(vllm, base, tmp_path)
    assert arguments.structured_outputs_config.backend == "guidance"
    assert arguments.structured_outputs_config.disable_any_whitespace
    assert arguments.skip_tokenizer_init is False
    assert arguments.scheduling_policy == "priority"
    (base.directory / "tokenizer.json").unlink()
    assert _arguments(vllm, base, tmp_path).skip_tokenizer_init is True


def test_what_filters_leave_of_the_others_is_left_out(vllm: Any) -> None:
    """Under top-k, top-p or a grammar the top logprobs contain −inf, which JSON has not."""
    rows = [{7: SimpleNamespace(logprob=0.0), 9: SimpleNamespace(logprob=-math.inf)}]
    completion = SimpleNamespace(token_ids=[7], logprobs=rows, finish_reason="length")
    output = SimpleNamespace(outputs=[completion], prompt_logprobs=None)
    chunk = vllm.translate.chunk_of(0, output, (1,), SamplingSettings(max_tokens=1, logprobs=2))
    assert chunk.top_logprobs == ({7: 0.0},)
    assert chunk.logprobs == (0.0,)


def test_other_operators_are_not_replaced(vllm: Any) -> None:
    class Newer(vllm.punica):  # type: ignore[name-defined, misc]
        pass

    wrapper = Newer.__new__(Newer)
    with pytest.raises(TypeError, match="grouped ones replace PunicaWrapperCPU only"):
        vllm.grouped.install(SimpleNamespace(punica_wrapper_mapping={"model": wrapper}))


async def test_what_a_call_raised_in_the_worker_is_an_engine_error(vllm: Any, base: Base) -> None:
    """vLLM hands it over as a bare Exception; a load is then tried again and given up, never for ever."""

    async def failed() -> None:
        raise Exception("Call to collective_rpc method failed: no space left")

    llm = SimpleNamespace(errored=False)
    engine = _engine(vllm, base, llm)
    with pytest.raises(EngineError, match="no space left"):
        await engine._call(failed())
    llm.errored = True
    with pytest.raises(EngineDead):
        await engine._call(asyncio.sleep(60))


async def test_what_vllm_does_not_take_is_no_refusal(vllm: Any, base: Base) -> None:
    """It passed admission, and want of memory looks like anything else: a refusal would stand for good."""

    async def add_lora(lora: Any) -> bool:
        raise Exception("Call to add_lora method failed: [Errno 12] Cannot allocate memory")

    engine = _engine(vllm, base, SimpleNamespace(errored=False, add_lora=add_lora))
    with pytest.raises(EngineError, match=r"adapter a: vLLM did not take it: .*Cannot allocate memory") as raised:
        await engine._add(SimpleNamespace(lora_name="a", lora_int_id=1))
    assert not isinstance(raised.value, AdapterRefused)


class _Hanging:
    """vLLM whose engine process answers nothing. As there, `shutdown` ends what feeds the streams, and tells
    them nothing; `during` is asked for while it lasts."""

    errored = False

    def __init__(self) -> None:
        self.queues: list[asyncio.Queue[Exception]] = []
        self.begun = asyncio.Semaphore(0)
        self.output_processor = self
        context = SimpleNamespace(destroy=lambda linger: None)
        self.engine_core = SimpleNamespace(resources=SimpleNamespace(ctx=context))
        self.during: Callable[[], None] = lambda: None

    def propagate_error(self, error: Exception) -> None:
        for queue in self.queues:
            queue.put_nowait(error)

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        self.queues.append(asyncio.Queue())
        self.begun.release()
        raise await self.queues[-1].get()
        yield

    def shutdown(self) -> None:
        self.during()


async def test_closing_an_engine_that_hangs_ends_its_streams(vllm: Any, base: Base, tmp_path: Path) -> None:
    llm = _Hanging()
    engine = _engine(vllm, base, llm, tmp_path / "record")
    loop = asyncio.get_running_loop()
    request = SampleRequest("r", (1, 2), SamplingSettings(max_tokens=4))

    async def ask() -> None:
        async for _ in engine._sequence(request, 0, 1, None):
            raise AssertionError("a hanging engine gave a token")

    before, late = asyncio.create_task(ask()), asyncio.Event()
    tasks = [before]
    await llm.begun.acquire()

    async def ask_late() -> None:
        """A stream that passed the checks before the engine was closed."""
        assert before.done(), "it is told before the shutdown, which may last"
        tasks.append(asyncio.create_task(ask()))
        await llm.begun.acquire()
        late.set()

    llm.during = lambda: asyncio.run_coroutine_threadsafe(ask_late(), loop).result(20)
    await engine.close()
    assert late.is_set()
    async with asyncio.timeout(20):
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(error) for error in ended] == [EngineDead, EngineDead]


class _Listing:
    """vLLM that lists one adapter, and counts how often it is asked."""

    errored = False

    def __init__(self) -> None:
        self.asked = 0

    async def list_loras(self) -> set[int]:
        self.asked += 1
        return {1}

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        return [[1]]


async def test_an_idle_engine_is_asked_once_and_again_after_anything_was_done(
    vllm: Any, base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question keeps vLLM's worker spinning for a second: looks every two seconds took half a core for ever."""
    llm, clock = _Listing(), [0.0]
    monkeypatch.setattr(vllm.engine.time, "monotonic", lambda: clock[0])
    engine = _engine(vllm, base, llm)
    for _ in range(3):
        assert await engine.resident() == []
    assert llm.asked == 1
    await engine._rpc("anything")
    await engine.resident()
    assert llm.asked == 2
    with engine._runs():
        for _ in range(2):
            await engine.resident()
    assert llm.asked == 4
    await engine.resident()
    await engine.resident()
    assert llm.asked == 5
    clock[0] = 61.0
    await engine.resident()
    assert llm.asked == 6


async def test_what_happens_while_the_engine_is_asked_makes_the_answer_old(vllm: Any, base: Base) -> None:
    llm = _Listing()
    engine = _engine(vllm, base, llm)
    await asyncio.gather(engine.resident(), engine._rpc("anything"))
    await engine.resident()
    assert llm.asked == 2


def _engine(vllm: Any, base: Base, llm: Any, record: Path = Path()) -> Any:
    """Over a vLLM that is not there."""
    started = vllm.start.Started(llm, SimpleNamespace(alive=list), record, group=False, zero=None)
    return vllm.engine.VllmEngine(started, host_of(base), SimpleNamespace(max_resident=2), vocab_size=9)
