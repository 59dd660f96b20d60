"""How each public method of the clients is called here, and what its answer must be to count as working.

In: a `Scene`, which has something to call them on. Out: `CALLS` by method, the same for both generations, `_async`
forms too; `VARIANTS`, calls with arguments that are worth a line of their own. A method without an entry is unknown
to the probe, which then fails.
"""

from __future__ import annotations

import datetime
import functools
import importlib
import typing
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import desk
from desk import BASE, made, prompt, sdk, types

ROW = desk.ROWS[3]


@dataclass(frozen=True)
class Ask:
    """`on` None: the scene's own object of the method's class. `check`: of the answer; whatever it raises is told.
    `by_client`: the client itself may refuse this, without asking anyone. `inside`: it is a coroutine that works on
    the loop of the client's own thread only."""

    args: tuple[Any, ...] = ()
    more: dict[str, Any] = field(default_factory=dict)
    on: Any = None
    check: Callable[[Any], object] = lambda answer: True
    by_client: bool = False
    inside: bool = False


def ask(*args: Any, on: Any = None, check: Callable[[Any], object] = lambda _: True, **more: Any) -> Ask:
    return Ask(args, more, on, check)


class Scene:
    """One client, with a trained model whose state and sampler weights are saved, made when first needed."""

    def __init__(self) -> None:
        self.client = desk.service()
        self.count = 0

    @functools.cached_property
    def api(self) -> Any:
        return desk.rest(self.client)

    @functools.cached_property
    def admin(self) -> Any:
        return sdk.AdminClient()

    @functools.cached_property
    def sampler(self) -> Any:
        return made(self.client.create_sampling_client(base_model=BASE))

    @functools.cached_property
    def keeper(self) -> Any:
        trainer = self.trainer()
        desk.step(trainer)
        return trainer

    @functools.cached_property
    def state(self) -> str:
        return self.keeper.save_state("kept").result().path

    @functools.cached_property
    def weights(self) -> str:
        return self.keeper.save_weights_for_sampler("sampled").result().path

    @property
    def session(self) -> str:
        return self.keeper.model_id.partition(":train:")[0]

    def trainer(self) -> Any:
        """A new one, so that no call changes what another one finds."""
        return desk.trainer_of(self.client)

    def added(self) -> Any:
        """One with gradients."""
        trainer = self.trainer()
        trainer.forward_backward(desk.data(), "cross_entropy").result()
        return trainer

    def name(self) -> str:
        self.count += 1
        return f"name-{self.count}"

    def spare(self) -> str:
        """A path to change or delete."""
        return self.keeper.save_state(self.name()).result().path

    def object(self, name: str) -> Any:
        match name:
            case "ServiceClient":
                return self.client
            case "TrainingClient":
                return self.trainer()
            case "SamplingClient":
                return self.sampler
            case "RestClient":
                return self.api
            case "AdminClient":
                return self.admin
        raise ValueError(f"nobody knows how to get a {name}")


def custom(data: Any, logprobs: Any) -> Any:
    loss = -sum(values.sum() for values in logprobs)
    return loss, {"mine:sum": float(loss)}


def per_datum(logprobs: Any, weights: Any) -> Any:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/mine:sum": loss}


def weighted(rows: Any = desk.ROWS) -> Any:
    return [desk.datum(row, weights=[1.0] * (len(row) - 1)) for row in rows]


def rewarded(**more: float) -> Any:
    """Rows as sampling losses want them. `more`: further inputs, each the same everywhere."""
    return [
        desk.datum(
            row,
            logprobs=[-9.0] * (len(row) - 1),
            advantages=[0.5] * (len(row) - 1),
            **{name: [value] * (len(row) - 1) for name, value in more.items()},
        )
        for row in desk.ROWS
    ]


def trained(answer: Any) -> bool:
    return len(desk.logprobs(answer)) == len(desk.ROWS) and "loss:sum" in answer.metrics


def drawn(answer: Any) -> bool:
    return len(answer.sequences) == 2 and all(1 <= len(it.tokens) <= 4 for it in answer.sequences)


