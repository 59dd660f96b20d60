"""Workers: commands in, committed results and their events out."""

from .answered import until_answered
from .faults import Faults
from .files import AttemptFiles
from .lease import LeaseLost, LeaseView
from .runner import Job, serve_commands

__all__ = ["AttemptFiles", "Faults", "Job", "LeaseLost", "LeaseView", "serve_commands", "until_answered"]
