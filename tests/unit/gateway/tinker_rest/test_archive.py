"""Archives: a redirect to a link that needs no key, and behind it a PEFT directory, the same bytes each time."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from urllib.parse import parse_qs, urlsplit

import pytest
from mint_schemas.training import Lora

from services.gateway.edge import HEAVY_AT_A_TIME
from services.gateway.tinker import archive
from shared.adapters.layout import CONFIG_FILE, TENSOR_FILE
from tests.unit.gateway.tinker_rest.kit import BASE, RUN, World, unpacked

ONE = f"/api/v1/training_runs/{RUN}/checkpoints"


async def _link(world: World, checkpoint: str, key: str = "key-acme") -> str:
    async with world.http(key) as http:
        answer = await http.get(f"{ONE}/{checkpoint}/archive", headers={"accept": "application/gzip"})
    assert answer.status_code == 302, answer.text
    return str(answer.headers["location"])


async def _archive(world: World, link: str) -> bytes:
    async with world.http(key="") as http:
        answer = await http.get(link)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/gzip"
    assert int(answer.headers["content-length"]) == len(answer.content)
    return bytes(answer.content)


async def test_sampler_weights_are_the_revisions_own_files(world: World) -> None:
    await world.sampler_path("final")
    files = unpacked(await _archive(world, await _link(world, "sampler_weights/final")))
    adopted = world.adopted()
    assert sorted(files) == ["adapter_config.json", "adapter_model.safetensors", "checkpoint_complete"]
    assert files[TENSOR_FILE] == adopted.files[TENSOR_FILE]
    assert files[CONFIG_FILE] == adopted.files[CONFIG_FILE]
    assert files["checkpoint_complete"] == b""


async def test_training_weights_become_the_same_directory(world: World) -> None:
    """What a training checkpoint holds is served by the same bytes, whichever way they are asked for."""
    lora = Lora(rank=4, alpha=8.0, use_rslora=True, target_modules=("q_proj", "down_proj"))
    await world.sampler_path("final", seed=3, lora=lora)
    await world.training_path("final", seed=3, lora=lora)
    served = unpacked(await _archive(world, await _link(world, "sampler_weights/final")))
    trained = unpacked(await _archive(world, await _link(world, "weights/final")))
    assert served == trained
    config = json.loads(trained[CONFIG_FILE])
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (4, 8, True)
    assert (config["base_model_name_or_path"], config["peft_type"]) == (BASE, "LORA")


async def test_equal_checkpoints_have_equal_archives(world: World) -> None:
    await world.sampler_path("one")
    await world.training_path("one")
    archives = [await _archive(world, await _link(world, f"{kind}/one")) for kind in ("weights", "sampler_weights")]
    assert archives[0] == archives[1]


async def test_the_link_names_its_end_as_clients_parse_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.sampler_path("a b")
    monkeypatch.setattr(archive.time, "time", lambda: 1_700_000_000.0)
    async with world.http() as http:
        answer = await http.get(f"{ONE}/sampler_weights/a b/archive")
    expires = datetime.strptime(answer.headers["expires"], "%a, %d %b %Y %H:%M:%S GMT")  # noqa: DTZ007
    assert expires.isoformat() == "2023-11-14T22:28:20"
    link = urlsplit(answer.headers["location"])
    assert (link.scheme, link.netloc) == ("http", "gateway")
    assert link.path.endswith("/sampler_weights/a%20b.tar.gz")
    assert parse_qs(link.query)["expires"] == ["1700000900"]
    assert len(await _archive(world, answer.headers["location"])) > 0


async def test_a_link_that_was_changed_or_is_over_opens_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.sampler_path("a")
    await world.sampler_path("b")
    link = await _link(world, "sampler_weights/a")
    later = str(int(parse_qs(urlsplit(link).query)["expires"][0]) + 1)
    changed = [
        link.replace("/a.tar.gz", "/b.tar.gz"),
        link.replace("/sampler_weights/", "/weights/"),
        link[: link.index("expires=")] + f"expires={later}&" + link[link.index("signature=") :],
        link.replace("tenant=acme", "tenant="),
        link[:-1] + ("0" if link[-1] != "0" else "1"),
        link[: link.index("signature=")] + "signature=%C3%A4",
    ]
    async with world.http(key="") as http:
        answers = [await http.get(one) for one in changed]
        unsigned = await http.get(link.partition("?")[0])
        monkeypatch.setattr(archive.time, "time", lambda: float(later))
        over = await http.get(link)
    assert [answer.status_code for answer in answers] == [403] * 6
    assert {answer.json()["code"] for answer in answers} == {"bad_link"}
    assert (over.status_code, over.json()["code"]) == (403, "link_expired")
    assert unsigned.status_code == 422


async def test_archives_are_for_the_owner_and_of_what_is_published(world: World) -> None:
    path = await world.sampler_path("a")
    async with world.http("key-beta") as http:
        private = await http.get(f"{ONE}/sampler_weights/a/archive")
    async with world.http(key="") as http:
        nobody = await http.get(f"{ONE}/sampler_weights/a/archive")
    assert [private.status_code, nobody.status_code] == [404, 401]
    world.operations.path_views[path.path] = path.model_copy(update={"published": True})
    assert await _archive(world, await _link(world, "sampler_weights/a", "key-beta"))


async def test_another_tenants_link_ends_with_what_was_published(world: World) -> None:
    path = await world.sampler_path("a", published=True)
    theirs, own = await _link(world, "sampler_weights/a", "key-beta"), await _link(world, "sampler_weights/a")
    anyones = await _link(world, "sampler_weights/a", "tml-dev")
    assert await _archive(world, theirs)
    world.operations.path_views[path.path] = path.model_copy(update={"published": False})
    async with world.http(key="") as http:
        assert (await http.get(theirs)).status_code == 404
    assert await _archive(world, own) == await _archive(world, anyones)


async def test_archives_are_packed_a_few_at_a_time(world: World) -> None:
    await world.sampler_path("a")
    link = await _link(world, "sampler_weights/a")
    for _ in range(HEAVY_AT_A_TIME):
        await world.gateway.heavy.acquire()
    one = asyncio.create_task(_archive(world, link))
    # Another archive's link is answered meanwhile, and so is whoever reads.
    assert await _link(world, "sampler_weights/a")
    await asyncio.sleep(0)
    assert not one.done()
    world.gateway.heavy.release()
    assert await one


async def test_a_checkpoint_deleted_meanwhile_or_with_a_lost_file_is_no_half_archive(world: World) -> None:
    path = await world.sampler_path("a")
    link = await _link(world, "sampler_weights/a")
    manifest = world.revisions.manifests[path.revision or ""]
    await world.store.delete(manifest.files[TENSOR_FILE].key)
    async with world.http(key="") as http:
        lost = await http.get(link)
        del world.operations.path_views[path.path]
        gone = await http.get(link)
    assert (lost.status_code, gone.status_code) == (500, 404)
    assert "content-disposition" not in lost.headers
