"""REST: runs, checkpoints and sessions of a tenant that has nothing else, and what another tenant sees of them."""

from __future__ import annotations

import os
import time
import urllib.request

import desk
from desk import data, failure, forward, made, rest, service, step, trainer_of

OTHER = os.environ["CLIENT_OTHER_KEY"]
PATIENCE_S = 60.0


def checkpoint(found):
    return {
        "id": found.checkpoint_id,
        "type": found.checkpoint_type,
        "path": found.tinker_path,
        "size": found.size_bytes,
        "public": found.public,
        "expires": found.expires_at is not None,
    }


def pages(api):
    """The tenant's three runs, two at a time, and its checkpoints one at a time."""
    runs = [api.list_training_runs(limit=2, offset=at).result() for at in (0, 2)]
    kept = [api.list_user_checkpoints(limit=1, offset=at).result() for at in (0, 1, 2)]
    return {
        "runs": [[run.training_run_id for run in page.training_runs] for page in runs],
        "totals": [page.cursor.total_count for page in runs],
        "checkpoints": [[it.tinker_path for it in page.checkpoints] for page in kept],
        "checkpoint_totals": [page.cursor.total_count for page in kept],
    }


def described(api, trainer, state, sampler):
    run = api.get_training_run(trainer.model_id).result()
    by_path = api.get_training_run_by_tinker_path(state).result()
    info = {path: api.get_weights_info_by_tinker_path(path).result() for path in (state, sampler)}
    listed = api.list_checkpoints(trainer.model_id).result().checkpoints
    return {
        "run": {
            "id": run.training_run_id,
            "base": run.base_model,
            "owner": run.model_owner,
            "rank": run.lora_rank,
            "metadata": run.user_metadata,
            "last": run.last_checkpoint.tinker_path,
            "last_sampler": run.last_sampler_checkpoint.tinker_path,
        },
        "same": by_path.training_run_id,
        "info": {
            path: [it.base_model, it.is_lora, it.lora_rank, it.train_attn, it.train_mlp, it.train_unembed]
            for path, it in info.items()
        },
        "checkpoints": [checkpoint(it) for it in listed],
    }


def sessions(client, api, trainer):
    """The session that holds the run, among those of the tenant."""
    listed = api.list_sessions().result().sessions
    session = trainer.model_id.partition(":train:")[0]
    found = api.get_session(session).result()
    sampler = made(client.create_sampling_client(base_model=desk.BASE))
    again = api.get_session(session).result()
    named = api.get_sampler(again.sampler_ids[-1]).result()
    return {
        "session": session,
        "listed": listed,
        "runs": list(found.training_run_ids),
        "samplers": [len(found.sampler_ids), len(again.sampler_ids)],
        "sampler": [named.sampler_id, named.base_model],
        "base": sampler.get_base_model(),
    }


def others_see(other, path, sampler):
    """What another tenant gets of a path: its description, its weights, its samples."""
    api = rest(other, OTHER)
    seen = failure(lambda: api.get_weights_info_by_tinker_path(path).result())
    trained = None if seen else forward(made(other.create_training_client_from_state(path)))
    sampled = failure(
        lambda: (
            made(other.create_sampling_client(model_path=sampler)).compute_logprobs(desk.prompt(desk.ROWS[0])).result()
        )
    )
    return {"seen": seen, "trained": trained, "sampled": sampled}


def published(api, state, sampler):
    other = service(OTHER)
    before = others_see(other, state, sampler)
    for path in (state, sampler):
        api.publish_checkpoint_from_tinker_path(path).result()
    during = others_see(other, state, sampler)
    flags = [it.public for it in api.list_user_checkpoints().result().checkpoints]
    taken = failure(lambda: rest(other, OTHER).delete_checkpoint_from_tinker_path(state).result())
    for path in (state, sampler):
        api.unpublish_checkpoint_from_tinker_path(path).result()
    foreign = rest(other, OTHER)
    return {
        "before": before,
        "during": during,
        "flags": flags,
        "taken": taken,
        "after": others_see(other, state, sampler),
        "runs": [run.training_run_id for run in foreign.list_training_runs().result().training_runs],
        "run": failure(lambda: foreign.get_training_run(state.split("/")[2]).result()),
    }


