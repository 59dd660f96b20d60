"""Sampling for one HTTP request: one sample request a choice, side by side, as one flow of pieces.

In: an `Ask` (target, prompts, settings). Out: the proof of what runs, then (choice, piece) pairs.
Invariants: what served is what was resolved, else the request fails; closing ends every stream; a choice
that met its stop string ends its stream at once; choice i of a prompt draws with a seed derived from
(request seed, i), so that the same request gives the same choices whatever n is. A replica counts each choice
against the caller's limits: those it turns away ask again while others of the request go on, so that a request of
more choices than a limit lets in at once takes longer, and succeeds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from services.gateway.openai.calls import ForcedCall, ToolText
from services.gateway.openai.choice import ChoiceText, Piece, prompt_piece, token_by_token
from services.gateway.openai.tools import ToolUse
from services.gateway.resolution import Target
from shared.engine.port import SampleChunk, SampleRequest, SamplingSettings
from shared.errors import Busy, Retryable
from shared.rl.seeds import derive_seed
from shared.sampling.port import INTERACTIVE, Sampler, SampleStream, Served
from shared.sampling.proved import require_served
from shared.text.codec import TextCodec

__all__ = ["Ask", "Generation"]

QUEUE_PIECES = 256
WAIT_S = 120.0
"""How long a choice asks again for a request that says nothing of its wait."""
RETRY_S = 1.0
"""When it asks again where a replica does not say."""


@dataclass(frozen=True)
class Ask:
    """`settings.max_tokens` 0 asks for the echoed prompt alone. Choice p·n + i is the i-th of prompt p.
    `tenant` is who asks, and `wait_s` how long at most for the first token."""

    request_id: str
    target: Target
    prompts: tuple[tuple[int, ...], ...]
    settings: SamplingSettings
    n: int
    seed: int | None
    stops: tuple[str, ...]
    echo: bool = False
    tools: ToolUse | None = None
    priority: int = INTERACTIVE
    tenant: str = ""
    wait_s: float | None = None

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n

    def request(self, choice: int) -> SampleRequest:
        prompt, index = divmod(choice, self.n)
        return SampleRequest(
            request_id=f"{self.request_id}-{choice}",
            prompt=self.prompts[prompt],
            # An engine makes at least one token; the echo path drops it.
            settings=replace(self.settings, max_tokens=max(1, self.settings.max_tokens)),
            revision=self.target.revision,
            seed=None if self.seed is None else derive_seed("choice", self.seed, index),
            priority=self.priority,
            tenant=self.tenant,
            wait_s=self.wait_s,
        )


class Generation:
    """`served` is set by `open`; close it, whatever happened."""

    served: Served

    def __init__(self, sampler: Sampler, codec: TextCodec, ask: Ask, parallel: int) -> None:
        self.ask, self._sampler, self._codec = ask, sampler, codec
        self._slots, self._at_once = asyncio.Semaphore(parallel), min(ask.choices, parallel)
        self._turned_away: set[int] = set()
        self._queue: asyncio.Queue[tuple[int, Piece] | Exception] = asyncio.Queue(QUEUE_PIECES)
        self._first: asyncio.Future[Served] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._echoes: dict[int, asyncio.Task[Piece]] = {}
        self._texts: list[ChoiceText] = []
        self._calls: list[ToolText | ForcedCall] = []

    async def open(self) -> None:
        """Returns once the first stream is served. Raises Refused, Retryable, and Fatal for a failed proof."""
        self._texts = [self._text(choice) for choice in range(self.ask.choices)]
        if self.ask.tools is not None:
            self._calls = [_calls(self.ask.tools) for _ in range(self.ask.choices)]
        self._tasks = [asyncio.create_task(self._run(choice)) for choice in range(self.ask.choices)]
        self.served = await self._first

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Until every choice has finished. Raises what a stream raised."""
        open_choices = self.ask.choices
        while open_choices:
            item = await self._queue.get()
            if isinstance(item, Exception):
                raise item
            yield item
            open_choices -= item[1].finish_reason is not None

    async def close(self) -> None:
        """Ends what still runs, by leaving its stream."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._echoes.values(), return_exceptions=True)
        if self._first.done() and not self._first.cancelled():
            self._first.exception()

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.ask.prompts))

    @property
    def completion_tokens(self) -> int:
        return sum(text.generated for text in self._texts)

    async def _run(self, choice: int) -> None:
        try:
            async with self._slots, AsyncExitStack() as stack:
                stream = await self._entered(choice, stack)
                asked = self.ask.target
                require_served(stream.served, asked.base, asked.revision, asked.adapter_sha256)
                if not self._first.done():
                    self._first.set_result(stream.served)
                await self._pass_on(choice, stream.chunks)
        except Exception as error:
            if self._first.done():
                await self._queue.put(error)
            else:
                self._first.set_exception(error)

    async def _entered(self, choice: int, stack: AsyncExitStack) -> SampleStream:
        """Raises Busy for a limit when no other choice is served or asks, or when the wait would be over."""
        now, request = asyncio.get_running_loop().time, self.ask.request(choice)
        until = now() + (WAIT_S if request.wait_s is None else request.wait_s)
        while True:
            try:
                stream = self._sampler.stream(self.ask.target.base.name, request)
                return await stack.enter_async_context(stream)
            except Busy as busy:
                delay_s = RETRY_S if busy.delay_s is None else busy.delay_s
                self._turned_away.add(choice)
                alone = len(self._turned_away) >= self._at_once and not self._first.done()
                if busy.status != 429 or alone or now() + delay_s >= until:
                    raise
            await asyncio.sleep(delay_s)
            self._turned_away.discard(choice)
            if request.wait_s is not None:
                request = replace(request, wait_s=max(until - now(), 0.0))

    async def _pass_on(self, choice: int, chunks: AsyncIterator[SampleChunk]) -> None:
        text = self._texts[choice]
        begun = False
        async for chunk in chunks:
            if self.ask.echo and not begun:
                text = await self._echo(choice, chunk)
                if self.ask.settings.max_tokens == 0:
                    await self._queue.put((choice, Piece("", (), "length")))
                    return
            begun = True
            for part in token_by_token(chunk) if self._calls else [chunk]:
                piece = text.push(part)
                if piece.finish_reason == "abort":
                    raise Retryable("the engine ended the generation before it was complete; try again")
                if self._calls:
                    piece = self._calls[choice].push(piece)
                if piece:
                    await self._queue.put((choice, piece))
                if piece.finish_reason is not None:
                    return
        raise Retryable("the replica ended the generation without a finish reason; try again")

    async def _echo(self, choice: int, first: SampleChunk) -> ChoiceText:
        # Of one prompt all choices have the same piece, which takes a while to make.
        number, logprobs = choice // self.ask.n, self.ask.settings.logprobs is not None
        if number not in self._echoes:
            made = asyncio.to_thread(prompt_piece, self._codec, self.ask.prompts[number], first, logprobs)
            self._echoes[number] = asyncio.create_task(made)
        piece = await asyncio.shield(self._echoes[number])
        self._texts[choice] = self._text(choice, len(piece.text))
        await self._queue.put((choice, piece))
        return self._texts[choice]

    def _text(self, choice: int, offset: int = 0) -> ChoiceText:
        return ChoiceText(self._codec, self.ask.stops, self.ask.prompts[choice // self.ask.n], offset)


def _calls(tools: ToolUse) -> ToolText | ForcedCall:
    return ForcedCall(tools.names) if tools.forced is not None else ToolText(tools.names, single=not tools.parallel)
