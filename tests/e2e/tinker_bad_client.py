"""A client that sends bad requests and good ones, and tells refusals from results."""

from __future__ import annotations

import httpx

from tests.e2e.tinker_bad_data import Body, Scene
from tests.e2e.tinker_wire import Wire, datum, forward, sample


class Client:
    """One tenant's client, with a model and a sampler of the base that good requests go to."""

    def __init__(self, wire: Wire) -> None:
        self.wire, self.session_id = wire, wire.session()
        self.model = wire.model(self.session_id)
        self.sampler, self._samples = wire.sampler(self.session_id), 0

    def scene(self) -> Scene:
        return Scene(self.model, self.sampler, self._samples)

    def refusal(self, path: str, body: Body, **headers: str) -> str:
        """The words in which it was refused, or in which its future failed."""
        return self.verdict(self.wire.post(path, body, **headers), path == "asample")

    def verdict(self, answer: httpx.Response, of_a_sample: bool = False) -> str:
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            assert answer.json()["category"] == "user"
            return f"{answer.status_code} {answer.json()['error']}"
        # Its number is used: what comes next must not wait for another.
        if of_a_sample:
            self._samples += 1
        else:
            self.model.next += 1
        found = self.wire.outcome(answer.json()["request_id"])
        assert found.get("category") == "user", found
        return str(found["error"])

    def trains(self) -> None:
        """A good request, and its result."""
        found = self.model.do("forward", forward(datum(1)))
        (output,) = found["loss_fn_outputs"]
        assert output["logprobs"]["shape"] == [6]

    def samples(self) -> None:
        request_id = self.wire.send("asample", sample(self.sampler, self._samples))["request_id"]
        self._samples += 1
        assert self.wire.result(request_id)["sequences"]
