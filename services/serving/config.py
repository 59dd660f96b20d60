"""Settings of a serving replica: `MINT_SERVING_<FIELD>` beside the common `MINT_<FIELD>`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from services.serving.eviction import EvictionName
from services.serving.limits import NamedBounds
from shared.settings import CommonSettings


class ServingSettings(CommonSettings):
    """`serving_base` is the public name of the one base model that this replica serves.

    `serving_replica` names the replica and its directory on disk, and stays the same over restarts;
    empty = `<base token>-0`. Two replicas that share a data directory need different names."""

    serving_base: str
    serving_replica: Annotated[str, Field(pattern=r"^[a-z0-9-]{0,63}$")] = ""
    serving_engine: Literal["auto", "vllm", "transformers", "fake"] = "auto"
    serving_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    serving_slots: Annotated[int, Field(ge=1, description="adapters in one running batch")] = 4
    serving_max_resident: Annotated[int, Field(ge=1, description="adapters in the engine's memory")] = 16
    serving_max_rank: Annotated[int, Field(ge=1)] = 32
    serving_kv_bytes: Annotated[int, Field(ge=1)] = 2**30
    serving_max_context: Annotated[int, Field(ge=1, description="tokens of prompt and completion")] = 2048
    serving_threads: Annotated[int, Field(ge=1)] = 2
    serving_memory_bytes: Annotated[int, Field(ge=1, description="adapter files in the engine's memory")] = 4 * 2**30
    serving_eviction: Annotated[EvictionName, Field(description="what leaves the memory first")] = "frequency"
    serving_queue_depth: Annotated[int, Field(ge=1, description="cold loads queued and under way")] = 64
    serving_fetches: Annotated[int, Field(ge=1, description="cold loads fetched to disk at once")] = 4
    serving_activations: Annotated[int, Field(ge=1, description="cold loads brought into the engine at once")] = 1
    serving_activation_share: Annotated[
        float, Field(gt=0, le=1, description="share of the time for activations while requests run; 1 = unpaced")
    ] = 0.5
    serving_load_attempts: Annotated[int, Field(ge=1)] = 3
    serving_load_wait_s: Annotated[float, Field(gt=0, description="how long a request waits for its load")] = 120.0
    serving_disk_bytes: Annotated[int, Field(ge=1, description="adapter files kept on disk")] = 20 * 2**30
    serving_max_running: Annotated[int, Field(ge=1, description="sequences that have a turn in the engine")] = 128
    serving_max_waiting: Annotated[int, Field(ge=1, description="requests that may wait for a turn")] = 1024
    serving_wait_s: Annotated[float, Field(gt=0, description="how long a request waits for its turn")] = 120.0
    serving_tenant_concurrency: Annotated[int, Field(ge=0, description="requests here at once; 0 = any")] = 512
    serving_policy_concurrency: Annotated[int, Field(ge=0, description="requests here at once; 0 = any")] = 256
    serving_tenant_rate: Annotated[float, Field(ge=0, description="requests per second; 0 = any")] = 0.0
    serving_policy_rate: Annotated[float, Field(ge=0, description="requests per second; 0 = any")] = 0.0
    serving_limits: NamedBounds = Field({}, description='JSON: {"<tenant>" or "<tenant>/<policy>": bounds}')
    serving_url: str = Field("", description="address that callers reach; empty = http://<host>:<port>")
