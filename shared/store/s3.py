"""The object store on any S3, through boto3 in threads of its own.

Put-if-absent is the server's `If-None-Match: *`. Bytes are proved by sha256, never by ETag, which is an
MD5 only for some uploads. A download that ends early or differs is begun again from the start.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial as bind
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from mint_schemas.common import FileRef

from shared.errors import Fatal
from shared.telemetry.metrics import STORE_BYTES, STORE_RETRIES

from .files import digest, partial
from .port import BytesDiffer, KeyTaken, ObjectMissing, StoredObject, StoreUnavailable

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

__all__ = ["S3Store"]

T = TypeVar("T")

_CHUNK = 1 << 20
_ATTEMPTS = 3
_MISSING = {"NoSuchKey", "404", "NotFound"}
_TAKEN = {"PreconditionFailed", "412", "ConditionalRequestConflict", "409"}
_OWNED = {"BucketAlreadyOwnedByYou", "BucketAlreadyExists"}
_REFUSED = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "403"}


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


class S3Store:
    """One bucket. Safe to use from many tasks at once."""

    def __init__(self, url: str, access_key: str, secret_key: str, bucket: str, read_timeout_s: float = 60.0) -> None:
        self._url, self._bucket = url, bucket
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="store")
        self._client: S3Client = boto3.client(
            "s3",
            endpoint_url=url,
            aws_access_key_id=access_key,
            aws_secret_access_key=secret_key,
            region_name="us-east-1",
            config=Config(
                connect_timeout=5,
                read_timeout=read_timeout_s,
                max_pool_connections=16,
                retries={"mode": "standard", "total_max_attempts": 3},
                s3={"addressing_style": "path"},
                # Not every S3 takes trailing checksums; sha256 is checked here anyway.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )

    async def ensure_bucket(self) -> None:
        """Create it and accept that it exists: just after a restart a server may not list it yet."""

        def create() -> None:
            try:
                self._client.create_bucket(Bucket=self._bucket)
            except ClientError as error:
                if _code(error) not in _OWNED:
                    raise

        await self._run(create, self._bucket)

    async def put(self, key: str, data: bytes | Path) -> FileRef:
        return await self._run(bind(self._put, key, data), key)

    async def get(self, ref: FileRef) -> bytes:
        pieces: list[bytes] = []
        await self._run(bind(self._download, ref, pieces.clear, pieces.append), ref.key)
        return b"".join(pieces)

    async def fetch(self, ref: FileRef, path: Path) -> None:
        await self._run(bind(self._fetch, ref, path), ref.key)

    async def size(self, key: str) -> int | None:
        def head() -> int | None:
            try:
                return int(self._client.head_object(Bucket=self._bucket, Key=key)["ContentLength"])
            except ClientError as error:
                if _code(error) in _MISSING:
                    return None
                raise

        return await self._run(head, key)

    async def list(self, prefix: str) -> AsyncIterator[StoredObject]:
        if not prefix:
            raise Fatal("an empty prefix would list the whole store; name one, such as 'attempts/'")
        token = ""
        while True:
            page = await self._run(bind(self._page, prefix, token), prefix)
            for entry in page.get("Contents", []):
                yield StoredObject(entry["Key"], entry["Size"], entry["LastModified"])
            token = page.get("NextContinuationToken", "")
            if not token:
                return

    async def delete(self, key: str) -> None:
        await self._run(bind(self._client.delete_object, Bucket=self._bucket, Key=key), key)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    async def _run(self, call: Callable[[], T], what: str) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except ClientError as error:
            if _code(error) in _REFUSED:
                raise Fatal(f"the object store at {self._url} refused {what}: {error}; check the S3 keys") from error
            raise StoreUnavailable(f"the object store at {self._url} failed on {what}: {error}") from error
        except BotoCoreError as error:
            raise StoreUnavailable(f"the object store at {self._url} did not answer for {what}: {error}") from error

    def _page(self, prefix: str, token: str) -> Any:
        request: Any = {"Bucket": self._bucket, "Prefix": prefix}
        if token:
            request["ContinuationToken"] = token
        return self._client.list_objects_v2(**request)

    def _put(self, key: str, data: bytes | Path) -> FileRef:
        sha256, size = digest(data)
        ref = FileRef(key=key, sha256=sha256, size=size)
        try:
            if isinstance(data, Path):
                with data.open("rb") as file:
                    self._put_body(key, file, size)
            else:
                self._put_body(key, data, size)
        except ClientError as error:
            if _code(error) not in _TAKEN:
                raise
            self._accept_same(ref)
        STORE_BYTES.labels("up").inc(size)
        return ref

    def _put_body(self, key: str, body: bytes | IO[bytes], size: int) -> None:
        self._client.put_object(Bucket=self._bucket, Key=key, Body=body, ContentLength=size, IfNoneMatch="*")

    def _accept_same(self, ref: FileRef) -> None:
        """The key is taken: the same bytes are fine, and count as written now, so that the sweeper does
        not take away an old object between this put and the row that will name it."""
        try:
            self._read(ref, lambda piece: None)
        except BytesDiffer as error:
            raise KeyTaken(f"{ref.key} exists with other bytes; a key is written once, use another one") from error
        self._client.copy_object(
            Bucket=self._bucket,
            Key=ref.key,
            CopySource={"Bucket": self._bucket, "Key": ref.key},
            MetadataDirective="REPLACE",
        )

    def _fetch(self, ref: FileRef, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = partial(path)
        try:
            with beside.open("wb") as file:

                def restart() -> None:
                    file.seek(0)
                    file.truncate()

                self._download(ref, restart, file.write)
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)

    def _download(self, ref: FileRef, restart: Callable[[], Any], take: Callable[[bytes], Any]) -> None:
        for attempt in range(1, _ATTEMPTS + 1):
            restart()
            try:
                self._read(ref, take)
            except (BytesDiffer, BotoCoreError) as error:
                if attempt == _ATTEMPTS:
                    raise
                STORE_RETRIES.labels(type(error).__name__).inc()
            else:
                STORE_BYTES.labels("down").inc(ref.size)
                return

    def _read(self, ref: FileRef, take: Callable[[bytes], Any]) -> None:
        try:
            body = self._client.get_object(Bucket=self._bucket, Key=ref.key)["Body"]
        except ClientError as error:
            if _code(error) in _MISSING:
                raise ObjectMissing(
                    f"no object {ref.key} in the store; it was never committed or has been swept"
                ) from error
            raise
        hasher, size = hashlib.sha256(), 0
        with body:
            while piece := body.read(_CHUNK):
                hasher.update(piece)
                size += len(piece)
                take(piece)
        if size != ref.size or hasher.hexdigest() != ref.sha256:
            raise BytesDiffer(
                f"{ref.key}: read {size} bytes with sha256 {hasher.hexdigest()}, "
                f"expected {ref.size} with {ref.sha256}; the download was cut or the object is damaged"
            )
