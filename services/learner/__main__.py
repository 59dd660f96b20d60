"""`python -m services.learner`: the base models resident, their policies trained.

Under `torchrun --nproc-per-node N -m services.learner` N processes share the base models; the first one is
the service, the others follow it.
"""

from __future__ import annotations

from functools import partial

from services.learner.app import build, follow_bench
from services.learner.config import LearnerSettings
from services.learner.follower import run_follower
from services.learner.ranks import join
from shared.service import run_service


def main() -> None:
    settings = LearnerSettings()
    ranks = join(settings.learner_device)
    if ranks is not None and not ranks.leads:
        run_follower(ranks, settings.log_level, follow_bench)
    run_service("learner", settings, partial(build, ranks=ranks))


if __name__ == "__main__":
    main()
