"""The parts of `loadtests/learner.py`."""