def samples(sampler: Any) -> bool:
    """It is a client that can be used."""
    return drawn(sampler.sample(prompt(ROW), 2, types.SamplingParams(max_tokens=4)).result())


def downloads(answer: Any) -> bool:
    with urllib.request.urlopen(answer.url) as response:
        return response.read(2) == b"\x1f\x8b"


def queue_active() -> Any:
    return importlib.import_module("tinker.lib.api_future_impl").QueueState.ACTIVE


def kl_data() -> Any:
    mint = importlib.import_module("mint").mint
    return [
        mint.ReverseKLDatum(
            student_input=prompt(row[:-1]),
            reference_input=prompt(row[:-1]),
            target_tokens=types.TensorData(data=row[1:], dtype="int64", shape=[len(row) - 1]),
            weights=types.TensorData(data=[1.0] * (len(row) - 1), dtype="float32", shape=[len(row) - 1]),
        )
        for row in desk.ROWS
    ]


def drawing(**more: Any) -> Ask:
    return ask(prompt(ROW), 2, types.SamplingParams(max_tokens=4), check=drawn, **more)


def hour(ago: int) -> datetime.datetime:
    now = datetime.datetime.now(datetime.UTC).replace(minute=0, second=0, microsecond=0)
    return now - datetime.timedelta(hours=ago)


NOTHING = ask()

