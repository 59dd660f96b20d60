"""The table in the words of the NATS client: the same configs are created, updated and compared."""

from __future__ import annotations

from typing import Any

from nats.js import api

from .table import BucketSpec, Durable, Stream

__all__ = ["bucket_config", "consumer_config", "stream_config"]


def stream_config(stream: Stream) -> Any:
    return api.StreamConfig(
        name=stream.name,
        subjects=list(stream.subjects),
        retention=api.RetentionPolicy(stream.retention),
        discard=api.DiscardPolicy(stream.discard),
        max_age=stream.max_age_s,
        max_msgs=stream.max_msgs,
        duplicate_window=stream.duplicate_window_s,
        storage=api.StorageType.FILE,
        num_replicas=1,
    )


def consumer_config(durable: Durable) -> Any:
    single = len(durable.filters) == 1
    return api.ConsumerConfig(
        name=durable.name,
        durable_name=durable.name,
        filter_subject=durable.filters[0] if single else None,
        filter_subjects=None if single else list(durable.filters),
        deliver_policy=api.DeliverPolicy.ALL,
        ack_policy=api.AckPolicy.EXPLICIT,
        ack_wait=durable.ack_wait_s,
        max_deliver=durable.max_deliver,
        max_ack_pending=durable.max_ack_pending,
    )


def bucket_config(bucket: BucketSpec) -> Any:
    """A bucket is a stream `KV_<name>`; a TTL is its max age."""
    return api.StreamConfig(
        name=f"KV_{bucket.name}",
        subjects=[f"$KV.{bucket.name}.>"],
        retention=api.RetentionPolicy.LIMITS,
        discard=api.DiscardPolicy.NEW,
        max_age=bucket.ttl_s,
        max_msgs=-1,
        max_msgs_per_subject=1,
        duplicate_window=min(120.0, bucket.ttl_s) or 120.0,
        storage=api.StorageType.FILE,
        num_replicas=1,
        allow_rollup_hdrs=True,
        deny_delete=True,
        allow_direct=True,
    )
