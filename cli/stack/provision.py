"""What the services expect to find: the bucket in the object store; streams, consumers and key-value
buckets on the bus. Idempotent, so that it runs at every `mint up`."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from cli.errors import CliError
from cli.stack.file import Stack
from cli.stack.launch import run_step
from cli.stack.services import common_env, module
from cli.stack.stores import S3_ACCESS_KEY, S3_BUCKET, S3_SECRET_KEY
from shared.errors import MintError, Retryable
from shared.store.s3 import S3Store


def provision(data: Path, stack: Stack, deadline: float) -> None:
    """Raises CliError naming what could not be set up."""
    try:
        asyncio.run(_bucket(stack.url("s3"), deadline))
    except MintError as error:
        raise CliError(f"the bucket {S3_BUCKET} could not be created: {error}") from error
    run_step(module("shared.bus.provision"), common_env(data, stack.ports), data, "provision")


async def _bucket(url: str, deadline: float) -> None:
    """The S3 door opens a little before the filer behind it, so a failure is tried again."""
    store = S3Store(url, S3_ACCESS_KEY, S3_SECRET_KEY, S3_BUCKET, read_timeout_s=5.0)
    try:
        while True:
            try:
                return await store.ensure_bucket()
            except Retryable:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.3)
    finally:
        store.close()