CALLS: dict[str, Callable[[Scene], Ask]] = {
    "ServiceClient.close": lambda s: ask("success", on=opened(desk.service())),
    "ServiceClient.copy_weights": lambda s: ask(s.state, on=desk.service(project_id="archive")),
    "ServiceClient.create_custom_loss": lambda s: ask(per_datum, {"logprobs": 1, "weights": 1}),
    "ServiceClient.create_lora_training_client": lambda s: ask(BASE, rank=4, check=lambda it: it.model_id),
    "ServiceClient.create_rest_client": lambda s: NOTHING,
    "ServiceClient.create_sampling_client": lambda s: ask(model_path=s.weights, check=samples),
    "ServiceClient.create_training_client_from_state": lambda s: ask(s.state, check=desk.forward),
    "ServiceClient.create_training_client_from_state_with_optimizer": lambda s: ask(s.state, check=desk.forward),
    "ServiceClient.get_console_url": lambda s: NOTHING,
    "ServiceClient.get_server_capabilities": lambda s: ask(check=lambda it: it.supported_models),
    "ServiceClient.get_telemetry": lambda s: NOTHING,
    "ServiceClient.holder": lambda s: NOTHING,
    "TrainingClient.create_sampling_client": lambda s: ask(s.weights, check=samples),
    "TrainingClient.forward": lambda s: ask(desk.data(), "cross_entropy", check=trained),
    "TrainingClient.forward_backward": lambda s: ask(desk.data(), "cross_entropy", check=trained),
    "TrainingClient.forward_backward_custom": lambda s: ask(
        desk.data(), custom, check=lambda it: trained(it) and "mine:sum" in it.metrics
    ),
    "TrainingClient.get_console_url": lambda s: NOTHING,
    "TrainingClient.get_info": lambda s: ask(check=lambda it: it.is_lora and it.model_data.model_name == BASE),
    "TrainingClient.get_telemetry": lambda s: NOTHING,
    "TrainingClient.get_tokenizer": lambda s: ask(check=lambda it: it.encode("word")),
    "TrainingClient.load_state": lambda s: ask(s.state),
    "TrainingClient.load_state_with_optimizer": lambda s: ask(s.state),
    "TrainingClient.optim_step": lambda s: ask(types.AdamParams(learning_rate=1e-3), on=s.added()),
    "TrainingClient.save_state": lambda s: ask("a-state", check=lambda it: it.path.endswith("/weights/a-state")),
    "TrainingClient.save_weights_and_get_sampling_client": lambda s: ask(check=samples),
    "TrainingClient.save_weights_external": lambda s: ask("outside"),
    "TrainingClient.save_weights_for_sampler": lambda s: ask(
        "a-sampler", check=lambda it: it.path.endswith("/sampler_weights/a-sampler")
    ),
    "SamplingClient.compute_logprobs": lambda s: ask(
        prompt(ROW), check=lambda it: len(it) == len(ROW) and it[0] is None and all(value < 0 for value in it[1:])
    ),
    "SamplingClient.create": lambda s: ask(s.client.holder, model_path=s.weights, check=samples),
    "SamplingClient.from_sampler_handle": lambda s: ask(s.sampler.get_sampler_handle(), check=samples),
    "SamplingClient.get_base_model": lambda s: ask(check=lambda it: it == BASE),
    "SamplingClient.get_sampler_handle": lambda s: NOTHING,
    "SamplingClient.get_telemetry": lambda s: NOTHING,
    "SamplingClient.get_tokenizer": lambda s: ask(check=lambda it: it.encode("word")),
    "SamplingClient.on_queue_state_change": lambda s: ask(queue_active(), None),
    "SamplingClient.sample": lambda s: drawing(),
    "RestClient.assign_session_project": lambda s: ask(s.session, "a-project"),
    "RestClient.copy_weights": lambda s: ask(s.state, "archive"),
    "RestClient.delete_checkpoint": lambda s: ask(*s.spare().removeprefix("tinker://").split("/", 1)),
    "RestClient.delete_checkpoint_from_tinker_path": lambda s: ask(s.spare()),
    "RestClient.export_session_trace": lambda s: ask(s.session),
    "RestClient.get_audit_log": lambda s: NOTHING,
    "RestClient.get_audit_log_async": lambda s: Ask(inside=True),
    "RestClient.get_billing_usage": lambda s: ask(hour(2), hour(1)),
    "RestClient.get_checkpoint_archive_url": lambda s: ask(
        *s.state.removeprefix("tinker://").split("/", 1), check=downloads
    ),
    "RestClient.get_checkpoint_archive_url_from_tinker_path": lambda s: ask(s.weights, check=downloads),
    "RestClient.get_current_checkpoint_storage_usage": lambda s: NOTHING,
    "RestClient.get_external_weights_urls": lambda s: ask(f"tinker://{s.keeper.model_id}/external_weights/outside"),
    "RestClient.get_sampler": lambda s: ask(
        made(s.client.create_sampling_client(model_path=s.weights))._sampling_session_id,
        check=lambda it: it.base_model == BASE and it.model_path == s.weights,
    ),
    "RestClient.get_server_capabilities": lambda s: ask(check=lambda it: it.supported_models),
    "RestClient.get_session": lambda s: ask(s.session, check=lambda it: s.keeper.model_id in it.training_run_ids),
    "RestClient.get_telemetry": lambda s: NOTHING,
    "RestClient.get_training_run": lambda s: ask(s.keeper.model_id, check=lambda it: it.base_model == BASE),
    "RestClient.get_training_run_by_tinker_path": lambda s: ask(s.state, check=lambda it: it.base_model == BASE),
    "RestClient.get_weights_info_by_tinker_path": lambda s: ask(s.state, check=lambda it: it.lora_rank == 8),
    "RestClient.list_checkpoints": lambda s: ask(s.state.split("/")[2], check=lambda it: it.checkpoints),
    "RestClient.list_sessions": lambda s: ask(check=lambda it: it.sessions),
    "RestClient.list_training_runs": lambda s: ask(check=lambda it: it.training_runs),
    "RestClient.list_user_checkpoints": lambda s: ask(on=kept(s), check=lambda it: it.checkpoints),
    "RestClient.publish_checkpoint_from_tinker_path": lambda s: ask(s.spare()),
    "RestClient.search_sessions": lambda s: ask(types.SessionSearchRequest()),
    "RestClient.set_checkpoint_ttl_from_tinker_path": lambda s: ask(s.spare(), 3600),
    "RestClient.unpublish_checkpoint_from_tinker_path": lambda s: ask(published(s)),
    "RestClient.whoami": lambda s: Ask(by_client=True),
    "AdminClient.get_audit_log": lambda s: NOTHING,
    "AdminClient.get_billing_usage": lambda s: ask(hour(2), hour(1)),
    "AdminClient.get_current_checkpoint_storage_usage": lambda s: NOTHING,
    "AdminClient.get_telemetry": lambda s: NOTHING,
    "mint.apply_auth_patch": lambda s: NOTHING,
    "mint.apply_mint_patches": lambda s: NOTHING,
    "mint.forward_backward_reverse_kl": lambda s: ask(
        s.trainer(), reference_model_path=s.weights, data=kl_data(), check=lambda it: len(it.outputs) == len(desk.ROWS)
    ),
    "mint.interpolate_checkpoints": lambda s: ask(
        s.client,
        source_paths=[s.weights, s.weights],
        coefficients=[0.25, 0.75],
        output_path=s.name(),
        check=lambda it: samples(made(s.client.create_sampling_client(model_path=it.path))),
    ),
    "mint.sync_env": lambda s: NOTHING,
}


