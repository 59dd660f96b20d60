"""Bodies compressed with Zstandard, both ways, never beyond a bound.

In: bytes. Out: bytes. Invariant: no more than the bound (and one block) is ever in memory, whatever a compressed body
claims; what is cut or no Zstandard at all is refused.
"""

from __future__ import annotations

import pyarrow as pa

from services.gateway.tinker.errors import invalid
from shared.errors import Refused

__all__ = ["compress", "decompress"]

_BLOCK = 1 << 20


def decompress(data: bytes, bound: int) -> bytes:
    """Raises Refused: 413 for more than `bound` bytes, 422 for what cannot be decompressed."""
    parts: list[bytes] = []
    size = 0
    try:
        with pa.CompressedInputStream(pa.BufferReader(data), "zstd") as stream:
            while part := stream.read(_BLOCK):
                size += len(part)
                if size > bound:
                    raise Refused(f"the body has more than {bound} bytes when decompressed", "too_large", status=413)
                parts.append(part)
    except (OSError, ValueError) as error:
        raise invalid(f"the body is said to be zstd and cannot be decompressed: {error}") from error
    return b"".join(parts)


def compress(data: bytes) -> bytes:
    packed: bytes = pa.compress(data, codec="zstd", asbytes=True)
    return packed
