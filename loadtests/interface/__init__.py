"""The parts of `loadtests/tinker.py`."""
