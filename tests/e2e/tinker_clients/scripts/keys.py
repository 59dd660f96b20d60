"""Who a key is: what it may begin, as whom, and what a key that nobody made may not."""

from __future__ import annotations

import desk
from desk import failure, forward, rest, service, trainer_of


def main():
    client = service()
    trainer = trainer_of(client)
    api = rest(client)
    desk.tell(
        {
            "rows": len(forward(trainer)),
            "owner": api.get_training_run(trainer.model_id).result().model_owner,
            "whoami": api.whoami().result().org_urn if desk.LATER else None,
            "unknown": failure(lambda: trainer_of(service("tml-nobody-made-this"))),
        }
    )


main()