def lifetimes(api, trainer):
    """An expiry set and taken away, one that passes, and a deletion."""
    path = trainer.save_state("timed").result().path

    def expires():
        listed = api.list_checkpoints(trainer.model_id).result().checkpoints
        return {it.checkpoint_id: it.expires_at is not None for it in listed}.get("weights/timed")

    seen = [expires()]
    for seconds in (3600, None):
        api.set_checkpoint_ttl_from_tinker_path(path, seconds).result()
        seen.append(expires())
    brief = trainer.save_state("brief", ttl_seconds=1).result().path
    until = time.monotonic() + PATIENCE_S
    while (gone := failure(lambda: api.get_weights_info_by_tinker_path(brief).result())) is None:
        assert time.monotonic() < until, f"{brief} does not expire"
        time.sleep(0.2)
    api.delete_checkpoint(trainer.model_id, "weights/timed").result()
    return {
        "expires": seen,
        "brief": gone,
        "deleted": failure(lambda: api.get_weights_info_by_tinker_path(path).result()),
        "twice": failure(lambda: api.delete_checkpoint_from_tinker_path(path).result()),
        "left": [it.checkpoint_id for it in api.list_checkpoints(trainer.model_id).result().checkpoints],
    }


def archive(api, path, place):
    """Download a checkpoint; 0.38 has no method for it, and people ask by HTTP."""
    if not desk.LATER:
        answer = api.get_checkpoint_archive_url_from_tinker_path(path).result()
        request = urllib.request.Request(answer.url)
    else:
        run, kind, name = path.removeprefix("tinker://").split("/")
        url = f"{os.environ['TINKER_BASE_URL']}/api/v1/training_runs/{run}/checkpoints/{kind}/{name}/archive"
        request = urllib.request.Request(url, headers={"x-api-key": os.environ["TINKER_API_KEY"]})
    with urllib.request.urlopen(request) as response, open(place, "wb") as file:
        file.write(response.read())
        return {"type": response.headers["content-type"], "place": os.path.abspath(place)}


def copied(client, api, state, sampler):
    """0.38 alone copies, into a project that it must name: by the call, or by the environment."""
    if not desk.LATER:
        return None
    paths = [api.copy_weights(path, "a-project").result() for path in (state, sampler)]
    os.environ["TINKER_PROJECT_ID"] = "a-project"
    paths.append(client.copy_weights(state).result())
    infos = [api.get_weights_info_by_tinker_path(path).result() for path in paths]
    return {
        "paths": paths,
        "ranks": [info.lora_rank for info in infos],
        "forward": [forward(made(client.create_training_client_from_state(path))) for path in (paths[0], paths[2])],
    }


def main():
    client = service()
    trainer = trainer_of(client, user_metadata={"purpose": "rest"})
    trainer_of(client, rank=4)
    trainer_of(client, rank=4, train_mlp=False)
    api = rest(client)
    step(trainer)
    step(trainer)
    state = trainer.save_state("kept").result().path
    sampler = trainer.save_weights_for_sampler("sampled").result().path
    models = client.get_server_capabilities().supported_models
    trainer.forward(data(), "cross_entropy").result()
    desk.tell(
        {
            "models": [[model.model_name, model.max_context_length] for model in models],
            "model_id": trainer.model_id,
            "rows": desk.ROWS,
            "trained": forward(trainer),
            "state": state,
            "sampler": sampler,
            "pages": pages(api),
            "described": described(api, trainer, state, sampler),
            "sessions": sessions(client, api, trainer),
            "published": published(api, state, sampler),
            "archives": {path: archive(api, path, f"{n}.tar.gz") for n, path in enumerate((state, sampler))},
            "lifetimes": lifetimes(api, trainer),
            "copied": copied(client, api, state, sampler),
            "unknown_run": failure(lambda: api.get_training_run("nobody:train:0").result()),
        }
    )


main()