def opened(client: Any) -> Any:
    """A client whose session has begun."""
    assert client.holder is not None
    return client


def kept(scene: Scene) -> Any:
    assert scene.state
    return scene.api


def published(scene: Scene) -> str:
    path = scene.spare()
    scene.api.publish_checkpoint_from_tinker_path(path).result()
    return path


@dataclass(frozen=True)
class Variant:
    """A method with arguments. `there`: whether the SDK has them."""

    method: str
    shown: str
    call: Callable[[Scene], Ask]
    there: Callable[[], object] = lambda: True


def losses(*names: str) -> Callable[[], object]:
    return lambda: set(names) <= set(typing.get_args(types.LossFnType))


def has(*names: str) -> Callable[[], object]:
    return lambda: all(hasattr(types, name) for name in names)


def targets(**chosen: bool) -> dict[str, bool]:
    return {"train_attn": False, "train_mlp": False, "train_unembed": False} | chosen


LORA, TRAIN, SAMPLE = "ServiceClient.create_lora_training_client", "TrainingClient.forward_backward", "sample"
CLIPS = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}

VARIANTS = (
    Variant(
        LORA, "train_unembed=True beside others", lambda s: ask(BASE, **targets(train_attn=True, train_unembed=True))
    ),
    Variant(LORA, "train_unembed=True alone", lambda s: ask(BASE, **targets(train_unembed=True))),
    Variant(LORA, "train_attn=True alone", lambda s: ask(BASE, check=desk.forward, **targets(train_attn=True))),
    Variant(LORA, "train_mlp=True alone", lambda s: ask(BASE, check=desk.forward, **targets(train_mlp=True))),
    Variant(LORA, "rank=4096", lambda s: ask(BASE, rank=4096)),
    Variant(LORA, "base_model='no/such'", lambda s: ask("no/such")),
    Variant(
        LORA,
        "optimizer=DimuonOptimizerConfig()",
        lambda s: ask(BASE, optimizer=types.DimuonOptimizerConfig()),
        has("DimuonOptimizerConfig"),
    ),
    Variant(TRAIN, "importance_sampling", lambda s: ask(rewarded(), "importance_sampling", check=trained)),
    Variant(TRAIN, "ppo, with thresholds", lambda s: ask(rewarded(), "ppo", CLIPS, check=trained)),
    Variant(TRAIN, "cispo, with thresholds", lambda s: ask(rewarded(), "cispo", CLIPS, check=trained)),
    Variant(TRAIN, "dro, with beta", lambda s: ask(rewarded(), "dro", {"beta": 0.1}, check=trained)),
    Variant(TRAIN, "dro, without beta", lambda s: ask(rewarded(), "dro")),
    Variant(TRAIN, "gspo", lambda s: ask(rewarded(sequence_ratio_mask=1.0), "gspo", check=trained), losses("gspo")),
    Variant(TRAIN, "stable_reinforce", lambda s: ask(rewarded(), "stable_reinforce"), losses("stable_reinforce")),
    Variant(
        "TrainingClient.forward_backward_custom",
        "a LossHandle",
        lambda s: handled(s),
        lambda: hasattr(sdk, "LossHandle"),
    ),
    Variant(
        "TrainingClient.optim_step",
        "DimuonParams()",
        lambda s: ask(types.DimuonParams(learning_rate=1e-3), on=s.added()),
        has("DimuonParams"),
    ),
    Variant("TrainingClient.optim_step", "without gradients", lambda s: ask(types.AdamParams(learning_rate=1e-3))),
    Variant("TrainingClient.save_state", "ttl_seconds=3600", lambda s: ask("a-state", ttl_seconds=3600)),
    Variant("TrainingClient.save_state", "a taken name", lambda s: ask("kept", on=with_state(s))),
    Variant(
        "TrainingClient.save_state", "overwrite=True", lambda s: ask("over", overwrite=True, on=with_name(s, "over"))
    ),
    Variant("TrainingClient.save_state", "user_metadata", lambda s: ask("a-state", user_metadata={"a": "b"})),
    Variant("TrainingClient.load_state", "weights_access_token", lambda s: ask(s.state, weights_access_token="t")),
    Variant(
        "TrainingClient.save_weights_and_get_sampling_client",
        "kind='inflight'",
        lambda s: ask(kind="inflight"),
    ),
    Variant("SamplingClient.sample", "stop strings", lambda s: stopping(["the", "\n"])),
    Variant("SamplingClient.sample", "stop tokens", lambda s: stopping([2, 11])),
    Variant("SamplingClient.sample", "seed, temperature, top_k, top_p", lambda s: seeded()),
    Variant(
        "SamplingClient.sample",
        "include_prompt_logprobs, topk_prompt_logprobs=2",
        lambda s: drawing(include_prompt_logprobs=True, topk_prompt_logprobs=2),
    ),
    Variant("SamplingClient.sample", "topk_sample_logprobs=2", lambda s: drawing(topk_sample_logprobs=2)),
    Variant("SamplingClient.sample", "prompt_alt_tokens_k=2", lambda s: drawing(prompt_alt_tokens_k=2)),
    Variant(
        "SamplingClient.sample",
        "prompt_logprobs_last_n=2",
        lambda s: drawing(include_prompt_logprobs=True, prompt_logprobs_last_n=2),
    ),
    Variant("SamplingClient.sample", "target_prompt_logprobs", lambda s: drawing(target_prompt_logprobs=wanted())),
    Variant(
        "ServiceClient.create_sampling_client",
        "record_stability_info=True",
        lambda s: ask(base_model=BASE, record_stability_info=True, check=samples),
    ),
    Variant("ServiceClient.create_sampling_client", "a path of training weights", lambda s: ask(model_path=s.state)),
    Variant(
        "RestClient.list_training_runs",
        "project_id",
        lambda s: ask(project_id="a-project"),
    ),
)


def handled(scene: Scene) -> Ask:
    def other(logprobs: Any, weights: Any) -> Any:
        loss = -(2 * logprobs * weights).sum()
        return loss, {"custom/other:sum": loss}

    handle = scene.client.create_custom_loss(other, {"logprobs": 1, "weights": 1}).result()
    return ask(weighted(), handle, check=trained)


def with_state(scene: Scene) -> Any:
    assert scene.state
    return scene.keeper


def with_name(scene: Scene, name: str) -> Any:
    trainer = scene.trainer()
    trainer.save_state(name).result()
    return trainer


def stopping(stop: Any) -> Ask:
    return ask(prompt(ROW), 2, types.SamplingParams(max_tokens=4, stop=stop), check=drawn)


def seeded() -> Ask:
    params = types.SamplingParams(max_tokens=4, seed=7, temperature=0.5, top_k=20, top_p=0.9)
    return ask(prompt(ROW), 2, params, check=drawn)


def wanted() -> Any:
    return types.TensorData(data=[5] * (len(ROW) - 1), dtype="int64", shape=[len(ROW) - 1, 1])
